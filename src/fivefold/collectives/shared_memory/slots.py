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
SELDOM = 4  # one of so many writes is timed while two slots are in use
SLOW_SECONDS_PER_BYTE = 0.25e-9  # from here on many slots are tried
BETTER = 1.5  # times as fast: what they have to be
FEW = 8  # writes that tell how fast many slots are
STAY = 50  # timed writes between two trials


class Slots:
    """The slots of one rank, by number."""

    def __init__(self) -> None:
        self.timed_every = SELDOM
        """One of so many writes is to be timed."""
        self._most = MANY  # how many there may be
        self._last = 0
        self._two: tuple[int, int] | None = (0, 1)
        self._trials = self._choose()
        next(self._trials)

    def next(self) -> int:
        """The one to write now; never the one before, which may still be read."""
        if self._two is None:
            self._last = (self._last + 1) % self._most
        else:
            one, other = self._two
            self._last = other if self._last == one else one
        return self._last

    def only_two(self) -> None:
        """Takes the last choice back: there is memory for no more than two."""
        self._last -= 1
        self._two = (0, 1)
        self._most = 2

    def took(self, size: int, seconds: float) -> None:
        """What writing so many bytes has taken."""
        self._trials.send(seconds / size)

    def _choose(self) -> Generator[None, float, None]:
        """Decides how many are in use, from the seconds per byte of the writes, which it is sent."""
        new_memory = self._most
        while True:
            two = yield from self._two_too_slow()
            self._two = None
            yield from _costs(new_memory)
            new_memory = 0
            many = median((yield from _costs(FEW)))
            in_vain = two <= BETTER * many
            while two > BETTER * many:
                many = median((yield from _costs(STAY)))
                self._next_two()
                two = min((yield from _costs(5))[2:])  # the first two are as the many: not used for long
                self._two = None
            self._next_two()
            self.timed_every = SELDOM
            if in_vain:
                yield from _costs(STAY)

    def _two_too_slow(self) -> Generator[None, float, float]:
        """Ends with what a write takes when a few in a row have been slow: one alone may have been interrupted."""
        while True:
            if (yield) > SLOW_SECONDS_PER_BYTE:
                self.timed_every = 1
                if (two := min((yield from _costs(4)))) > SLOW_SECONDS_PER_BYTE:
                    return two
                self.timed_every = SELDOM

    def _next_two(self) -> None:
        """From now on two are in use: those whose turn it is."""
        self._two = ((self._last + 1) % self._most, (self._last + 2) % self._most)


def _costs(count: int) -> Generator[None, float, list[float]]:
    costs = []
    for _ in range(count):
        costs.append((yield))
    return costs
