"""config.json in and out: published files give the presets, and what the decoder does not compute is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.config.errors import ConfigError
from fivefold.config.families import FAMILIES
from fivefold.config.huggingface import config_json, nearest_architecture, read_model
from fivefold.config.load import load, preset_names
from fivefold.config.model import Model
from fivefold.nn.hub.names import TABLES, places
from fivefold.spec.parameters import parameters, total

# The keys of the published files that matter, as they are written there.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "llama3-8b": {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
    "gpt2": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "bloom-176b": {
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_embed": 14336,
        "n_layer": 70,
        "num_attention_heads": 112,
        "vocab_size": 250880,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "aux_loss_alpha": 0.0001,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "yarn", "factor": 40},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}
PLANNED_ONLY = {"bloom-176b", "deepseek-v3", "gpt3-175b"}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_the_presets(tmp_path: Path, name: str) -> None:
    (tmp_path / "preset.toml").write_text(f'[model]\npreset = "{name}"\n')
    (tmp_path / "path.toml").write_text(f'[model]\npath = "{written(tmp_path, PUBLISHED[name])}"\n')
    expected, found = load(str(tmp_path / "preset.toml")).model, load(str(tmp_path / "path.toml")).model
    experts = replace(expected.experts, bias_update_rate=0.0)  # no file says it
    assert replace(found, path="") == replace(expected, preset="", experts=experts)


@pytest.mark.parametrize("name", sorted(set(preset_names("models")) - PLANNED_ONLY))
def test_presets_have_a_config_json_that_gives_them_back(tmp_path: Path, name: str) -> None:
    (tmp_path / "preset.toml").write_text(f'[model]\npreset = "{name}"\n')
    model = load(str(tmp_path / "preset.toml")).model
    theirs = config_json(model)
    assert theirs is not None
    again = read_model(written(tmp_path, theirs))
    assert total(again) == total(model)
    assert config_json(again) == theirs


@pytest.mark.parametrize(
    "change", [{"activation": "gelu"}, {"qkv_bias": True, "qk_norm": True}, {"embedding_norm": True}]
)
def test_a_model_that_no_family_computes_has_no_config_json(change: dict[str, Any]) -> None:
    assert config_json(Model(**change)) is None


def test_biases_are_written_as_the_family_that_has_them() -> None:
    for change, expected in (
        ({"qkv_bias": True}, "qwen2"),
        ({"qkv_bias": True, "output_bias": True}, "llama"),
        ({"qk_norm": True}, "qwen3"),
    ):
        theirs = config_json(Model(**change))
        assert theirs is not None
        assert theirs["model_type"] == expected
    assert nearest_architecture(Model(output_bias=True)) == (
        "MistralForCausalLM comes nearest, but not with model.output_bias = true"
    )
    assert nearest_architecture(Model(qkv_bias=True, qk_norm=True)) == (
        "Qwen2ForCausalLM comes nearest, but not with model.qk_norm = true"
    )


@pytest.mark.parametrize("name", sorted(set(PUBLISHED) - PLANNED_ONLY))
def test_every_parameter_has_a_place(tmp_path: Path, name: str) -> None:
    model_type, model = PUBLISHED[name]["model_type"], read_model(written(tmp_path, PUBLISHED[name]))
    found = [place for spec in parameters(model) for place in places(model_type, spec)]
    assert len({(place.name, place.part) for place in found}) == len(found)


LLAMA = PUBLISHED["llama2-7b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], 'no "model_type"'),
        ({"model_type": "llamma"}, 'did you mean "llama"?'),
        ({"model_type": "t5gemma9"}, "is not known here"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size is missing"),
        (LLAMA | {"attention_bias": True}, "attention_bias = true: not computed here; expected false"),
        (LLAMA | {"hidden_act": "relu"}, 'hidden_act = "relu": not computed here; expected "silu"'),
        (LLAMA | {"rope_scaling": {"type": "yarn"}}, 'rope_type = "yarn"'),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, "sliding_window = 4096"),
        (PUBLISHED["gpt2"] | {"activation_function": ["x"]}, 'activation_function = ["x"]'),
        (PUBLISHED["gpt2"] | {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx = true"),
        (LLAMA | {"hidden_size": "wide"}, 'config.json: hidden_size = "wide": expected a whole number'),
        (LLAMA | {"num_hidden_layers": True}, "config.json: num_hidden_layers = true: expected a whole"),
        (LLAMA | {"tie_word_embeddings": "no"}, 'tie_word_embeddings = "no": expected true or false'),
        (LLAMA | {"rope_theta": 0}, "config.json: rope_theta = 0: expected a number > 0.0"),
        (LLAMA | {"rope_scaling": "x"}, 'rope_scaling = "x": expected an object'),
        (LLAMA | {"rope_parameters": [1]}, "rope_parameters = [1]: expected an object"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 0.5}},
            "config.json: factor = 0.5: expected a number ≥ 1.0",
        ),
        (PUBLISHED["gpt2"] | {"n_embd": None, "n_inner": None}, "n_embd is missing"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    (tmp_path / "c.toml").write_text(f'[model]\npath = "{written(tmp_path, content)}"\n')
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "c.toml"))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        read_model(tmp_path)
    assert says in str(caught.value)


def bloom(**changes: Any) -> dict[str, Any]:
    return {"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 256} | changes


SHARED = {"n_shared_experts": 1, "shared_expert_intermediate_size": None}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (LLAMA | {"hidden_size": float("inf")}, "hidden_size = Infinity: expected a finite number"),
        (LLAMA | {"rms_norm_eps": float("inf")}, "rms_norm_eps = Infinity: expected a finite number"),
        (LLAMA | {"rope_theta": float("nan")}, "rope_theta = NaN: expected a finite number"),
        (
            LLAMA | {"rope_parameters": {"rope_theta": 2**70}},
            f"rope_theta = {2**70}: expected a whole number of",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": float("inf")}},
            "factor = Infinity: expected a finite number",
        ),
        (LLAMA | {"vocab_size": 2**70}, f"vocab_size = {2**70}: expected a whole number of at most 64 bits"),
        (LLAMA | {"vocab_size": -(2**70)}, "expected a whole number of at most 64 bits"),
        (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers = -1: expected a whole number ≥ 1"),
        (
            LLAMA | {"hidden_size": "4\n96"},
            'hidden_size = "4\\n96": expected text without control characters',
        ),
        (
            LLAMA | {"hidden_size": "\ud800"},
            'hidden_size = "\\ud800": expected text without control characters',
        ),
        (LLAMA | {"hidden_act": "x" * 300}, 'x": not computed here'),
        (LLAMA | {"initializer_range": "0.02"}, 'initializer_range = "0.02": expected a number'),
        (PUBLISHED["gpt2"] | {"n_embd": "768"}, 'n_embd = "768": expected a whole number'),
        (PUBLISHED["gpt2"] | {"n_embd": {"a": 1}}, 'n_embd = {"a": 1}: expected a whole number'),
        (
            PUBLISHED["gpt2"] | {"n_embd": 1 << 62},
            f"n_inner follows from the other sizes as {1 << 64}: expected",
        ),
        (bloom(hidden_size="64"), 'hidden_size = "64": expected a whole number'),
        (bloom(hidden_size=None, n_embed=[64]), "n_embed = [64]: expected a whole number"),
        (
            PUBLISHED["deepseek-v3"] | SHARED | {"n_shared_experts": -5},
            "n_shared_experts = -5: expected a whole",
        ),
        (PUBLISHED["deepseek-v3"] | SHARED | {"n_shared_experts": "1"}, 'n_shared_experts = "1": expected a'),
        (
            PUBLISHED["deepseek-v3"] | SHARED | {"n_shared_experts": True},
            "n_shared_experts = true: expected a",
        ),
    ],
)
def test_numbers_beyond_any_range_are_refused_by_file_and_key(
    tmp_path: Path, content: dict[str, Any], says: str
) -> None:
    test_what_is_not_computed_is_refused(tmp_path, content, says)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load(str(tmp_path / "c.toml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": "llama", "hidden_size": 1e400}', "hidden_size = Infinity: expected a finite number"),
        ("[" * 100_000, "not JSON: "),
        ('{"model_type": "llama"', "not JSON: "),
    ],
)
def test_a_text_that_is_no_such_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert says in str(caught.value)


def test_what_no_model_follows_from_may_be_anything(tmp_path: Path) -> None:
    """Infinity is in published files, as a limit; some begin with a byte-order mark."""
    path = written(tmp_path, LLAMA | {"time_limit": [0.0, float("inf")]})
    path.write_text("\ufeff" + path.read_text())
    assert read_model(path) == read_model(written(tmp_path, LLAMA))


def test_a_value_that_no_file_gives_is_not_laid_to_config_json(tmp_path: Path) -> None:
    """The name of a run follows from the name of its config."""
    config = tmp_path / "a\\b.toml"
    config.write_text(f'[model]\npath = "{written(tmp_path, LLAMA)}"\n')
    with pytest.raises(ConfigError, match=r'b\.toml: run\.name = "a\\\\b": expected text without a slash'):
        load(str(config))


def test_keys_written_beside_a_path_count_more(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    (tmp_path / "c.toml").write_text(f'[model]\npath = "{path}"\nlayers = 3\n')
    assert load(str(tmp_path / "c.toml")).model.layers == 3
    assert load(str(tmp_path / "c.toml"), ["model.layers=5"]).model.layers == 5
    with pytest.raises(ConfigError, match=r"--set .*: model\.layers = 0: expected"):
        load(str(tmp_path / "c.toml"), ["model.layers=0"])
    with pytest.raises(ConfigError, match=r"c\.toml:2: model\.path = .*: model\.preset is given, too"):
        load(str(tmp_path / "c.toml"), ["model.preset=gpt2"])
    with pytest.raises(ConfigError, match=r"--set .*: model\.path = .*: cannot be read: No such file"):
        load("quickstart", [f"model.path={tmp_path}/none"])


def test_the_tables_know_the_same_families() -> None:
    assert set(TABLES) == set(FAMILIES) - {"bloom", "deepseek_v3"}
