"""`fivefold verify` on healthy code, in layouts where every pair of choices meets, and what the command says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

import faults
from fivefold.cli import verify as command
from fivefold.cli.main import main
from fivefold.config.load import load
from fivefold.config.tree import Config
from fivefold.proof.layouts import covering, every_layout
from fivefold.proof.verify import Verifier
from fivefold.spec.legal import resolve_config

RANKS = 4
PRESETS = ("quickstart", "quickstart-moe")
PARTS = 3
CASE_KEYS = {
    "parallel",
    "passed",
    "loss_error",
    "gradient_error",
    "parameter_error",
    "first_divergence",
    "traffic_matches",
    "traffic",
    "memory",
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(RANKS) as started:
        yield started


@pytest.fixture(scope="module")
def layouts() -> dict[str, list[Config]]:
    return {preset: covering(every_layout(load(preset), RANKS)) for preset in PRESETS}


# Layouts


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.full if part else ()) for part in range(PARTS)]
)
def test_every_pair_of_choices_holds(
    verifier: Verifier, layouts: dict[str, list[Config]], preset: str, part: int
) -> None:
    """`make test` runs every third layout, `make test-full` the others too."""
    wrong = []
    for config in layouts[preset][part::PARTS]:
        case = verifier.case(config, ["float64"])
        assert set(case.comparisons) == {"float64"} or case.problem
        if not case.passed:
            wrong.append(case.document())
    assert wrong == []


@pytest.mark.parametrize("preset", PRESETS)
def test_pairs_show_all_that_occurs(layouts: dict[str, list[Config]], preset: str) -> None:
    """In few layouts; every one legal, of exactly so many ranks, and different from the others."""
    every, few = every_layout(load(preset), RANKS), layouts[preset]
    assert len(few) < len(every) / 2
    for config in every:
        assert resolve_config(config, RANKS).mesh.world_size == RANKS
    assert len({str(asdict(config.parallel)) for config in every}) == len(every)
    for key in asdict(every[0].parallel):
        values = {getattr(config.parallel, key) for config in few}
        assert values == {getattr(config.parallel, key) for config in every}, key


@pytest.mark.parametrize(("preset", "count"), [("quickstart", 563), ("quickstart-moe", 1291)])
def test_layouts_of_8_ranks(preset: str, count: int) -> None:
    """As many as the documentation says."""
    assert len(every_layout(load(preset), 8)) == count


@pytest.mark.parametrize(("preset", "count"), [("quickstart", 58), ("quickstart-moe", 63)])
def test_pairs_of_4_ranks(preset: str, count: int) -> None:
    assert len(covering(every_layout(load(preset), 4))) == count


# Precisions


def laid_out(preset: str, dtype: str, **parallel: Any) -> Config:
    config = load(preset, [f"precision.dtype={dtype}", "batch.global_batch=32"])
    return replace(config, parallel=replace(config.parallel, dp_replicate=1, dp_shard=2, zero=1, **parallel))


@pytest.mark.injected_fault
def test_what_float64_makes_go_away_is_rounding() -> None:
    with Verifier(2, faults.float32_reduced_in_bf16) as verifier:
        case = verifier.case(laid_out("quickstart", "float32"), ["float64", "float32"])
    assert not case.passed
    assert case.comparisons["float64"].passed
    told = case.document()
    assert told["kind"].startswith("rounding: float64 shrinks it from ")
    assert told["axis"] == "dp_shard"


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_below_float64_the_routing_is_the_references(verifier: Verifier, dtype: str) -> None:
    case = verifier.case(laid_out("quickstart-moe", dtype, ep=2, recompute="full"), [dtype])
    assert case.passed, case.document()
    assert "routing choices would have been" in case.document()["routing"]


def test_one_precision_after_another_on_a_long_pipeline(verifier: Verifier) -> None:
    """The ends of a tied embedding have a group that the stages between have not; groups are made anew for each."""
    config = load("quickstart", ["parallel.pp=4", "parallel.dp_replicate=1", "batch.global_batch=32"])
    assert config.model.tied
    case = verifier.case(config, ["float64", "float32"])
    assert case.passed, case.document()


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_memory_of_learned_positions_is_predicted(verifier: Verifier, layout: dict[str, Any]) -> None:
    config = load("quickstart", ["model.preset=gpt2", "batch.global_batch=16", "parallel.dp_replicate=1"])
    config = replace(config, parallel=replace(config.parallel, **layout))
    case = verifier.case(config, ["float64"])
    assert case.passed, case.document()
    assert all(line.measured == line.predicted for line in case.memory), case.memory


# Muon


@pytest.mark.parametrize(
    ("preset", "layout", "dtypes"),
    [
        ("quickstart", {"tp": 2, "dp_shard": 2, "zero": 2}, ["float64", "float32"]),
        ("quickstart-moe", {"dp_shard": 2, "ep": 2, "tp": 2, "zero": 3}, ["float64"]),
        ("quickstart-moe", {"pp": 2, "dp_shard": 2, "zero": 1}, ["float64", "float32"]),
    ],
    ids=str,
)
def test_muon_holds(verifier: Verifier, preset: str, layout: dict[str, Any], dtypes: list[str]) -> None:
    """In float64 to 1e-12, as everything; optimizer state takes the bytes it was said to take."""
    config = load(preset, ["optimizer.name=muon", "optimizer.lr=0.02", "batch.global_batch=16"])
    parallel = replace(config.parallel, **({"dp_replicate": 1, "dp_shard": 1} | layout))
    case = verifier.case(replace(config, parallel=parallel), dtypes)
    assert case.passed, case.document()
    assert case.comparisons["float64"].errors.worst <= 1e-12
    (optimizer,) = [line for line in case.memory if line.category == "optimizer"]
    assert optimizer.measured == optimizer.predicted


@pytest.mark.full
@pytest.mark.parametrize("preset", ["quickstart", "quickstart-moe"])
def test_every_pair_of_choices_holds_with_muon(verifier: Verifier, preset: str) -> None:
    for config in covering(every_layout(load(preset, ["optimizer.name=muon"]), 4)):
        case = verifier.case(config, ["float64"])
        assert case.passed, case.document()


# The command


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    out, _ = capsys.readouterr()
    return json.loads(out)


def test_json_of_one_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", "--set", "parallel.tp=2", "--json"]) == 0
    document = told(capsys)
    assert document.keys() == {"passed", "cases"}
    assert document["passed"] is True
    (case,) = document["cases"]
    assert case.keys() >= CASE_KEYS
    assert case["parallel"]["tp"] == 2
    assert case["dtypes"] == ["float64", "float32"]
    assert case["first_divergence"] is None
    assert case["traffic_matches"] is True
    assert case["traffic"] == {}
    for key in ("loss_error", "gradient_error", "parameter_error"):
        assert 0 <= case[key] <= 1e-12
    for measured, predicted in case["memory"].values():
        assert measured >= 0
        assert predicted >= 0


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with ranks whose gradients are means."""

    class Broken(Verifier):
        def __init__(self, ranks: int) -> None:
            super().__init__(ranks, faults.gradients_are_means)

    monkeypatch.setattr("fivefold.proof.verify.Verifier", Broken)


