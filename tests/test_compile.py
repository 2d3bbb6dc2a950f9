"""machine.compile: refused without a compiler, and the same numbers in every layout."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace

from fivefold.cli.main import main
from fivefold.collectives.record import Recorder
from fivefold.config.load import load
from fivefold.config.model import Experts, Model
from fivefold.config.tree import Config, Machine, Parallel
from fivefold.ledger.total import estimate
from fivefold.planner.jobs import job_of
from fivefold.proof.verify import Verifier
from fivefold.spec.legal import resolve_config
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.profile import StepProfile
from ranks import Ranks
from test_parity import check, check_replicas
from toy import CPU, FLAGS, MODEL, global_batch, reference, stepper_on, toy_config, train_on_ranks


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
    with Ranks(2, backend=None) as started:
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
}


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_layers_equal_one_process(ranks: Ranks, name: str) -> None:
    compared(ranks, *LAYOUTS[name])


@needs_compiler
@pytest.mark.full
def test_three_axes_at_once() -> None:
    layout = {"pp": 2, "tp": 2, "dp_shard": 2, "zero": 3, "sequence_parallel": True}
    with Ranks(8, backend=None) as ranks:
        compared(ranks, 8, DENSE, layout)


@pytest.mark.parametrize("name", ["sequence parallel", "ZBV"])
def test_traced_layers_equal_one_process(ranks: Ranks, name: str) -> None:
    """The same chains and autograd functions without a C++ compiler, which takes long."""
    compared(ranks, *LAYOUTS[name], backend="aot_eager")


def compared(
    ranks: Ranks, world_size: int, model: Model, layout: dict[str, Any], backend: str = "inductor"
) -> None:
    config = replace(
        toy_config(global_batch=8, steps=3, **layout), model=model, machine=Machine(compile=True)
    )
    results = ranks.run(compiled_training, config, backend, world_size=world_size, timeout=600.0)
    check_replicas(results)
    check(results[0], reference(replace(config, machine=Machine())), 1e-12)
    for found in results:
        assert found["breaks"] == {}
        # Five chains, each once for all layers and micro-batches, and the final norm; the shared experts' is another
        # size of one of them.
        assert found["compiled"] <= (7 if model is SPARSE else 6)
    assert max(found["compiled"] for found in results) >= 5


def compiled_training(rank: int, world_size: int, config: Config, backend: str) -> dict[str, Any]:
    """Also what was compiled, and where the compiler gave up."""
    with compiling() as counters, mock.patch("torch.compile", partial(torch.compile, backend=backend)):
        found = train_on_ranks(rank, world_size, config)
    return found | {"compiled": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}


@contextmanager
def compiling() -> Iterator[dict[str, Counter[str]]]:
    """torch's counters of what is compiled inside."""
    from torch._dynamo.utils import counters

    counters.clear()
    yield counters
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bf16", "float64"])
def test_memory_of_traced_layers_is_predicted(dtype: str) -> None:
    """Also for another number of layers than verify's twins have: each keeps rotary's tables for itself, but in
    float64. Divided into forward and backward as the compiler does it, without compiling."""
    config = toy_config(global_batch=1, dtype=dtype)
    config = replace(config, model=replace(MODEL, layers=3), machine=Machine(compile=True))
    resolved = resolve_config(config)
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
        stepper = stepper_on(resolved, Recorder())
        share = held_out_share(global_batch(config, 0), resolved.batch, 0, CPU)
        with StepProfile(stepper.model, stepper.optimizer) as profile:
            stepper.step(share, 1e-3, FLAGS, profile.inspect)
    assert profile.memory.activations == max(estimate(job_of(config)).timeline.peak_in_flight)


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("quickstart", {"tp": 2, "dp_shard": 1}),
        ("quickstart", {"tp": 2, "pp": 2, "dp_shard": 1, "schedule": "zbv"}),
        ("quickstart-moe", {"cp": 2, "dp_shard": 2, "ep": 2, "zero": 3}),
    ],
)
def test_verify_holds_compiled_layers_against_one_process(preset: str, layout: dict[str, Any]) -> None:
    """Memory too: compiled chains keep less than eager ones in bf16, and of dropout the keys, as the ledger says."""
    batch = ["batch.global_batch=16", "batch.micro_batch=1"]
    config = load(preset, ["machine.compile=true", "model.dropout=0.1", *batch])
    config = replace(config, parallel=Parallel(**layout))
    with Verifier(4, compiling) as verifier:
        case = verifier.case(config, ["float64", "bf16"])
    assert case.passed, case.document()
    assert all(line.measured == line.predicted or line.note for line in case.memory), case.memory
