"""Layouts in the words of peers, and back; checked by the peers' own parsers where those are installed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main
from fivefold.config.huggingface import read_model
from fivefold.config.load import load, preset_names
from fivefold.planner import importing
from fivefold.spec.parameters import total

CONFIG = """
[model]
preset = "llama3-8b"
[cluster]
preset = "2x8 h100"
[batch]
global_batch = 64
sequence_length = 8192
[precision]
dtype = "bf16"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "c.toml").write_text(CONFIG)
    return str(tmp_path / "c.toml")


def emitted(capsys: Any, config: str, peer: str, *keys: str) -> tuple[str, str]:
    words = [word for key in keys for word in ("--set", key)]
    assert main(["plan", config, "--emit", peer, *words]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_deepspeed(capsys: Any, config: str, tmp_path: Path) -> None:
    out, err = emitted(capsys, config, "deepspeed", "parallel.zero=3", "parallel.tp=2", "parallel.pp=1")
    found = json.loads(out)
    assert found["zero_optimization"]["stage"] == 3
    assert found["train_batch_size"] == 64
    assert found["tensor_parallel"] == {"autotp_size": 2}
    _, err = emitted(capsys, config, "deepspeed", "parallel.pp=4")
    assert "pp = 4" in err
    (tmp_path / "ds.json").write_text(out)
    code = main(["estimate", config, "--from-deepspeed", str(tmp_path / "ds.json"), "--json"])
    back = json.loads(capsys.readouterr().out)
    assert code in (0, 1)
    assert back["world_size"] == 16


class DataParallelOf:
    """What DeepSpeed asks a model-parallel unit for."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def get_data_parallel_world_size(self) -> int:
        return self.ranks


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deepspeeds_own_parser(capsys: Any, config: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (f"parallel.zero={zero}", "parallel.pp=1", "parallel.tp=2", "parallel.cp=1")
    found = json.loads(emitted(capsys, config, "deepspeed", *keys, "model.preset=qwen2.5-0.5b")[0])
    theirs = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(
        theirs.dist, "get_rank", lambda: 0
    )  # without a launcher it takes the world for one rank
    parsed = theirs.DeepSpeedConfig(found, mpu=DataParallelOf(8))
    assert parsed.zero_optimization_stage == zero
    assert parsed.train_batch_size == 64
    assert parsed.tensor_parallel_config.autotp_size == 2
    assert parsed.bfloat16_config.enabled


def test_accelerate(capsys: Any, config: str, tmp_path: Path) -> None:
    out, _ = emitted(capsys, config, "accelerate", "parallel.zero=3", "parallel.pp=1", "parallel.tp=2")
    assert "distributed_type: FSDP" in out
    (tmp_path / "a.yaml").write_text(out)
    main(["estimate", config, "--from-accelerate", str(tmp_path / "a.yaml"), "--json"])
    assert any(row["axis"] == "tp" for row in json.loads(capsys.readouterr().out)["traffic"])
    plain = tmp_path / "plain.yaml"
    sizes = "  parallelism_config_dp_replicate_size: 4\n  parallelism_config_tp_size: 4\n"
    plain.write_text(f"distributed_type: MULTI_GPU\nparallelism_config:\n{sizes}")
    assert importing.accelerate(plain) == [
        "parallel.zero=0",
        "parallel.dp_replicate=4",
        "parallel.dp_shard=1",
        "parallel.tp=4",
    ]
    shards = re.search(r"dp_shard_size: (\d+)", out)
    assert shards
    assert f"parallel.dp_shard={shards[1]}" in importing.accelerate(tmp_path / "a.yaml")  # on any cluster
    accelerate = pytest.importorskip("accelerate.commands.config.config_args")
    loaded = accelerate.ClusterConfig.from_yaml_file(str(tmp_path / "a.yaml"))
    assert loaded.num_processes == 16
    assert loaded.fsdp_config["fsdp_version"] == 2


def test_torchtitan(capsys: Any, config: str) -> None:
    out, _ = emitted(capsys, config, "torchtitan", "parallel.pp=2", "parallel.schedule=zbv")
    flags = dict(line.removesuffix(" \\").removeprefix("--").partition(" ")[::2] for line in out.splitlines())
    assert flags["parallelism.pipeline_parallel_schedule"] == "ZBVZeroBubble"
    product = 1
    for axis in ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "context_parallel"):
        product *= int(flags[f"parallelism.{axis}_degree"])
    assert product * int(flags["parallelism.pipeline_parallel_degree"]) == 16
    theirs = pytest.importorskip("torchtitan.config.configs")
    for section, known in (("training", theirs.TrainingConfig), ("parallelism", theirs.ParallelismConfig)):
        named = {key.partition(".")[2].removeprefix("no-") for key in flags if key.startswith(section)}
        assert named <= set(known.__dataclass_fields__)
        values = {
            key.partition(".")[2]: value for key, value in flags.items() if key.startswith(section + ".")
        }
        typed = {name: int(value) for name, value in values.items() if value.isdigit()}
        assert all(getattr(known(**typed), name) == value for name, value in typed.items())


def test_megatron(capsys: Any, config: str) -> None:
    out, err = emitted(capsys, config, "megatron", "parallel.pp=2", "parallel.schedule=zbv", "parallel.tp=2")
    assert "--tensor-model-parallel-size 2" in out
    assert "--num-query-groups 8" in out
    assert "zbv" in err


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("recompute", ["none", "attention", "elementwise", "full"])
def test_megatrons_own_config(capsys: Any, config: str, model: str, recompute: str) -> None:
    """Of the arguments those that are fields of the core's config; its checks run when it is made. The argument
    parser itself is in no package."""
    keys = (f"model.preset={model}", f"parallel.recompute={recompute}", "parallel.tp=2", "parallel.pp=2",
            "parallel.sequence_parallel=true", "parallel.schedule=1f1b")  # fmt: skip
    out, _ = emitted(capsys, config, "megatron", *keys)
    theirs = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    values: dict[str, Any] = {}
    name = ""
    for word in out.replace("\\", " ").split():
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            values[name] = True
        elif name == "recompute_modules":
            values[name] = [*(values[name] if values[name] is not True else []), word]
        else:
            values[name] = int(word) if word.isdigit() else word
    values["num_moe_experts"] = values.pop("num_experts", None)
    values |= {
        "pipeline_dtype": theirs.__dataclass_fields__["params_dtype"].default,
        "add_bias_linear": False,
    }
    made = theirs(**{key: value for key, value in values.items() if key in theirs.__dataclass_fields__})
    assert (made.tensor_model_parallel_size, made.pipeline_model_parallel_size) == (2, 2)
    assert made.num_moe_experts == (128 if "30b" in model else None)


HF: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
    "deepseek-v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_hugging_face_models_are_the_presets(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096} | HF[name]))
    (tmp_path / "c.toml").write_text(f'[model]\npreset = "{name}"\n')
    assert name in preset_names("models")
    assert total(read_model(tmp_path)) == total(load(str(tmp_path / "c.toml")).model)


def test_foreign_files_are_refused_in_one_line(config: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "bad.yaml").write_text("no colon here\n")
    (tmp_path / "other.yaml").write_text("services:\n  web: 1\n")
    (tmp_path / "section.json").write_text('{"zero_optimization": 3}')
    for words in (
        ["--from-hf", str(tmp_path)],
        ["--from-deepspeed", str(tmp_path / "none.json")],
        ["--from-deepspeed", str(tmp_path / "section.json")],
        ["--from-accelerate", str(tmp_path / "bad.yaml")],
        ["--from-accelerate", str(tmp_path / "other.yaml")],
    ):
        assert main(["estimate", config, *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
