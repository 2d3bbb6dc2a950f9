"""Layouts of others as ours: accelerate and DeepSpeed."""

import json
from pathlib import Path
from typing import Any

from fivefold.config.errors import BadInput


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected an object")
    return found


def _section(path: Path, raw: dict[str, Any], name: str) -> dict[str, Any]:
    found = raw.get(name, {})
    if not isinstance(found, dict):
        raise BadInput(f"{path}: {name} = {found!r}: expected a section of keys")
    return found


def _check_known(path: Path, raw: dict[str, Any], known: tuple[str, ...]) -> None:
    if not set(known) & set(raw):
        raise BadInput(f"{path}: none of the keys read here ({', '.join(known)}); is it such a config?")


def deepspeed(path: Path) -> list[str]:
    """Overrides of a DeepSpeed config, as `--set` takes them."""
    raw = _read_json(path)
    _check_known(
        path, raw, ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16")
    )
    stage = _section(path, raw, "zero_optimization").get("stage", 0)
    found = [f"parallel.zero={stage}", f"parallel.{'dp_shard' if stage else 'dp_replicate'}=-1"]
    if not stage:
        found.append("parallel.dp_shard=1")
    if isinstance(micro := raw.get("train_micro_batch_size_per_gpu"), int):
        found.append(f"batch.micro_batch={micro}")
    if isinstance(batch := raw.get("train_batch_size"), int):
        found.append(f"batch.global_batch={batch}")
    for precision in ("bf16", "fp16"):
        if _section(path, raw, precision).get("enabled") is True:
            found.append(f"precision.dtype={precision}")
    if tp := _section(path, raw, "tensor_parallel").get("autotp_size"):
        found.append(f"parallel.tp={tp}")
    return found


def accelerate(path: Path) -> list[str]:
    """Overrides of an accelerate config (its YAML: keys and values, one level of sections; or JSON)."""
    raw = _read_json(path) if path.suffix == ".json" else _flat_yaml(path)
    _check_known(path, raw, ("distributed_type", "fsdp_config", "parallelism_config", "mixed_precision"))
    fsdp, axes = _section(path, raw, "fsdp_config"), _section(path, raw, "parallelism_config")
    sharded = raw.get("distributed_type") == "FSDP"
    reshard = str(fsdp.get("fsdp_reshard_after_forward", "true")).lower() in ("true", "full_shard")
    found = [f"parallel.zero={(3 if reshard else 2) if sharded else 0}"]
    degrees = {"dp_shard": "-1"} if sharded else {"dp_replicate": "-1", "dp_shard": "1"}
    for axis in ("dp_replicate", "dp_shard", "tp", "cp"):
        if (degree := axes.get(f"parallelism_config_{axis}_size")) is not None:
            degrees[axis] = str(degree)
    found += [f"parallel.{axis}={degree}" for axis, degree in degrees.items()]
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
