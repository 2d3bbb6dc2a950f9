"""The search equals brute force on spaces small enough to enumerate, is fast on large ones, and says why."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.errors import ConfigError
from fivefold.config.load import load
from fivefold.config.model import Experts, Model
from fivefold.config.tree import Config
from fivefold.ledger import hardware, pipeline
from fivefold.ledger.job import Job, Stack
from fivefold.ledger.total import estimate
from fivefold.planner import jobs
from fivefold.planner.advice import neighbours, unfit
from fivefold.planner.bounds import Prices, alone, quick_bound
from fivefold.planner.requests import request_of
from fivefold.planner.search import Costing, end_bound, job_of, search
from fivefold.planner.space import Point, Request, data_layouts, groups, points, series_of, size

STACK = Stack(compute_copy=0, chunked_loss=True, fused_loss=True)
SMALL = Model(layers=6, hidden=1024, heads=8, kv_heads=4, ffn=2816, vocab=8192, max_positions=4096)
EXPERTS = msgspec.structs.replace(SMALL, experts=Experts(count=4, top_k=2, ffn=1408, shared_ffn=512))
UNEVEN = msgspec.structs.replace(SMALL, experts=Experts(count=8, top_k=1, ffn=2816, dense_layers=2))
"""The first layers take the most time, the last ones hold the most parameters."""


def request_for(
    model: Model, kind: str = "2x4 a100", gib: float = 80.0, batch: int = 32, **fixed: object
) -> Request:
    on = hardware.preset(kind)
    on = msgspec.structs.replace(on, device=msgspec.structs.replace(on.device, memory=int(gib * 2**30)))
    return Request(model, on, batch, 2048, "bf16", 2, STACK, fixed)


def every_point(request: Request) -> list[Point]:
    return [
        point
        for group in groups(request)
        for series in series_of(request, group)
        for point in points(request, series)
    ]


def layouts(request: Request, point: Point) -> list[Job]:
    return [job_of(request, point, *split) for split in data_layouts(request, point)]


def brute(request: Request) -> list[tuple[float, int]]:
    """(seconds, layouts that share it) of every line: layouts of a point within 0.1 % are one, fastest first."""
    lines: list[tuple[float, int]] = []
    for point in every_point(request):
        ledgers = [estimate(job) for job in layouts(request, point)]
        left = sorted(ledger.time.step for ledger in ledgers if ledger.fits)
        while left:
            same = [seconds for seconds in left if seconds <= left[0] * 1.001]
            lines.append((left[0], len(same)))
            left = left[len(same) :]
    return sorted(lines)


@settings(max_examples=5, deadline=None)
@given(
    model=st.sampled_from([SMALL, EXPERTS, UNEVEN]),
    kind=st.sampled_from(["1x4 a100", "2x2 h100", "3x2 l40s", "1x6 h100"]),
    gib=st.sampled_from([3.0, 4.0, 6.0, 80.0]),
    batch=st.sampled_from([4, 12, 24]),
)
def test_equals_brute_force(model: Model, kind: str, gib: float, batch: int) -> None:
    request = request_for(model, kind, gib, batch)
    lines = brute(request)
    found = search(request, keep=5)
    assert [ranked.seconds for ranked in found.ranking] == pytest.approx(
        [seconds for seconds, _ in lines[:5]]
    )
    for ranked in found.ranking:
        assert 1 + len(ranked.same) in [n for seconds, n in lines if seconds == pytest.approx(ranked.seconds)]
        for job in (ranked.job, *ranked.same):
            ledger = estimate(job)
            assert ledger.fits
            assert ledger.time.step == pytest.approx(ranked.seconds, rel=1.001e-3)


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SCHEDULES = [(name, 1) for name in ("gpipe", "1f1b", "zb_h1", "zbv", "dualpipev")]
SCHEDULES += [(name, chunks) for name in ("interleaved", "interleaved_zb") for chunks in (1, 2)]


def every_config(base: Config, devices: int) -> Iterator[Config]:
    """All values of all keys, with no idea of what is legal but that degrees multiply to the devices."""
    for degrees in product((1, 2, 4), repeat=len(AXES)):
        if prod(degrees) != devices:
            continue
        mesh = dict(zip(AXES, degrees, strict=True))
        ways = SCHEDULES if mesh["pp"] > 1 else SCHEDULES[1:2]
        for ep, zero, sp, (name, chunks), micro in product(
            (1, 2), (0, 1, 2, 3), (False, True), ways, (1, 2, 4, 8)
        ):
            parallel = msgspec.structs.replace(
                base.parallel,
                **mesh,
                ep=ep,
                zero=zero,
                sequence_parallel=sp,
                schedule=name,
                chunks=chunks,
                recompute="elementwise",
            )
            batch = msgspec.structs.replace(base.batch, micro_batch=micro)
            yield msgspec.structs.replace(base, parallel=parallel, batch=batch)


@pytest.mark.parametrize("experts", [0, 2])
def test_no_config_that_is_legal_beats_the_plan(experts: int, tmp_path: Path) -> None:
    """Every config that `fivefold estimate` takes, of all there are: none is faster than the plan's best, and with
    two layers stages without a layer are among them."""
    path = tmp_path / "c.toml"
    lines = ["layers = 2", "hidden = 1024", "heads = 8", "kv_heads = 4", "ffn = 2816", "vocab = 8192"]
    routed = ["[model.experts]", f"count = {experts}", "top_k = 1", "ffn = 2816"]
    path.write_text(
        "\n".join(
            ["[model]", *lines, *routed, "[cluster]", 'preset = "1x4 a100"', "[batch]", "global_batch = 8"]
        )
    )
    base = load(str(path), ["precision.dtype=bf16"])
    best: dict[tuple[int, int, int, int], float] = {}
    legal = 0
    for config in every_config(base, 4):
        try:
            job = jobs.job_of(config)
        except ConfigError:
            continue
        legal += 1
        ledger = estimate(job)
        if ledger.fits:
            key = job.pp, job.tp, job.cp, job.ep
            best[key] = min(best.get(key, float("inf")), ledger.time.step)
    assert legal > 400
    assert len(best) >= (10 if not experts else 15)
    fixed = ["precision.dtype=bf16", "parallel.recompute=elementwise"]
    request = request_of(load(str(path), fixed), frozenset({"parallel.recompute"}))
    for (pp, tp, cp, ep), seconds in best.items():
        asked = {**request.fixed, "pp": pp, "tp": tp, "cp": cp, "ep": ep}
        found = search(replace(request, fixed=asked), keep=1).ranking
        assert found[0].seconds == pytest.approx(seconds), (pp, tp, cp, ep)
    assert search(request, keep=1).ranking[0].seconds == pytest.approx(min(best.values()))
    assert any(pp == 4 for pp, *_ in best)  # more stages than layers


@pytest.mark.parametrize("model", [SMALL, EXPERTS, UNEVEN])
def test_bounds_are_never_above_the_simulation(model: Model) -> None:
    """Neither the sum of a rank's work nor a rank working alone ends later than the schedule simulated."""
    request = request_for(model, "1x4 a100", batch=12)
    for point in every_point(request):
        plain = job_of(request, point)
        cost = pipeline.costs(plain)
        built = pipeline.stages(plain, cost)
        message = pipeline.message_seconds(plain)
        line = pipeline.timeline(plain, built)
        for through in quick_bound(point, Prices.of(cost[:4]), model, message):
            assert through.seconds - plain.physics.step <= line.finished[through.rank] * (1 + 1e-9)
        times = [stage.times for stage in built]
        for rank in range(point.pp):
            ends = alone(point.schedule, point.pp, point.microbatches, times, message, rank)
            assert ends.own <= line.finished[rank] * (1 + 1e-9)
            assert ends.first <= line.finished[0] * (1 + 1e-9)


