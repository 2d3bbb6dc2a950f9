"""What passing data from core to core through memory costs: two processes, each on a core of its own.

    python benchmarks/cache_lines.py

In each pass a process writes 512 KiB into one of its two slots, through the caches or past them, copies them for
itself, and reads the other's slot. Then both copy results of several lengths at the same time, in either way.
"""

import ctypes
import mmap
import os
import time
from statistics import median

from fivefold.collectives.shared_memory.copying import Copy, copy, stream

PASS_BYTES = 1 << 19
PASSES = 400
WAYS = {"through the caches": copy, "past them": stream}
RESULT_BYTES = (1 << 20, 1 << 22, 1 << 24)
COPIES = 40
LINE = 8  # words


class Pair:
    """The two processes, as one of them sees it."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, PASS_BYTES * 5)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + PASS_BYTES
        self._words = memoryview(memory).cast("Q")
        self._meetings = 0
        self.other = os.fork()
        self.rank = 0 if self.other else 1
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[self.rank]})

    def meet(self) -> None:
        self._meetings += 1
        place = self._meetings % 2 * 2 * LINE
        self._words[place + self.rank * LINE] = self._meetings
        while self._words[place + (1 - self.rank) * LINE] < self._meetings:
            pass


def main() -> None:
    pair = Pair()
    for name, way in WAYS.items():
        seconds = passes(pair, way)
        if pair.rank == 0:
            row = (f"{part} {median(found) * 1e6:6.1f} µs" for part, found in seconds.items())
            print(f"512 KiB, slots written {name + ':':20}", ", ".join(row), flush=True)
    for size in RESULT_BYTES:
        found = {name: median(copies(pair, way, size)) * 1e6 for name, way in WAYS.items()}
        if pair.rank == 0:
            row = (f"{name} {micros:6.0f} µs" for name, micros in found.items())
            print(f"{size >> 20:3} MiB copied by both:", ", ".join(row), flush=True)
    if pair.rank:
        os._exit(0)
    os.waitpid(pair.other, 0)


def passes(pair: Pair, write: Copy) -> dict[str, list[float]]:
    """Seconds of each part of each pass on this rank."""
    now = time.perf_counter
    buffers = [ctypes.create_string_buffer(PASS_BYTES) for _ in range(3)]
    source, own, got = map(ctypes.addressof, buffers)
    seconds: dict[str, list[float]] = {"write": [], "copy": [], "read": []}
    for step in range(PASSES):
        ctypes.memset(source, step & 127, PASS_BYTES)
        mine, others = (
            pair.start + (2 * rank + step % 2) * PASS_BYTES for rank in (pair.rank, 1 - pair.rank)
        )
        pair.meet()
        times = [now()]
        write(mine, source, PASS_BYTES)
        times.append(now())
        copy(own, source, PASS_BYTES)
        times.append(now())
        pair.meet()
        before = now()
        copy(got, others, PASS_BYTES)
        reading = now() - before
        for name, found in zip(seconds, (times[1] - times[0], times[2] - times[1], reading), strict=True):
            seconds[name].append(found)
    return seconds


def copies(pair: Pair, way: Copy, size: int) -> list[float]:
    """Seconds of each copy of so many bytes, while the other process copies as many."""
    buffers = [mmap.mmap(-1, size) for _ in range(2)]
    source, place = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers)
    seconds = []
    for step in range(COPIES):
        ctypes.memset(source, step & 127, size)
        pair.meet()
        before = time.perf_counter()
        way(place, source, size)
        seconds.append(time.perf_counter() - before)
    return seconds


if __name__ == "__main__":
    main()
