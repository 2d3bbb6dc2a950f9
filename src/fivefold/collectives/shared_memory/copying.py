"""Copies between addresses: through the caches, or past them.

A copy past the caches (non-temporal stores) neither fetches what it writes over nor takes it from another core, and
what it writes ends up in memory. So it is faster where the result is longer than the caches, and where a core would
write what another, with which it shares no cache, has read: that takes ten times as long as the copy itself. C
libraries use such stores from some length on, which is no use for either; so here is a loop of them, for x86-64.
"""

import ctypes
import mmap
import platform
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeAlias

LINE_BYTES = 64  # of a processor's cache
PIECE_BYTES = 1 << 19
TIMED_BYTES = 1 << 15  # shorter writes tell too little
SELDOM = 4  # one of so many writes is timed
SUSPICIOUS_SECONDS_PER_BYTE = 0.1e-9  # writes that take so long may be faster past the caches
A_FEW = 5  # timed writes in a row that tell how long one takes: each may have been interrupted
WORTH = 2.5  # times as fast: what writing past the caches has to be, since reading takes longer then
STAY = 100  # timed writes between two trials
CACHES = Path("/sys/devices/system/cpu")
USUAL_CACHE_BYTES = 1 << 25

Copy: TypeAlias = Callable[[int, int, int], None]
"""Copies bytes: to, from, how many."""

# rdi: to, rsi: from, rdx: bytes, a multiple of 64
_LOOP = bytes.fromhex(
    "f30f1efa"  # endbr64
    "f30f6f06 f30f6f4e10 f30f6f5620 f30f6f5e30"  # again: movdqu xmm0 to xmm3, [rsi], [rsi+16], [rsi+32], [rsi+48]
    "660fe707 660fe74f10 660fe75720 660fe75f30"  # movntdq [rdi], [rdi+16], [rdi+32], [rdi+48], xmm0 to xmm3
    "4883c640 4883c740 4883ea40 75cc"  # add rsi, 64; add rdi, 64; sub rdx, 64; jnz again
    "0faef8 c3"  # sfence; ret
)


memmove: Copy = ctypes.PYFUNCTYPE(None, *[ctypes.c_void_p] * 3)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""The C library's, called with less ado than through ctypes' own: it keeps the interpreter, and returns nothing."""


def copy(to: int, source: int, size: int) -> None:
    """Copies bytes between addresses. In pieces, which glibc's memmove copies a fifth faster than more at a time."""
    while size > PIECE_BYTES:
        memmove(to, source, PIECE_BYTES)
        to, source, size = to + PIECE_BYTES, source + PIECE_BYTES, size - PIECE_BYTES
    memmove(to, source, size)


def stream(to: int, source: int, size: int) -> None:
    """The same, past the caches, where that can be done."""
    loop = _streaming()
    head = min(-to % LINE_BYTES, size)
    body = (size - head) // LINE_BYTES * LINE_BYTES
    if loop is None or not body:
        copy(to, source, size)
        return
    if head:
        memmove(to, source, head)
    loop(to + head, source + head, body)
    if rest := size - head - body:
        memmove(to + size - rest, source + size - rest, rest)


class Writing:
    """Copies into memory that another core reads, in the way that is faster.

    Which it is depends on the machine, and in a virtual one on the minute: so it is measured.
    """

    def __init__(self) -> None:
        self._choices = _choices()
        self._way = next(self._choices)
        self._turn = 0

    def write(self, to: int, source: int, size: int) -> None:
        if size < TIMED_BYTES:
            memmove(to, source, size)
            return
        self._turn = (self._turn + 1) % SELDOM
        if self._turn:
            self._way(to, source, size)
            return
        before = time.perf_counter()
        self._way(to, source, size)
        self._way = self._choices.send((time.perf_counter() - before) / size)


def _choices() -> Generator[Copy, float, None]:
    """How to write next; is sent the seconds per byte that it has taken."""
    while True:
        slow: list[float] = []
        while len(slow) < A_FEW:
            cost = yield copy
            slow = [*slow, cost] if cost > SUSPICIOUS_SECONDS_PER_BYTE else []
        through, past = min(slow), min((yield from _costs(stream, A_FEW)))
        while through > WORTH * past:
            yield from _costs(stream, STAY)
            through = yield copy
        yield from _costs(copy, STAY)


def _costs(way: Copy, count: int) -> Generator[Copy, float, list[float]]:
    costs = []
    for _ in range(count):
        costs.append((yield way))
    return costs


def cache_bytes(ranks: int, cores: Iterable[int], system: Path = CACHES) -> int:
    """What each of so many ranks has of the caches that the cores share on which they may run."""
    sizes = {}
    with suppress(OSError, ValueError):
        for core in cores:
            place = system / f"cpu{core}/cache/index3"
            sizes[(place / "shared_cpu_list").read_text()] = (
                int((place / "size").read_text().strip("K\n")) << 10
            )
    largest = sorted(sizes.values(), reverse=True)[:ranks]
    return (sum(largest) or USUAL_CACHE_BYTES) // ranks


@cache
def _streaming() -> Copy | None:
    """The loop above as a function; None where there is none, or a process may not make memory executable."""
    if platform.machine() != "x86_64":
        return None
    memory = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(_LOOP)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if protect(start, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        return None
    loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(start)
    loop.memory = memory  # type: ignore[attr-defined]  # stays as long as the function
    return loop
