"""Which of its slots a rank writes next: one of two in turn, or of many where that is faster.

Before a core writes what another has read, it has to take each cache line back from it. Between cores that share a
cache this costs little, and two slots, which stay in it, are fastest. Between others it takes ten times as long as the
writing itself; then many slots in turn are faster, since the other core's caches have dropped what comes from the
oldest by the time it is written again. Which it is depends on the machine, and in a virtual one on the minute: so it is
measured.
"""

from collections.abc import Generator
from statistics import median

MANY = 32  # of 1 MiB: as much as a cache that cores share; a power of two
TIMED_BYTES = 1 << 17  # shorter writes tell too little
TIMED_STEPS = 4  # one of so many is timed
SLOW_SECONDS_PER_BYTE = 0.25e-9  # two slots are left only where each of the last few writes took longer
FEW = 4
BETTER = 1.5  # times as fast: what many slots have to be
STAY = 100  # timed writes between two trials


class Slots:
    """The slots of one rank, by number.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int = MANY) -> None:
        self._most = most
        self._in_use = 2
        self._last = 0
        self._trials = self._choose()
        next(self._trials)

    def next(self) -> int:
        """The one to write now; never the one before, which may still be read."""
        self._last = (self._last + 1) % self._in_use
        return self._last

    def only_two(self) -> None:
        """Takes the last choice back: there is memory for no more than two."""
        self._last -= 1
        self._most = self._in_use = 2

    def took(self, size: int, seconds: float) -> None:
        """What writing so many bytes has taken."""
        self._trials.send(seconds / size)

    def _choose(self) -> Generator[None, float, None]:
        """Decides how many are in use, from the seconds per byte of each write, which it is sent."""
        once_round = -(-self._most // TIMED_STEPS)
        while True:
            slow: list[float] = []
            while len(slow) < FEW:
                cost = yield
                slow = [*slow, cost] if cost > SLOW_SECONDS_PER_BYTE else []
            two = min(slow)
            self._in_use = self._most
            yield from _costs(once_round)  # of memory that is new
            many = median((yield from _costs(once_round)))
            while two > BETTER * many:
                many = median((yield from _costs(STAY)))
                self._in_use = 2
                two = min((yield from _costs(FEW))[1:])  # the first one has not been used for long
                self._in_use = self._most
            self._in_use = 2
            yield from _costs(STAY)


def _costs(count: int) -> Generator[None, float, list[float]]:
    costs = []
    for _ in range(count):
        costs.append((yield))
    return costs
