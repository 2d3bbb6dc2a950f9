"""What passing data from core to core through memory costs: two processes, 512 KiB a pass, in turns.

    python benchmarks/cache_lines.py

Each stays on a core of its own, writes its data into a slot in shared memory, copies them for itself, and reads the
other's slot. Slots are used in turn, so many of them: writing what the other core has read last means taking each line
away from it.
"""

import ctypes
import mmap
import os
import time
from statistics import median

PASS_BYTES = 1 << 19
PASSES = 400
SLOTS = (1, 2, 8, 32)
LINE = 8  # words


def main() -> None:
    memory = mmap.mmap(-1, PASS_BYTES * (2 * max(SLOTS) + 1))
    other = os.fork()
    rank = 0 if other else 1
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    step = 0
    for slots in SLOTS:
        step, seconds = passes(memory, rank, slots, step)
        if rank == 0:
            row = (f"{name} {median(found) * 1e6:6.1f} µs" for name, found in seconds.items())
            print(f"{slots:3} slots a rank:", ", ".join(row), flush=True)
    if rank:
        os._exit(0)
    os.waitpid(other, 0)


def passes(memory: mmap.mmap, rank: int, slots: int, step: int) -> tuple[int, dict[str, list[float]]]:
    """Seconds of each part of each pass on this rank, and the number of the last pass."""
    words, copy, now = memoryview(memory).cast("Q"), ctypes.memmove, time.perf_counter
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + PASS_BYTES
    source, own, got = (ctypes.create_string_buffer(PASS_BYTES) for _ in range(3))
    seconds: dict[str, list[float]] = {"write a slot": [], "copy": [], "read a slot": []}

    def meet(place: int) -> None:
        words[(2 * place + rank) * LINE] = step
        while words[(2 * place + 1 - rank) * LINE] < step:
            pass

    for _ in range(PASSES):
        step += 1
        ctypes.memset(source, step & 127, PASS_BYTES)
        mine, others = (start + (slots * r + step % slots) * PASS_BYTES for r in (rank, 1 - rank))
        meet(0)
        times = [now()]
        copy(mine, source, PASS_BYTES)
        times.append(now())
        copy(own, source, PASS_BYTES)
        times.append(now())
        meet(1)
        before = now()
        copy(got, others, PASS_BYTES)
        reading = now() - before
        meet(2)
        for name, found in zip(seconds, (times[1] - times[0], times[2] - times[1], reading), strict=True):
            seconds[name].append(found)
    return step, seconds


if __name__ == "__main__":
    main()
