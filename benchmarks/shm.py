"""Collectives between ranks of one host: shared memory beside gloo and OpenMPI, in turns within one run.

python benchmarks/shm.py [--ranks 2 4] [--rounds 15]     # collectives
python benchmarks/shm.py --steps [--sizes S1 tiny]       # steps of training, over shared memory and over gloo

OpenMPI takes part if mpirun and mpi4py are there. A time is the mean over a turn's calls, of the slowest rank,
as nccl-tests and the OSU benchmarks count; of these the median over the turns, and the best, which other
processes on the machine disturb least. Bus bandwidth is bytes over time, times 2(n-1)/n for all_reduce and (n-1)/n for
the others. What is sent is written anew before each call, as in training: else who reads it where it lies (OpenMPI)
finds it in its own cache after the first call. "copies" is what shm does in memory, without what surrounds it: torch's
call, the record, the engine.

Steps are of two ranks, float32, one thread each, of the sizes in side_by_side/sizes.py. Both transports' ranks are
started once and take turns; a ratio is of the medians of all turns.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from side_by_side.pool import Running
from side_by_side.sizes import SIZES as MODELS
from side_by_side.systems import CP, PP, TP, ZERO

PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SIZES = (1 << 16, 1 << 20, 1 << 24)
ROUNDS = 15
LAYOUTS = (TP, *PP, *CP, ZERO[3])
TRANSPORTS = ("gloo", "shm")
MACHINE = {"matmul": "highest", "malloc": "keep", "peak_flops": 1e11}  # for both: nothing is measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", action="store_true", help="steps of training instead of collectives")
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=["S1", "tiny"], help="for --steps")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port:
        measure(arguments.rank, arguments.ranks[0], arguments.port, arguments.rounds)
        return
    if arguments.steps:
        training(arguments.sizes, arguments.rounds)
        return
    for ranks in arguments.ranks:
        start(ranks, arguments.rounds)


def training(sizes: list[str], rounds: int) -> None:
    """Prints milliseconds of a step of each layout over each transport."""
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, {rounds} turns")
    print(f"{'size':<6}{'layout':<16}", *(f"{name:>6}: ms {'best':>7}" for name in TRANSPORTS))
    for size in sizes:
        for system in LAYOUTS:
            found: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
            with ExitStack() as stack:
                running = {}
                for name in TRANSPORTS:
                    over = replace(system, options=system.options | {"backend": name})
                    running[name] = stack.enter_context(Running(over, MODELS[size], MACHINE))
                count = 2 if size != "tiny" else 10
                for _ in range(rounds):
                    for name, ranks in running.items():
                        found[name].append(ranks.steps(count) / count)
            cells = [f"{median(times) * 1e3:10.1f} {min(times) * 1e3:7.1f}" for times in found.values()]
            (gloo, shm) = found.values()
            ratio = f"gloo / shm = {median(gloo) / median(shm):.2f} (best {min(gloo) / min(shm):.2f})"
            print(f"{size:<6}{system.layout:<16}", *cells, " ", ratio, flush=True)


def start(ranks: int, rounds: int) -> None:
    """Starts the ranks: by mpirun if OpenMPI can take part."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, f"--ranks={ranks}", f"--port={port}", f"--rounds={rounds}"]
    if shutil.which("mpirun") and find_spec("mpi4py"):
        mpirun = ["mpirun", "-n", str(ranks), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
        subprocess.run([*mpirun, *command], check=True)
        return
    processes = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(ranks)]
    if any(process.wait() for process in processes):
        raise SystemExit("a rank failed")


