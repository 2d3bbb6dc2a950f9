"""Schedules and their simulation: equal to torch's lists, to the formulas where exact, and to sense."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.ledger.simulate import StageTimes, least_alike, simulate
from fivefold.spec import schedules
from fivefold.spec.schedules import Action, Kind

NAMES: tuple[schedules.Name, ...] = (
    "gpipe",
    "1f1b",
    "interleaved",
    "zb_h1",
    "interleaved_zb",
    "zbv",
    "dualpipev",
)


def torch_lists(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """The action lists of torch's own schedule classes, built without stages."""
    from torch.distributed.pipelining import schedules as theirs

    cls: Any = {
        "gpipe": theirs.ScheduleGPipe,
        "1f1b": theirs.Schedule1F1B,
        "interleaved": theirs.ScheduleInterleaved1F1B,
        "zb_h1": theirs.ScheduleInterleavedZeroBubble,
        "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
        "zbv": theirs.ScheduleZBVZeroBubble,
        "dualpipev": theirs.ScheduleDualPipeV,
    }[name]
    schedule = cls.__new__(cls)
    schedule.pp_group_size = ranks
    schedule._n_microbatches = microbatches
    schedule.n_local_stages = chunks
    schedule.num_stages = schedule._num_stages = ranks * chunks
    schedule.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    if hasattr(cls, "_calculate_single_rank_operations"):
        lists = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    else:
        order = schedule._get_pipeline_order()
        lists = [order[rank] for rank in range(ranks)]
    kinds = {
        "F": Kind.FORWARD,
        "I": Kind.INPUT_GRAD,
        "W": Kind.WEIGHT_GRAD,
        "B": Kind.BACKWARD,
    }
    return [
        [
            Action(
                kinds[part.computation_type.value],
                part.stage_index,
                part.microbatch_index,
                i < len(parts) - 1,
            )
            for action in own
            if action is not None
            for parts in [action.sub_actions or (action,)]
            for i, part in enumerate(parts)
            if part.computation_type.value in kinds
        ]
        for own in lists
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (3, 7), (8, 16), (4, 3)])
def test_lists_are_torchs(name: schedules.Name, ranks: int, microbatches: int) -> None:
    if not schedules.is_legal(name, ranks, microbatches) or (name == "1f1b" and microbatches < ranks):
        pytest.skip("not legal in torch")
    for chunks in {schedules.chunks_of(name, 2), schedules.chunks_of(name, 3)}:
        ours = schedules.actions(name, ranks, microbatches, chunks)
        theirs = torch_lists(name, ranks, microbatches, chunks)
        if name == "1f1b":  # torch's listing (not its execution) numbers the last rank's forwards from 1
            ours.pop(), theirs.pop()
        assert ours == theirs


def even(ranks: int, chunks: int, f: float, b: float, w: float) -> list[StageTimes]:
    return [StageTimes(f / chunks, b / chunks, w / chunks)] * (ranks * chunks)


seconds = st.floats(0.1, 3.0)
ranks_st = st.integers(1, 8)


@given(p=ranks_st, m=st.integers(1, 24), f=seconds, b=seconds, w=seconds)
def test_gpipe_and_1f1b_equal_their_formulas(p: int, m: int, f: float, b: float, w: float) -> None:
    for name in ("gpipe", "1f1b"):
        line = simulate(name, p, m, even(p, 1, f, b, w))
        assert line.makespan == pytest.approx((m + p - 1) * (f + b + w))
        held = [float(m if name == "gpipe" else min(m, p - r)) for r in range(p)]
        assert list(line.peak_in_flight) == held


@given(p=st.integers(2, 8), rounds=st.integers(1, 4), v=st.integers(1, 4), f=seconds, b=seconds, w=seconds)
def test_interleaved_equals_its_formula(p: int, rounds: int, v: int, f: float, b: float, w: float) -> None:
    """Bubble (p−1)(F+B+W)/v; in flight [(v−1)p + 2(p−r−1) + 1]/v, at most all m·v."""
    m = p * rounds
    line = simulate("interleaved", p, m, even(p, v, f, b, w))
    assert line.makespan == pytest.approx(m * (f + b + w) + (p - 1) * (f + b + w) / v)
    for rank, held in enumerate(line.peak_in_flight):
        assert held == pytest.approx(min(m, ((v - 1) * p + 2 * (p - rank - 1) + 1) / v))


@given(p=st.integers(2, 8), rounds=st.integers(2, 4), v=st.sampled_from([1, 2]), time=seconds)
def test_zero_bubble_equals_its_formula(p: int, rounds: int, v: int, time: float) -> None:
    """(p−1)(F+B−W)/v with F = B = W; in flight p on every rank."""
    name: schedules.Name = "zb_h1" if v == 1 else "interleaved_zb"
    line = simulate(name, p, p * rounds, even(p, v, time, time, time))
    assert line.makespan - p * rounds * 3 * time == pytest.approx((p - 1) * time / v)
    assert max(line.peak_in_flight) == pytest.approx(p)


@given(
    p=st.integers(2, 8),
    rounds=st.integers(2, 4),
    w=seconds,
    more=st.floats(0.0, 0.5),
    yet=st.floats(0.0, 0.5),
)
def test_zb_h1_equals_its_formula_where_it_holds(
    p: int, rounds: int, w: float, more: float, yet: float
) -> None:
    """Bubble (p−1)(F+B−W) for B ≥ F ≥ W, at most half more each; beyond it is simulated."""
    f = w * (1 + more)
    b = f * (1 + yet)
    line = simulate("zb_h1", p, p * rounds, even(p, 1, f, b, w))
    assert line.makespan - p * rounds * (f + b + w) == pytest.approx((p - 1) * (f + b - w))
    assert list(line.peak_in_flight) == pytest.approx([p] * p)


