"""Rounds that repeat stand for all: what follows from few micro-batches is what all of them give, played one by one."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fivefold.ledger.rounds import growth, trials, window
from fivefold.ledger.simulate import StageTimes, Timeline, most_in_flight, simulate
from fivefold.planner.bounds import alone
from fivefold.spec import schedules
from test_schedules import NAMES

UNITS = st.sampled_from([0.25, 0.5, 0.75, 1.0, 1.001, 2.0])


def one_by_one(name: schedules.Name, ranks: int, m: int, times: list[StageTimes], message: float) -> Timeline:
    """Every micro-batch: a traced timeline leaves out none."""
    return simulate(name, ranks, m, times, message=message, trace=True)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 5),
    chunks=st.integers(2, 3),
    rounds=st.integers(17, 90),
    rest=st.integers(0, 4),
    message=st.sampled_from([0.0, 0.25, 3.0]),
    data=st.data(),
)
def test_many_micro_batches_take_what_they_take_one_by_one(
    name: schedules.Name,
    ranks: int,
    chunks: int,
    rounds: int,
    rest: int,
    message: float,
    data: st.DataObject,
) -> None:
    """Uneven stages and long messages: then ranks wait for what is in flight, and rounds repeat in bursts."""
    m, stages = ranks * rounds + rest, ranks * schedules.chunks_of(name, chunks)
    assume(schedules.is_legal(name, ranks, m))
    times = data.draw(st.lists(st.builds(StageTimes, UNITS, UNITS, UNITS), min_size=stages, max_size=stages))
    found, true = simulate(name, ranks, m, times, message=message), one_by_one(name, ranks, m, times, message)
    assert found[:4] == (
        pytest.approx(true.makespan, rel=1e-10),
        pytest.approx(true.busy, rel=1e-10),
        pytest.approx(true.finished, rel=1e-10),
        pytest.approx(true.peak_in_flight, rel=1e-10),
    )
    for rank in range(ranks):
        bound = alone(name, ranks, m, times, message, rank)
        assert bound.own <= true.finished[rank] * (1 + 1e-10)
        assert bound.first <= true.finished[0] * (1 + 1e-10)


def test_bursts_of_several_rounds_repeat_together() -> None:
    """The second of three ranks has two micro-batches in flight, and waits for both: rounds of three repeat in twos."""
    times = [StageTimes(0.05, 0.05, 0.0), StageTimes(0.5, 0.25, 0.25), StageTimes(0.5, 0.5, 0.5)]
    starts = [list(own) for own in one_by_one("1f1b", 3, 96, times, 0.5).starts]
    found = growth(starts, [window("1f1b", rank, 3, 96, 1) for rank in range(3)], 3)
    assert found is not None
    assert found.rounds == 2
    few, many, most = (one_by_one("1f1b", 3, m, times, 0.5).makespan for m in (96, 99, 102))
    assert most - few == pytest.approx(found.seconds)
    assert many - few != pytest.approx(found.seconds / 2)
    for rest, first in ((0, few), (3, many)):
        million = simulate("1f1b", 3, 96 + 6 * 10**6 + rest, times, message=0.5)
        assert million.makespan == pytest.approx(first + 10**6 * found.seconds)


def test_a_rank_that_falls_behind_slowly_is_waited_for() -> None:
    """The rank after the first is slower by a thousandth: it catches up with what waits for it after many rounds."""
    times = [StageTimes(1.0, 1.0, 1.0), StageTimes(1.001, 1.001, 1.001)]
    for m in (100, 1000, 1900):
        assert simulate("1f1b", 2, m, times).makespan == pytest.approx(
            one_by_one("1f1b", 2, m, times, 0.0).makespan
        )


def test_lists_that_are_no_rounds_have_no_window() -> None:
    assert window("gpipe", 0, 2, 32, 1) is None
    assert not list(trials("interleaved", 4, 10, 10**6))  # two rounds of five
    assert list(trials("1f1b", 4, 1001, 10**6)) == [33, 129]
    found = window("zb_h1", 1, 4, 64, 1)
    own = schedules.rank_entries("zb_h1", 1, 4, 64, 1)
    assert found is not None
    assert found.period == 12
    later = [(k, s, m + 4, j) for k, s, m, j in own[found.first : found.end - 12]]
    assert own[found.first + 12 : found.end] == later


@given(
    name=st.sampled_from(NAMES), ranks=st.integers(1, 5), rounds=st.integers(5, 12), rest=st.integers(0, 4)
)
@settings(max_examples=40, deadline=None)
def test_what_is_in_flight_does_not_grow_after_a_few_rounds(
    name: schedules.Name, ranks: int, rounds: int, rest: int
) -> None:
    m = ranks * rounds + rest
    assume(name != "gpipe" and schedules.is_legal(name, ranks, m))
    stages = ranks * schedules.chunks_of(name, 2)
    true = one_by_one(name, ranks, m, [StageTimes(1.0, 1.0, 1.0)] * stages, 0.0)
    for rank in range(ranks):
        held = most_in_flight(name, ranks, m, stages // ranks, rank)
        assert max(map(sum, held)) / (stages // ranks) == pytest.approx(true.peak_in_flight[rank])
