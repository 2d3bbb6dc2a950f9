"""The wall time of a step by what it was spent on."""

from __future__ import annotations

import threading
import time
from typing import Literal

Place = Literal["compute", "communication", "data", "checkpoint", "other"]
PLACES: tuple[Place, ...] = ("compute", "communication", "data", "checkpoint", "other")


class StepClock:
    """Charges every second of wall time to exactly one place.

        with clock.measure("compute"):
            with clock.measure("communication"):  # exclusive: these seconds are not compute
                ...
        seconds = clock.lap()  # {"compute": …, "communication": …, …}; the sum is the time since the last lap

    Time outside all regions is "other". Communication that other threads or the device overlap with compute
    costs no wall time here, so what is charged to "communication" is the exposed part. On a GPU a region
    contains what the host waits for inside it.

    Regions belong to the thread that made the clock; on other threads `measure` does nothing, since their
    time runs beside this thread's and would be counted twice.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._places: list[Place] = ["other"]  # open regions, innermost last
        self._seconds = dict.fromkeys(PLACES, 0.0)
        self._mark = time.perf_counter()

    def measure(self, place: Place) -> _Region:
        """A context manager: time inside it, less inner regions, is charged to `place` (see `PLACES`)."""
        return _Region(self, place)

    def move(self, seconds: float, origin: Place, place: Place) -> None:
        """Charges `seconds` that were charged to `origin` to `place` instead."""
        self._seconds[origin] -= seconds
        self._seconds[place] += seconds

    def lap(self) -> dict[Place, float]:
        """Seconds by place since the last lap (or since the clock was made), and starts the next lap."""
        self._charge()
        seconds, self._seconds = self._seconds, dict.fromkeys(PLACES, 0.0)
        return seconds

    def _charge(self) -> None:
        """Gives the time since the last mark to the innermost open region."""
        now = time.perf_counter()
        self._seconds[self._places[-1]] += now - self._mark
        self._mark = now

    def _enter(self, place: Place) -> None:
        if threading.get_ident() == self._thread:
            self._charge()
            self._places.append(place)

    def _exit(self) -> None:
        if threading.get_ident() == self._thread:
            self._charge()
            self._places.pop()


class _Region:
    """One use of `StepClock.measure`; a class: a generator would cost several times more."""

    __slots__ = ("_clock", "_place")

    def __init__(self, clock: StepClock, place: Place) -> None:
        self._clock = clock
        self._place = place

    def __enter__(self) -> None:
        self._clock._enter(self._place)

    def __exit__(self, *exception: object) -> None:
        self._clock._exit()
