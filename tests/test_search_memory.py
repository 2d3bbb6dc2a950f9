"""Bounds of memory in the search: never above what a layout needs, so that what they cut does not fit."""

import tomllib
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.model import Experts, Model
from fivefold.ledger import hardware
from fivefold.ledger.job import Job, Stack
from fivefold.ledger.simulate import most_in_flight
from fivefold.ledger.total import estimate
from fivefold.planner.memory import MemoryBounds, in_flight
from fivefold.planner.search import Costing, possible, search
from fivefold.planner.space import (
    SCHEDULES,
    Point,
    Request,
    Series,
    data_layouts,
    divisors,
    groups,
    job_of,
    ladders,
    points,
    series_of,
)
from fivefold.spec import schedules

WIDE = Model(layers=6, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=8192, max_positions=1 << 16)
STACKS = [
    Stack(compute_copy=0, chunked_loss=True, fused_loss=True),
    Stack(),  # a copy in the compute type besides the master copy
    Stack(manual_backward=True, shard_apart=True, keep_gathered=True, early_stop=True),
    Stack(fused=True, attention="unfused", muon=True),
    Stack(shard_apart=True, compute_copy=0),  # a copy under zero 1 and 2 alone
]


def preset(name: str) -> Model:
    file = files("fivefold") / "presets" / "models" / f"{name}.toml"
    return msgspec.convert(tomllib.loads(file.read_text()), Model)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    experts = Experts()
    if draw(st.booleans()):
        experts = Experts(
            count=4,
            top_k=draw(st.sampled_from([1, 4])),
            ffn=draw(st.sampled_from([2048, 32768])),
            dense_layers=draw(st.integers(0, 2)),
        )
    model = msgspec.structs.replace(
        WIDE,
        hidden=draw(st.sampled_from([64, 8192])),
        layers=draw(st.sampled_from([2, 3, 5, 6, 7, 10, 13])),
        vocab=draw(st.sampled_from([64, 8192, 256000])),
        tied=draw(st.booleans()),
        experts=experts,
    )
    return Request(
        model,
        hardware.preset(draw(st.sampled_from(["1x4 a100", "2x8 h100", "1x6 h100", "1x12 cpu"]))),
        draw(st.sampled_from([4, 24, 96])),
        draw(st.sampled_from([64, 2048, 16384])),
        "bf16",
        2,
        draw(st.sampled_from(STACKS)),
    )


def peaks(request: Request, point: Point) -> list[float]:
    """Of the layouts of a point with the most and the fewest shards of each ZeRO stage."""
    by_zero: dict[int, list[Job]] = {}
    for split in data_layouts(request, point):
        by_zero.setdefault(split[0], []).append(job_of(request, point, *split))
    ends = {id(job): job for jobs in by_zero.values() for job in (jobs[0], jobs[-1])}
    return [estimate(job).fullest.memory.peak for job in ends.values()]


@settings(max_examples=200, deadline=None)
@given(request=requests(), data=st.data())
def test_no_layout_needs_less_than_the_bounds(request: Request, data: st.DataObject) -> None:
    bounds = MemoryBounds(request)
    group = data.draw(st.sampled_from([*groups(request)]))
    series = data.draw(st.sampled_from([*series_of(request, group)]))
    least = max(bounds.of_group(group), bounds.of_series(series))
    for point in points(request, series):
        for peak in peaks(request, point):
            assert least <= peak * (1 + 1e-9), point


@settings(max_examples=10, deadline=None)
@given(request=requests())
def test_the_bound_of_groups_grows_with_the_micro_batch(request: Request) -> None:
    bounds = MemoryBounds(request)
    for ladder in ladders(replace(request, global_batch=5040)):
        steps = [bounds.of_group(group) for group in ladder.groups()]
        assert all(low < high for low, high in pairwise(steps))


@settings(max_examples=12, deadline=None)
@given(request=requests(), gib=st.sampled_from([10.0, 20.0, 80.0]))
def test_nothing_that_is_cut_fits(request: Request, gib: float) -> None:
    device = msgspec.structs.replace(request.hardware.device, memory=int(gib * 2**30))
    on = msgspec.structs.replace(request.hardware, device=device)
    request = replace(request, hardware=on, global_batch=720)
    left = {*possible(request, Costing(request))}
    cut = [group for group in groups(request) if group not in left]
    for group in cut[:: 1 + len(cut) // 4]:
        for series in series_of(request, group):
            for point in [*points(request, series)][:1]:
                assert min(peaks(request, point), default=device.memory + 1) > device.memory, point


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 7])
def test_the_first_rank_holds_at_least_what_is_counted(name: schedules.Name, pp: int) -> None:
    for microbatches in range(1, 6 * pp):
        if not schedules.is_legal(name, pp, microbatches):
            continue
        many = in_flight(name, pp, microbatches)
        for chunks in (2, 3) if name.startswith("interleaved") else (1,):
            held = most_in_flight(name, pp, microbatches, chunks, 0, False)
            wanted = (many, 1) if name in schedules.V_SHAPED else (many,) * len(held[0])
            assert any(all(a >= b for a, b in zip(own, wanted, strict=True)) for own in held)


def test_a_pipeline_with_few_layers_on_its_first_rank_is_planned() -> None:
    """80 layers and a head on 32 ranks: two layers are on the first, an even share is two and a half."""
    model = preset("llama2-70b")
    request = Request(model, hardware.preset("256x8 h100"), 8192, 4096, "bf16", 2, STACKS[0])
    series = [
        Series(group, group.shape, "1f1b")
        for group in groups(replace(request, fixed={"pp": 32, "tp": 8, "cp": 1, "micro_batch": 2}))
    ]
    for own in series:
        peak = min(peaks(request, Point(own, 1)))
        assert MemoryBounds(request).of_series(own) <= peak
        on = msgspec.structs.replace(request.hardware.device, memory=int(peak) + 1)
        tight = replace(
            request,
            hardware=msgspec.structs.replace(request.hardware, device=on),
            fixed={**own.shape._asdict(), "pp": 32, "schedule": "1f1b"},
        )
        assert search(tight, keep=1).ranking


def test_a_batch_with_very_many_divisors_leaves_few_micro_batches() -> None:
    model = preset("llama3-8b")
    request = Request(model, hardware.preset("16x8 h100"), 2_095_133_040, 4096, "bf16", 2, STACKS[0])
    left = sum(1 for _ in possible(request, Costing(request)))
    assert 0 < left < sum(1 for _ in groups(request)) / 5


def test_divisors() -> None:
    for number in range(1, 400):
        assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]
    assert divisors(2**31) == tuple(2**k for k in range(32))
    assert divisors(2**31 - 1) == (1, 2**31 - 1)
    assert len(divisors(2_095_133_040)) == 5 * 5 * 2**6
