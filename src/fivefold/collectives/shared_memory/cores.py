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
        # Each may be bound to a core of its own.
        cores = os.sched_getaffinity(0).union(*map(cores_of, others))
        self.crowded = len(others) >= len(cores)
        """Whether ranks outnumber the cores that they may use together."""
        self.others = others
        self._next_look = 0.0

    def spread(self) -> bool:
        """Moves this thread to another of its cores if at least two ranks fewer are there; whether it did."""
        if time.monotonic() < self._next_look:
            return False
        began = time.thread_time()  # without that of others, which may run in between
        try:
            return self._spread()
        finally:
            self._next_look = time.monotonic() + (time.thread_time() - began) / _SHARE

    def _spread(self) -> bool:
        mine = core_of("thread-self")
        others = Counter(map(core_of, self.others))
        allowed = os.sched_getaffinity(0)
        best = min(allowed, key=lambda core: (others[core], abs(core - mine)))
        if others[mine] <= others[best]:
            return False
        bound = found = {best}
        with suppress(OSError):  # a core that has been taken away meanwhile
            try:
                os.sched_setaffinity(0, bound)  # milliseconds where the core is busy
                found = os.sched_getaffinity(0)
            finally:  # whatever a signal's handler raises in between
                if found == bound:  # not what somebody has set meanwhile
                    os.sched_setaffinity(0, allowed)
            return True
        return False


def cores_of(process: int) -> set[int]:
    """Those that a process's first thread may run on; none if it has ended."""
    try:
        return os.sched_getaffinity(process)
    except OSError:
        return set()


def core_of(process: int | str) -> int:
    """Where a process's first thread runs or ran last; -1 if it has ended or cannot be seen."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[_CORE_FIELD])
    except OSError:
        return -1