@given(p=st.integers(2, 8), rounds=st.integers(2, 4), time=seconds)
def test_v_shaped_schedules_equal_their_formulas(p: int, rounds: int, time: float) -> None:
    """F = B = W: ZB-V starts (p−1)F/2 late and holds p everywhere; DualPipeV idles (p−1)F and holds p + ½."""
    work = p * rounds * 3 * time
    zbv = simulate("zbv", p, p * rounds, even(p, 2, time, time, time))
    assert zbv.makespan - work == pytest.approx((p - 1) * time / 2)
    assert list(zbv.peak_in_flight) == pytest.approx([p] * p)
    dual = simulate("dualpipev", p, p * rounds, even(p, 2, time, time, time))
    assert dual.makespan - work == pytest.approx((p - 1) * time)
    assert max(dual.peak_in_flight) == pytest.approx(p + 0.5)


def test_the_worked_example() -> None:
    """formulas.md §7: bubble fractions at p=8, m=32, F=B=W."""
    expected = {
        ("1f1b", 1): 0.1795,
        ("interleaved", 2): 0.0986,
        ("interleaved", 4): 0.0519,
        ("zb_h1", 1): 0.0680,
        ("interleaved_zb", 2): 0.0352,
        ("zbv", 2): 0.0352,
        ("dualpipev", 2): 0.0680,
    }
    for (name, v), fraction in expected.items():
        line = simulate(name, 8, 32, even(8, v, 1.0, 1.0, 1.0))  # type: ignore[arg-type]
        assert line.bubble / line.makespan == pytest.approx(fraction, abs=5e-5), name


def test_uneven_times_are_simulated() -> None:
    """formulas.md §7: ZB-H1 F=1 B=.8 W=1.2 gives 3.0; ZB-V 3.0 and DualPipeV 4.75 at F=1 B=1.5 W=.5, p=4."""
    zb = simulate("zb_h1", 4, 16, even(4, 1, 1.0, 0.8, 1.2))
    assert zb.bubble == pytest.approx(3.0)
    zbv = simulate("zbv", 4, 16, even(4, 2, 1.0, 1.5, 0.5))
    assert zbv.bubble == pytest.approx(3.0)
    assert max(zbv.peak_in_flight) == pytest.approx(4)
    dual = simulate("dualpipev", 4, 16, even(4, 2, 1.0, 1.5, 0.5))
    assert dual.bubble == pytest.approx(4.75)
    assert max(dual.peak_in_flight) == pytest.approx(4.5)


@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(2, 9),
    first=st.integers(1, 100),
    step=st.integers(1, 20),
    length=st.integers(0, 40),
    multiple=st.booleans(),
)
def test_few_numbers_of_micro_batches_stand_for_all_of_a_ramp(
    name: schedules.Name, ranks: int, first: int, step: int, length: int, multiple: bool
) -> None:
    counts = range(first, first + step * length, step)
    if multiple:
        counts = range(ranks * first, ranks * (first + step * length), ranks * step)
    assert schedules.are_legal(name, ranks, counts) == all(
        schedules.is_legal(name, ranks, count) for count in counts
    )


@given(
    name=st.sampled_from(NAMES),
    p=ranks_st,
    m=st.integers(1, 20),
    v=st.integers(1, 3),
    data=st.data(),
    message=st.floats(0.0, 0.5),
)
def test_every_schedule_does_every_work_once_and_in_order(
    name: schedules.Name, p: int, m: int, v: int, data: st.DataObject, message: float
) -> None:
    if not schedules.is_legal(name, p, m):
        assert all(schedules.is_legal(name, p, near) for near in schedules.nearest_legal(name, p, m))
        with pytest.raises(ValueError, match="nearest legal"):
            schedules.actions(name, p, m, v)
        return
    v = schedules.chunks_of(name, v)
    times = [StageTimes(*data.draw(st.tuples(seconds, seconds, seconds))) for _ in range(p * v)]
    line = simulate(name, p, m, times, message=message, trace=True)
    done: dict[tuple[int, int], set[Kind]] = {}
    for rank, own in enumerate(line.actions):
        ends = -1.0
        for action, start in zip(own, line.starts[rank], strict=True):
            assert action.stage in schedules.stages_of_rank(name, rank, p, v)
            assert start >= ends - 1e-9
            ends = start
            kinds = done.setdefault((action.stage, action.microbatch), set())
            assert action.kind not in kinds
            kinds.add(action.kind)
    full = [{Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}]
    assert len(done) == p * v * m
    assert all(kinds in full for kinds in done.values())
    assert line.makespan >= max(line.busy) - 1e-9
    assert line.makespan >= sum(t.forward + t.input_grad for t in times) - 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_very_many_micro_batches_are_not_all_simulated(name: schedules.Name) -> None:
    """Rounds repeat: the makespan of a million follows from that of a few thousand, exactly."""
    chunks = schedules.chunks_of(name, 2)
    times = [StageTimes(1 + stage % 3 / 7, 1.5 - stage % 2 / 5, 0.5) for stage in range(3 * chunks)]
    lines = [simulate(name, 3, m, times, message=0.1) for m in (2040, 3 * 2040, 1_000_002)]
    per_round = (lines[1].makespan - lines[0].makespan) / (2 * 2040)
    assert lines[2].makespan == pytest.approx(lines[0].makespan + (1_000_002 - 2040) * per_round, rel=1e-9)
    most = [max(line.peak_in_flight) for line in lines]
    assert most == pytest.approx([2040, 6120, 1_000_002] if name == "gpipe" else most[:1] * 3)
    assert least_alike(3, 2040) == 2040
    assert least_alike(3, 1_000_002) % 3 == 0
