"""Presets: parameter counts to the last one, cluster files that load and name their sources."""

from pathlib import Path

import pytest

from fivefold.config.errors import ConfigError
from fivefold.config.load import load, preset_names
from fivefold.config.model import Model
from fivefold.config.tree import Cluster
from fivefold.ledger import hardware
from fivefold.spec.parameters import active, total

# As counted from the published weights: Hugging Face safetensors totals; formulas.md §3 for nine of them.
COUNTS = {
    "bloom-176b": 176_247_271_424,
    "deepseek-v3": 671_026_404_352,  # 671,026,419,200 with the 58 · 256 selection biases, which are not trained
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}


def model(tmp_path: Path, name: str) -> Model:
    (tmp_path / "c.toml").write_text(f'[model]\npreset = "{name}"\n')
    return load(str(tmp_path / "c.toml")).model


def test_every_model_preset_is_counted() -> None:
    assert set(preset_names("models")) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_exact(tmp_path: Path, name: str) -> None:
    assert total(model(tmp_path, name)) == COUNTS[name]


def test_active_parameters(tmp_path: Path) -> None:
    """Memory goes by total, FLOPs by active parameters (llmfit#230)."""
    assert active(model(tmp_path, "mixtral-8x7b")) == 12_879_925_248
    assert active(model(tmp_path, "qwen3-30b-a3b")) == 3_353_032_704
    assert active(model(tmp_path, "deepseek-v3")) == pytest.approx(37.5e9, rel=0.01)


@pytest.mark.parametrize("kind", preset_names("clusters"))
def test_cluster_presets_load_and_name_their_sources(kind: str) -> None:
    found = hardware.preset(f"2x4 {kind}")
    assert found.devices == 8
    assert {"memory", "bandwidth", "peak", "matmul", "attention", "node", "network", "latency"} <= set(
        found.sources
    )
    assert all(found.sources.values())
    for precision in ("bf16", "fp16", "fp8", "float32", "float64"):
        assert 0 < found.device.matmul_of(precision) <= found.device.peak_of(precision)


@pytest.mark.parametrize("text", ["h100", "0x8 h100", "8", "8xx h100", "2x8 h101"])
def test_bad_cluster_presets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.preset"):
        hardware.load_hardware(Cluster(preset=text))
