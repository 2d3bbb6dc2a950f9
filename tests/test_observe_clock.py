"""Every second of a step is charged to exactly one place."""

import threading
import time

import pytest

from fivefold.observe.clock import PLACES, StepClock


def test_inner_regions_are_not_counted_in_outer_ones() -> None:
    clock = StepClock()
    start = time.perf_counter()
    with clock.measure("data"):
        time.sleep(0.01)
    with clock.measure("compute"):
        time.sleep(0.02)
        with clock.measure("communication"):
            time.sleep(0.03)
            with clock.measure("compute"):  # a region may come again inside another
                time.sleep(0.01)
        time.sleep(0.01)
    time.sleep(0.02)
    seconds = clock.lap()
    elapsed = time.perf_counter() - start

    assert set(seconds) == set(PLACES)
    assert sum(seconds.values()) == pytest.approx(elapsed, rel=0.01)
    # sleep never returns early; how late it is depends on the machine
    least = {"data": 0.01, "compute": 0.04, "communication": 0.03, "other": 0.02}
    assert all(seconds[place] >= least.get(place, 0.0) for place in PLACES)
    assert seconds["checkpoint"] == 0.0


def test_laps_follow_each_other_without_a_gap() -> None:
    clock = StepClock()
    start = time.perf_counter()
    laps = []
    for _ in range(3):
        with clock.measure("compute"):
            time.sleep(0.01)
        laps.append(clock.lap())
    elapsed = time.perf_counter() - start
    assert sum(sum(lap.values()) for lap in laps) == pytest.approx(elapsed, rel=0.01)


def test_a_lap_may_end_inside_a_region() -> None:
    clock = StepClock()
    with clock.measure("checkpoint"):
        time.sleep(0.01)
        first = clock.lap()
        time.sleep(0.01)
    second = clock.lap()
    assert first["checkpoint"] >= 0.01
    assert second["checkpoint"] >= 0.01


def test_an_error_leaves_the_region() -> None:
    clock = StepClock()
    with pytest.raises(KeyError), clock.measure("compute"):
        raise KeyError
    clock.lap()
    time.sleep(0.01)
    assert clock.lap()["compute"] == 0.0


def test_other_threads_are_not_counted() -> None:
    clock = StepClock()

    def work() -> None:
        with clock.measure("communication"):
            time.sleep(0.02)

    thread = threading.Thread(target=work)
    with clock.measure("compute"):
        thread.start()
        thread.join()
    seconds = clock.lap()
    assert seconds["communication"] == 0.0
    assert seconds["compute"] >= 0.02
