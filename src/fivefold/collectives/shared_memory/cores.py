"""Which core each of a host's ranks runs on, and a way off one that several share while another has none.

Ranks on one core that wait for each other run in turn, and each is asleep or has just run whenever Linux looks for
one to move: it leaves them together for ten milliseconds and more, in which each call takes three times as long.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

_SHARE = 0.01  # of this thread's time that looking around may take
_CORE_FIELD = 36  # in /proc/PID/stat, after the name


class Cores:
    """The cores of the ranks of this host.

    Args:
        others: the processes of the other ranks.
    """

    def __init__(self, others: Sequence[int]) -> None:
        self.crowded = len(others) >= len(os.sched_getaffinity(0))
        self.others = others
        self._next_look = 0.0

    def spread(self) -> bool:
        """Moves this thread to another of its cores if at least two ranks fewer are there; whether it did."""
        began = time.monotonic()
        if began < self._next_look:
            return False
        try:
            return self._spread()
        finally:
            now = time.monotonic()
            self._next_look = now + (now - began) / _SHARE

    def _spread(self) -> bool:
        allowed = os.sched_getaffinity(0)
        if len(allowed) == 1:
            return False
        mine = core_of("thread-self")
        others = Counter(map(core_of, self.others))
        best = min(allowed, key=lambda core: (others[core], abs(core - mine)))
        if others[mine] <= others[best]:
            return False
        with suppress(OSError):  # a core that has been taken away meanwhile
            os.sched_setaffinity(0, {best})
            os.sched_setaffinity(0, allowed)
        return True


def core_of(process: int | str) -> int:
    """Where a process's first thread runs or ran last; -1 if it has ended or cannot be seen."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[_CORE_FIELD])
    except OSError:
        return -1
