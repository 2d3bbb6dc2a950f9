"""Estimates of any layout hold together, and every refusal is one line with a number."""

import dataclasses
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.config.errors import BadInput
from fivefold.config.load import load, preset_names
from fivefold.config.tree import Parallel
from fivefold.ledger.total import estimate
from fivefold.planner.document import document, reason
from fivefold.planner.explain import explain, lines
from fivefold.planner.jobs import job_of

degree = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
KEYS: dict[str, Any] = {
    "parallel.pp": degree,
    "parallel.cp": degree,
    "parallel.tp": degree,
    "parallel.ep": degree,
    "parallel.zero": st.sampled_from([0, 1, 2, 3]),
    "parallel.sequence_parallel": st.sampled_from(["true", "false"]),
    "parallel.schedule": st.sampled_from(
        ["gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "dualpipev"]
    ),
    "parallel.chunks": st.sampled_from([1, 2, 3]),
    "parallel.recompute": st.sampled_from(["none", "attention", "elementwise", "full"]),
    "parallel.context": st.sampled_from(["ring", "ulysses"]),
    "batch.sequence_length": st.sampled_from([128, 512, 1000]),
    "batch.global_batch": st.sampled_from([8, 24, 48, 96]),
    "batch.micro_batch": st.sampled_from([1, 2, 3]),
    "precision.dtype": st.sampled_from(["float64", "float32", "bf16", "fp16"]),
}
MODELS = [name for name in preset_names("models") if name not in ("bloom-176b", "gpt3-175b")]


def check_refusal(text: str) -> None:
    """One line with a number, and a value that would be legal there."""
    assert "\n" not in text
    assert any(letter.isdigit() for letter in text)
    assert re.search(r"nearest legal|; set |expected at most|; use |fill 1 to", text), text


@settings(max_examples=60, deadline=None)
@given(
    model=st.sampled_from(MODELS),
    nodes=st.sampled_from([1, 2, 3, 4, 8]),
    kind=st.sampled_from(preset_names("clusters")),
    keys=st.fixed_dictionaries(KEYS),
)
def test_parts_sum_up_or_the_refusal_has_a_number(
    model: str, nodes: int, kind: str, keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(f'[model]\npreset = "{model}"\n[cluster]\npreset = "{nodes}x8 {kind}"\n')
    replicas = ["parallel.dp_replicate=-1", "parallel.dp_shard=1"] if keys["parallel.zero"] == 0 else []
    refused = ""
    try:
        job = job_of(load(str(path), [f"{key}={value}" for key, value in keys.items()] + replicas))
    except BadInput as refusal:
        refused = str(refusal)
    if refused:
        check_refusal(refused)
        return
    ledger = estimate(job)
    found = document(ledger)
    assert "NaN" not in json.dumps(found)
    time = found["time"]
    assert all(value >= -1e-12 for value in time.values())
    assert sum(value for name, value in time.items() if name != "step") == pytest.approx(time["step"])
    assert 0 < found["mfu"] < found["hfu"] + 1e-12 < 1
    assert found["fits"] == (found["memory"]["peak"] <= found["memory"]["capacity"])
    assert sum(item["layers"] for item in found["rank_classes"]) == job.model.layers
    for row in found["traffic"]:
        assert 0 <= row["exposed_seconds"] <= row["seconds"] * (1 + 1e-9)
        assert row["wire_bytes"] <= 2 * row["bytes_per_rank"]
    for line in lines(ledger):
        assert "source:" in explain(ledger, line)


SWITCHES: dict[str, tuple[Any, Any]] = {
    "pp": (1, 2),
    "dp_replicate": (1, 2),
    "cp": (1, 2),
    "tp": (1, 2),
    "ep": (1, 2),
    "zero": (0, 3),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "dualpipev"),
    "recompute": ("none", "full"),
}


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
def test_every_switch_on_or_off(model: str, tmp_path: Path) -> None:
    """All on/off combinations of the axes: an estimate, or a refusal with a number and a legal neighbour."""
    (tmp_path / "c.toml").write_text(
        f'[model]\npreset = "{model}"\n[cluster]\npreset = "4x8 h100"\n[batch]\nglobal_batch = 32\n'
    )
    base = load(str(tmp_path / "c.toml"))
    estimated = 0
    for values in product(*SWITCHES.values()):
        parallel = Parallel(**dict(zip(SWITCHES, values, strict=True)))
        try:
            job = job_of(replace(base, parallel=parallel))
        except BadInput as refusal:
            check_refusal(str(refusal))
            continue
        estimated += 1
        assert estimate(job).time.step > 0
    assert estimated >= 32


@pytest.mark.parametrize(("margin", "says"), [(1.2, "fits"), (1.01, "closer than peaks"), (0.99, "missing")])
def test_says_where_a_fit_is_closer_than_peaks_are_predicted(margin: float, says: str) -> None:
    job = job_of(load("quickstart"))
    memory = round(estimate(job).fullest.memory.peak * margin)
    device = replace(job.hardware.device, memory=memory)
    text = reason(estimate(dataclasses.replace(job, hardware=replace(job.hardware, device=device))))
    assert says in text
    assert ("closer" in text) == (margin == 1.01)