SHARDED = ("--set", "parallel.dp_replicate=1", "--set", "parallel.dp_shard=2", "--set", "parallel.zero=1")


@pytest.mark.injected_fault
def test_what_does_not_hold_exits_with_1(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", *SHARDED]) == 1
    out, _ = capsys.readouterr()
    assert "DOES NOT HOLD: dp_shard 2" in out
    assert "first wrong: " in out
    assert "a constant factor, 1/2" in out
    assert "axis: dp_shard" in out
    assert "1 layout verified" in out
    assert "1 do not hold" in out


def write_layouts(path: Path, *tables: dict[str, Any]) -> str:
    path.write_text(json.dumps(tables))
    return str(path)


def test_an_interrupted_sweep_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts already there are told again and not computed again; a line cut short is."""
    tables = [{"dp_replicate": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1}, {"tp": 2, "dp_shard": 1}]
    file, save = write_layouts(tmp_path / "layouts.json", *tables), tmp_path / "verdicts.jsonl"
    words = ["verify", "quickstart", "--layouts", file, "--save", str(save), "--json"]
    assert main(words) == 0
    first = told(capsys)
    lines = save.read_text().splitlines(keepends=True)
    assert len(lines) == len(first["cases"]) == 3
    save.write_text("".join(lines[:2]) + lines[2][:40] + "\n")
    computed = []
    case = Verifier.case

    def counting(verifier: Verifier, config: Config, dtypes: Any) -> Any:
        computed.append(config.parallel)
        return case(verifier, config, dtypes)

    monkeypatch.setattr(Verifier, "case", counting)
    assert main(words) == 0
    assert told(capsys) == first
    assert [parallel.tp for parallel in computed] == [2]
    assert main(words) == 0
    assert told(capsys) == first
    assert len(computed) == 1


def test_a_failure_kept_still_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, save = write_layouts(tmp_path / "layouts.json", {"tp": 2, "dp_shard": 1}), tmp_path / "kept.jsonl"
    words = ["verify", "quickstart", "--layouts", file, "--save", str(save), "--json"]
    assert main(words) == 0
    kept = json.loads(save.read_text())
    assert told(capsys)["passed"]
    save.write_text(json.dumps(kept | {"passed": False}) + "\n")
    assert main(words) == 1
    assert not told(capsys)["passed"]


def test_a_verdict_belongs_to_what_was_verified() -> None:
    """Another layout, model, batch or precision is another case."""
    config = load("quickstart")
    others = [
        config,
        replace(config, parallel=replace(config.parallel, tp=2)),
        replace(config, model=replace(config.model, layers=3)),
        replace(config, precision=replace(config.precision, dtype="bf16")),
        replace(config, data=replace(config.data, document_mask=not config.data.document_mask)),
        replace(config, schedule=replace(config.schedule, kind="linear")),
        replace(config, run=replace(config.run, seed=5)),
    ]
    assert len({command._key(each, ("float64",)) for each in others}) == len(others)


# Memory


MEMORY = {
    "gradients are whole under pp, parameters gathered": (
        "quickstart",
        {"pp": 2, "dp_shard": 2, "zero": 3},
        8,
    ),
    "zero 1 adds up whole gradients": ("quickstart", {"dp_shard": 4, "zero": 1}, 64),
    "zero 1 scatters those of a single micro-batch": ("quickstart", {"dp_shard": 4, "zero": 1}, 32),
    "a split backward recomputed at once": (
        "quickstart",
        {"pp": 2, "dp_shard": 2, "zero": 2, "schedule": "zb_h1", "recompute": "elementwise"},
        64,
    ),
    "one KV head a rank": ("quickstart", {"cp": 4, "context": "ulysses"}, 16),
    "experts dealt over all shards": (
        "quickstart-moe",
        {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 3, "recompute": "full"},
        64,
    ),
    "routers of whole sequences": ("quickstart-moe", {"tp": 4, "sequence_parallel": True}, 16),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_as_predicted(verifier: Verifier, name: str) -> None:
    preset, parallel, global_batch = MEMORY[name]
    config = load(preset, [f"batch.global_batch={global_batch}"])
    layout = replace(config.parallel, **({"dp_replicate": 1, "dp_shard": 1} | parallel))
    case = verifier.case(replace(config, parallel=layout, run=replace(config.run, ranks=4)), ["float64"])
    assert case.passed, case.document()
    for line in case.memory:
        assert line.measured == line.predicted or line.note, line
    assert {line.category for line in case.memory if line.measured == line.predicted} >= {
        "parameters",
        "gradients",
        "optimizer",
    }


def test_activations_follow_the_load_of_experts(verifier: Verifier) -> None:
    """Predicted for the busiest rank's load, which the verdict names where that is not exact."""
    config = load("quickstart-moe", ["batch.global_batch=32"])
    layout = replace(config.parallel, dp_replicate=1, dp_shard=4, ep=4, zero=1)
    case = verifier.case(replace(config, parallel=layout, run=replace(config.run, ranks=4)), ["float64"])
    (line,) = [line for line in case.memory if line.category == "activations"]
    assert line.measured is not None
    assert line.measured == pytest.approx(line.predicted, rel=0.05)
    assert "× the mean rows of experts" in line.note


# fp16


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp_shard": 2, "zero": 2}, {"pp": 2}])
def test_fp16_skips_as_one_process_does(verifier: Verifier, parallel: dict[str, Any]) -> None:
    """The first step overflows on purpose; what follows is compared without the loss scale."""
    config = load("quickstart", ["precision.dtype=fp16", "batch.global_batch=32"])
    layout = replace(config.parallel, **({"dp_replicate": 1, "dp_shard": 1} | parallel))
    case = verifier.case(replace(config, parallel=layout, run=replace(config.run, ranks=2)), ["fp16"])
    assert case.passed, case.document()
    assert case.comparisons["fp16"].errors.gradient < 0.01


@pytest.mark.full
@pytest.mark.injected_fault
def test_an_overflow_that_is_not_skipped() -> None:
    with Verifier(2, faults.overflow_unnoticed) as verifier:
        case = verifier.case(load("quickstart", ["precision.dtype=fp16"]), ["fp16"])
    assert not case.passed
    assert "steps skipped: none; one process skips 1" in case.document()["wrong"]


@pytest.mark.full
def test_pairs_hold_in_float32(verifier: Verifier, layouts: dict[str, list[Config]]) -> None:
    wrong = []
    for config in layouts["quickstart"]:
        case = verifier.case(config, ["float32"])
        if not case.passed:
            wrong.append(case.document())
    assert wrong == []


@pytest.mark.full
def test_dtypes_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_layouts(tmp_path / "layouts.json", {"tp": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1})
    words = ["verify", "quickstart", "--layouts", file, "--json", "--dtypes"]
    assert main([*words, "float32,float64"]) == 0
    for case in told(capsys)["cases"]:
        assert case["dtypes"] == ["float64", "float32"]
        assert case["errors"]["float32"]["gradient"] <= 1e-5
    assert main([*words, "float8"]) == 2
    assert "expected some of float64, float32, bf16, fp16" in capsys.readouterr().err