@pytest.mark.parametrize("model", [SMALL, UNEVEN])
@pytest.mark.parametrize("kind", ["1x4 a100", "2x4 l40s"])
def test_bounds_with_what_follows_the_pipeline_are_never_above_the_step(model: Model, kind: str) -> None:
    request = request_for(model, kind, batch=16, tp=1, cp=1, micro_batch=1, recompute="none")
    costing = Costing(request)
    some = 0
    for point in every_point(request):
        for bound, _ in end_bound(request, point, costing):
            steps = [estimate(job).time.step for job in layouts(request, point)]
            assert bound <= min(steps) * (1 + 1e-9), point
            some += 1
    assert some > 15


def test_size_counts_the_space() -> None:
    for model in (SMALL, EXPERTS):
        request = request_for(model, "1x4 a100", batch=8)
        assert size(request) == sum(len(layouts(request, point)) for point in every_point(request))


def test_fixed_axes_stay() -> None:
    found = search(request_for(SMALL, batch=16, tp=2, pp=2, schedule="1f1b", recompute="full", micro_batch=1))
    assert found.ranking
    for ranked in found.ranking:
        job = ranked.job
        assert (job.tp, job.pp, job.schedule, job.recompute, job.micro_batch) == (2, 2, "1f1b", "full", 1)


def test_neighbours_have_numbers_and_reasons() -> None:
    request = request_for(SMALL, batch=16)
    best = search(request).ranking[0]
    lines = neighbours(best.job, best.seconds)
    assert len(lines) > 8
    assert all(any(letter.isdigit() for letter in line.split(":", 1)[1]) for line in lines)
    assert not any("(-" in line for line in lines), lines
    assert not any("e+" in line or "e-" in line for line in lines), lines


def test_what_does_not_fit_says_what_would() -> None:
    request = request_for(SMALL, gib=2.0, batch=16, tp=1, pp=1, zero=0)
    found = search(request)
    assert not found.ranking
    text = "\n".join(unfit(request, found))
    assert "misses at least" in text
    assert "fits" in text


def test_all_combinations_of_axes_plan() -> None:
    """Each axis on or off, with and without experts: a plan or a refusal, never a crash (SimAI#298)."""
    for model in (SMALL, EXPERTS):
        for bits in range(32):
            fixed = {
                axis: 2 if bits >> place & 1 else 1
                for place, axis in enumerate(("pp", "tp", "cp", "ep", "dp_replicate"))
            }
            found = search(request_for(model, "4x4 a100", batch=32, **fixed), keep=1)
            for ranked in found.ranking:
                kept = {
                    axis: degree
                    for axis, degree in fixed.items()
                    if axis != "dp_replicate" or ranked.job.zero
                }
                assert {
                    axis: getattr(ranked.job, axis) for axis in kept
                } == kept  # zero 0: replicas and shards are one
            if not found.ranking:
                assert found.searched == 0 or found.tightest is not None


def test_llama_405b_on_16384_devices_simulates_next_to_nothing(tmp_path: Path) -> None:
    """All axes free: millions of layouts, of which bounds leave few to simulate (benchmarks/plan.py times it)."""
    (tmp_path / "c.toml").write_text('[model]\npreset = "llama3-405b"\n')
    model = load(str(tmp_path / "c.toml")).model
    request = Request(model, hardware.preset("2048x8 h100"), 2048, 8192, "bf16", 2, STACK)
    found = search(request)
    assert found.ranking
    assert size(request) > 5_000_000
    assert found.simulated < 20
