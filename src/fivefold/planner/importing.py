"""Configs of others as ours: Hugging Face models, accelerate and DeepSpeed layouts."""

import json
from pathlib import Path
from typing import Any

from fivefold.config.errors import BadInput
from fivefold.config.tree import Experts, LatentAttention, Model

FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gpt2",
    "bloom",
    "deepseek_v3",
)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected an object")
    return found


def hugging_face(path: Path) -> Model:
    """The model of a config.json (or of the directory that holds one). Raises BadInput: an unknown family."""
    if path.is_dir():
        path = path / "config.json"
    raw = _read_json(path)
    family = raw.get("model_type", "")
    if family not in FAMILIES:
        raise BadInput(f'{path}: model_type "{family}": known: {", ".join(FAMILIES)}')
    try:
        return {"gpt2": _gpt2, "bloom": _bloom}.get(family, _llama)(raw)
    except KeyError as key:
        raise BadInput(f"{path}: {key} is missing") from None


def _gpt2(raw: dict[str, Any]) -> Model:
    return Model(
        layers=raw["n_layer"],
        hidden=raw["n_embd"],
        heads=raw["n_head"],
        ffn=raw.get("n_inner") or 4 * raw["n_embd"],
        vocab=raw["vocab_size"],
        max_positions=raw.get("n_positions", 1024),
        tied=True,
        activation="gelu_tanh",
        norm="layernorm",
        qkv_bias=True,
        output_bias=True,
        positions="learned",
    )


def _bloom(raw: dict[str, Any]) -> Model:
    hidden = raw.get("hidden_size") or raw["n_embed"]
    return Model(
        layers=raw.get("n_layer") or raw["num_hidden_layers"],
        hidden=hidden,
        heads=raw.get("n_head") or raw["num_attention_heads"],
        ffn=4 * hidden,
        vocab=raw["vocab_size"],
        tied=True,
        activation="gelu_tanh",
        norm="layernorm",
        qkv_bias=True,
        output_bias=True,
        embedding_norm=True,
        positions="alibi",
    )


def _llama(raw: dict[str, Any]) -> Model:
    family = raw["model_type"]
    latent = family == "deepseek_v3"
    return Model(
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        heads=raw["num_attention_heads"],
        kv_heads=0 if latent else raw.get("num_key_value_heads") or 0,
        head_dim=0 if latent else raw.get("head_dim") or 0,
        ffn=raw["intermediate_size"],
        vocab=raw["vocab_size"],
        max_positions=raw.get("max_position_embeddings", 131072),
        tied=bool(raw.get("tie_word_embeddings", False)),
        norm_eps=raw.get("rms_norm_eps", 1e-5),
        qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
        qk_norm=family.startswith("qwen3"),
        rope_theta=raw.get("rope_theta") or 10000.0,
        experts=_experts(raw),
        latent=_latent(raw) if latent else LatentAttention(),
    )


def _experts(raw: dict[str, Any]) -> Experts:
    count = raw.get("num_local_experts") or raw.get("n_routed_experts") or raw.get("num_experts") or 0
    if not count:
        return Experts()
    width = raw.get("moe_intermediate_size") or raw["intermediate_size"]
    sigmoid = raw["model_type"] == "deepseek_v3"
    return Experts(
        count=count,
        top_k=raw["num_experts_per_tok"],
        ffn=width,
        shared_ffn=(raw.get("n_shared_experts") or 0) * width,
        dense_layers=raw.get("first_k_dense_replace") or 0,
        router="sigmoid" if sigmoid else "softmax",
        router_bias=sigmoid,
    )


def _latent(raw: dict[str, Any]) -> LatentAttention:
    return LatentAttention(
        q_rank=raw.get("q_lora_rank") or 0,
        kv_rank=raw["kv_lora_rank"],
        nope_dim=raw["qk_nope_head_dim"],
        rope_dim=raw["qk_rope_head_dim"],
        value_dim=raw["v_head_dim"],
    )


def deepspeed(path: Path) -> list[str]:
    """Overrides of a DeepSpeed config, as `--set` takes them."""
    raw = _read_json(path)
    stage = raw.get("zero_optimization", {}).get("stage", 0)
    found = [f"parallel.zero={stage}", f"parallel.{'dp_shard' if stage else 'dp_replicate'}=-1"]
    if not stage:
        found.append("parallel.dp_shard=1")
    if isinstance(micro := raw.get("train_micro_batch_size_per_gpu"), int):
        found.append(f"batch.micro_batch={micro}")
    if isinstance(batch := raw.get("train_batch_size"), int):
        found.append(f"batch.global_batch={batch}")
    for precision in ("bf16", "fp16"):
        if raw.get(precision, {}).get("enabled") is True:
            found.append(f"precision.dtype={precision}")
    if tp := raw.get("tensor_parallel", {}).get("autotp_size"):
        found.append(f"parallel.tp={tp}")
    return found


def accelerate(path: Path) -> list[str]:
    """Overrides of an accelerate config (its YAML: keys and values, one level of sections; or JSON)."""
    raw = _read_json(path) if path.suffix == ".json" else _flat_yaml(path)
    fsdp = raw.get("fsdp_config", {})
    axes = raw.get("parallelism_config", {})
    sharded = raw.get("distributed_type") == "FSDP"
    reshard = str(fsdp.get("fsdp_reshard_after_forward", "true")).lower() in ("true", "full_shard")
    found = [f"parallel.zero={(3 if reshard else 2) if sharded else 0}"]
    for name, axis in (("dp_replicate", "dp_replicate"), ("tp", "tp"), ("cp", "cp")):
        if (degree := axes.get(f"parallelism_config_{name}_size")) is not None:
            found.append(f"parallel.{axis}={degree}")
    found.append(f"parallel.{'dp_shard' if sharded else 'dp_replicate'}=-1")
    if not sharded:
        found.append("parallel.dp_shard=1")
    if str(fsdp.get("fsdp_activation_checkpointing", "")).lower() == "true":
        found.append("parallel.recompute=full")
    if raw.get("mixed_precision") in ("bf16", "fp16"):
        found.append(f"precision.dtype={raw['mixed_precision']}")
    return found


def _flat_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    found: dict[str, Any] = {}
    section = found
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, colon, value = line.strip().partition(":")
        if not colon:
            raise BadInput(f'{path}:{number}: expected "key: value", as accelerate config writes')
        value = value.strip().strip("'\"")
        if not line.startswith(" "):
            section = found
        if value:
            section[key] = value
        elif not line.startswith(" "):
            section = found[key] = {}
    return found
