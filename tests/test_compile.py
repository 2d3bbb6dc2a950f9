"""machine.compile: refused without a compiler, and the same numbers in every layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.cli.main import main
from fivefold.config.load import load
from fivefold.config.model import Experts, Model
from fivefold.config.tree import Config, Machine, Parallel
from fivefold.proof.verify import Verifier
from ranks import Ranks
from test_parity import check, check_replicas
from toy import MODEL, reference, toy_config, train_on_ranks


def test_without_a_compiler_it_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["train", "quickstart", "--set", "machine.compile=true"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "machine.compile = true: no C++ compiler here (no-such-compiler)" in error
    assert list(tmp_path.iterdir()) == []


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(8, backend=None) as started:
        yield started


EXPERTS = Experts(
    count=4, top_k=2, ffn=16, shared_ffn=12, dense_layers=1, auxiliary_loss=0.1, router_bias=True
)
DENSE = replace(MODEL, layers=4, dropout=0.1)
SPARSE = replace(DENSE, experts=EXPERTS)
LAYOUTS: dict[str, tuple[int, Model, dict[str, Any]]] = {
    "one rank": (1, DENSE, {}),
    "one rank, full": (1, DENSE, {"recompute": "full"}),
    "zero 1, elementwise": (2, DENSE, {"zero": 1, "recompute": "elementwise"}),
    "zero 2, full": (2, DENSE, {"zero": 2, "recompute": "full"}),
    "zero 3, attention": (2, DENSE, {"zero": 3, "recompute": "attention"}),
    "tp": (2, DENSE, {"tp": 2, "recompute": "attention"}),
    "tp, elementwise": (2, DENSE, {"tp": 2, "recompute": "elementwise"}),
    "sequence parallel": (2, DENSE, {"tp": 2, "sequence_parallel": True, "recompute": "full"}),
    "ring": (2, replace(DENSE, qk_norm=True), {"cp": 2, "zero": 3}),
    "Ulysses": (2, DENSE, {"cp": 2, "context": "ulysses", "recompute": "full"}),
    "1F1B": (2, DENSE, {"pp": 2}),
    "GPipe": (2, DENSE, {"pp": 2, "schedule": "gpipe", "recompute": "full"}),
    "interleaved": (2, SPARSE, {"pp": 2, "schedule": "interleaved", "chunks": 2}),
    "interleaved zero-bubble": (2, DENSE, {"pp": 2, "schedule": "interleaved_zb", "chunks": 2}),
    "ZBV": (2, SPARSE, {"pp": 2, "schedule": "zbv"}),
    "DualPipeV": (2, DENSE, {"pp": 2, "schedule": "dualpipev", "recompute": "attention"}),
    "experts": (2, SPARSE, {"zero": 2, "ep": 2, "recompute": "full"}),
    "experts, elementwise": (2, SPARSE, {"cp": 2, "zero": 3, "ep": 2, "recompute": "elementwise"}),
    "pp × tp × zero 3": (8, DENSE, {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3, "sequence_parallel": True}),
}
LONG = [name for name in LAYOUTS if name != "sequence parallel"]


@needs_compiler
@pytest.mark.parametrize(
    "name", ["sequence parallel", *(pytest.param(n, marks=pytest.mark.full) for n in LONG)]
)
def test_compiled_layers_equal_one_process(ranks: Ranks, name: str) -> None:
    world_size, model, layout = LAYOUTS[name]
    config = replace(
        toy_config(global_batch=8, steps=3, **layout), model=model, machine=Machine(compile=True)
    )
    results = ranks.run(compiled_training, config, world_size=world_size, timeout=600.0)
    check_replicas(results)
    check(results[0], reference(replace(config, machine=Machine())), 1e-12)
    for found in results:
        assert found["breaks"] == {}
        # Five chains, each once for all layers and micro-batches; the shared experts' is another size of one of them.
        assert found["compiled"] <= (6 if model is SPARSE else 5)
    assert max(found["compiled"] for found in results) >= 5


def compiled_training(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Also what was compiled, and where the compiler gave up."""
    from torch._dynamo.utils import counters

    counters.clear()
    found = train_on_ranks(rank, world_size, config)
    found["compiled"], found["breaks"] = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return found


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("quickstart", {"tp": 2, "pp": 2, "dp_shard": 1, "schedule": "zbv"}),
        ("quickstart-moe", {"cp": 2, "dp_shard": 2, "ep": 2, "zero": 3}),
    ],
)
def test_verify_holds_compiled_layers_against_one_process(preset: str, layout: dict[str, Any]) -> None:
    config = load(preset, ["machine.compile=true", "batch.global_batch=16", "batch.micro_batch=1"])
    config = replace(config, parallel=Parallel(**layout))
    with Verifier(4) as verifier:
        case = verifier.case(config, ["float64", "float32", "bf16", "fp16"])
    assert case.passed, case.document()