def measure(rank: int | None, ranks: int, port: int, rounds: int) -> None:
    """One rank's part; the first prints."""
    import torch
    import torch.distributed as dist

    from fivefold.collectives.group import register
    from fivefold.collectives.record import Recorder
    from fivefold.collectives.shared_memory.exchange import Exchange
    from fivefold.collectives.shared_memory.peers import Directory, this_host
    from fivefold.collectives.shared_memory.segment import Segment
    from fivefold.collectives.shared_memory.transport import (
        RING_BYTES,
        SHARED_MEMORY,
        SLOT_BYTES,
        SharedMemory,
    )

    torch.set_num_threads(1)
    calls: dict[str, Callable[[str, Any, Any], None]] = {}
    if rank is None:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
        calls["OpenMPI"] = lambda primitive, out, source: over_mpi(
            MPI, primitive, out.numpy(), source.numpy()
        )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        register(Recorder(), timeout, SharedMemory()), store=store, rank=rank, world_size=ranks
    )
    gloo = dist.new_group(backend="gloo")
    calls["gloo"] = lambda primitive, out, source: over_torch(dist, gloo, primitive, out, source)
    calls["shm"] = lambda primitive, out, source: over_torch(dist, dist.group.WORLD, primitive, out, source)
    own = dist.PrefixStore("copies", store)
    peers = Directory(this_host(SHARED_MEMORY)).meet(own, rank, list(range(ranks)))
    segment = Segment.shared(own, peers, rank, SHARED_MEMORY, SLOT_BYTES, RING_BYTES)
    exchange = Exchange(segment)
    calls["copies"] = lambda primitive, out, source: only_copies(segment, exchange, primitive, out, source)
    if rank == 0:
        print(f"{ranks} ranks, load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
        print(
            f"{'primitive':<15}{'bytes':>10}", *(f"{name:>9}: µs {'best':>8} {'GB/s':>6}" for name in calls)
        )
    for primitive in PRIMITIVES:
        for size in SIZES:
            row = times(dist, calls, primitive, size, ranks, rounds)
            if rank == 0:
                print(report(primitive, size, ranks, row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def times(
    dist: Any, calls: Any, primitive: str, size: int, ranks: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a call in each turn by system, of the slowest rank; the systems take turns."""
    import torch

    numel = size // 4 // ranks * ranks
    whole, other, part = torch.ones(numel), torch.ones(numel), torch.ones(numel // ranks)
    pair = {
        "all_reduce": (whole, whole),
        "reduce_scatter": (part, whole),
        "all_gather": (whole, part),
        "all_to_all": (other, whole),
    }[primitive]
    repeats = max(3, min(100, (1 << 23) // size))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call(primitive, *pair)
            dist.barrier()
            total = 0.0
            for _ in range(repeats):
                pair[1].fill_(1.0)
                before = time.perf_counter()
                call(primitive, *pair)
                total += time.perf_counter() - before
            found[name].append(total / repeats)
    seconds = torch.tensor([found[name] for name in calls])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(calls, seconds.tolist(), strict=True))


def over_torch(dist: Any, group: Any, primitive: str, out: Any, source: Any) -> None:
    if primitive == "all_reduce":
        dist.all_reduce(out, group=group)
    elif primitive == "reduce_scatter":
        dist.reduce_scatter_single(out, source, group=group)
    elif primitive == "all_gather":
        dist.all_gather_single(out, source, group=group)
    else:
        dist.all_to_all_single(out, source, group=group)


def only_copies(segment: Any, exchange: Any, primitive: str, out: Any, source: Any) -> None:
    """The steps of the collective, one after another."""
    from fivefold.collectives.shared_memory.reduction import Kind
    from fivefold.collectives.shared_memory.span import even, whole

    if primitive == "all_reduce":
        steps = exchange.all_reduce(whole(out), Kind.SUM)
    elif primitive == "reduce_scatter":
        steps = exchange.reduce_scatter(whole(out), even(source, exchange.size), Kind.SUM)
    elif primitive == "all_gather":
        steps = exchange.all_gather(even(out, exchange.size), whole(source))
    else:
        steps = exchange.all_to_all(even(out, exchange.size), even(source, exchange.size), even=True)
    wait = os.sched_yield if exchange.size > len(os.sched_getaffinity(0)) else int
    for lack in steps:
        while segment.words[lack.word] < lack.target:
            wait()


def over_mpi(mpi: Any, primitive: str, out: Any, source: Any) -> None:
    world = mpi.COMM_WORLD
    if primitive == "all_reduce":
        world.Allreduce(mpi.IN_PLACE, out)
    elif primitive == "reduce_scatter":
        world.Reduce_scatter_block(source, out)
    elif primitive == "all_gather":
        world.Allgather(source, out)
    else:
        world.Alltoall(source, out)


def report(primitive: str, size: int, ranks: int, row: dict[str, list[float]]) -> str:
    """A line of the table with the ratios the bars are about."""
    factor = (2 if primitive == "all_reduce" else 1) * (ranks - 1) / ranks
    cells = [
        f"{median(seconds) * 1e6:13.0f} {min(seconds) * 1e6:8.0f} {size * factor / median(seconds) / 1e9:6.2f}"
        for seconds in row.values()
    ]
    shm = row["shm"]
    ratios = [
        f"{name} / shm = {median(seconds) / median(shm):.1f} (best {min(seconds) / min(shm):.1f})"
        for name, seconds in row.items()
        if name not in ("shm", "copies")
    ]
    return f"{primitive:<15}{size:>10}" + " ".join(["", *cells, "  ", *ratios])


if __name__ == "__main__":
    main()
