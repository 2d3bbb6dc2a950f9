"""Collectives between ranks of one host: shared memory beside gloo and OpenMPI, in turns within one run.

python benchmarks/shm.py [--ranks 2 4] [--primitives all_to_all] [--rounds 15]
python benchmarks/shm.py --steps [--sizes S1 tiny] [--layouts "zero 3"]  # steps of training, over both transports

OpenMPI takes part if mpirun and mpi4py are there. Each system has ranks of its own, which sleep while another has its
turn: those of "gloo" and "shm" are forks of one process, as `fivefold` starts them; those of "shm apart" are each a
Python of its own, as torchrun, srun and mpirun start them, mpirun OpenMPI's. A time is the mean over a turn's calls,
of the slowest rank, as nccl-tests and the OSU benchmarks count, after as many calls to warm up as the former makes; of
these the median over the turns, and the best, which other processes on the machine disturb least. A ratio is the median
of the turns' ratios; of bus bandwidths it is the same. What is sent is written anew before each call, as in training:
else who reads it where it lies (OpenMPI) finds it in its own cache after the first call. "+ write" is a call and this
writing: memory that another core has read is slow to write, be it a slot of ours, within the call, or what OpenMPI
sent, before the next one.

Steps are of two ranks, float32, one thread each, of the sizes in side_by_side/sizes.py. Both transports' ranks are
started once and take turns; a ratio is of the medians of all turns.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import count, product
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple, TypeAlias

sys.path.insert(0, str(Path(__file__).parent))

from side_by_side.pool import Running
from side_by_side.sizes import SIZES as MODELS
from side_by_side.systems import CP, PP, TP, ZERO

PRIMITIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SIZES = (1 << 16, 1 << 20, 1 << 24)
ROUNDS = 15
WARM_UP_CALLS, LEAST_CALLS = 5, 10
LAYOUTS = (TP, *PP, *CP, ZERO[3])
TRANSPORTS = ("gloo", "shm")
APART = "shm apart"
PATIENCE = timedelta(minutes=10)
Call: TypeAlias = Callable[[str, Any, Any], None]
MACHINE = {"matmul": "highest", "malloc": "keep", "peak_flops": 1e11}  # for both: nothing is measured


class Turn(NamedTuple):
    """Mean seconds of a call, and of a call with the writing before it, on the slowest rank."""

    call: float
    round: float


def main() -> None:
    names = [system.layout for system in LAYOUTS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--primitives", nargs="+", choices=PRIMITIVES, default=PRIMITIVES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", action="store_true", help="steps of training instead of collectives")
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=["S1", "tiny"], help="for --steps")
    parser.add_argument("--layouts", nargs="+", choices=names, default=names, help="for --steps")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        over_torch(arguments.rank, arguments.ranks[0], APART, arguments.port)
    elif arguments.port:
        over_mpi(arguments.port)
    elif arguments.steps:
        training(arguments.sizes, arguments.layouts, arguments.rounds)
    else:
        for ranks in arguments.ranks:
            compare(ranks, arguments.primitives, arguments.rounds)


def training(sizes: Sequence[str], layouts: Sequence[str], rounds: int) -> None:
    """Prints milliseconds of a step of each layout over each transport."""
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, {rounds} turns")
    print(f"{'size':<6}{'layout':<16}", *(f"{name:>6}: ms {'best':>7}" for name in TRANSPORTS))
    for size in sizes:
        for system in [system for system in LAYOUTS if system.layout in layouts]:
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


def compare(ranks: int, primitives: Sequence[str], rounds: int) -> None:
    """Prints one table: the systems take turns, each in ranks of its own, which sleep between their turns."""
    from torch.distributed import TCPStore

    from fivefold.proof.ranks import Ranks

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    turns: dict[str, count[int]] = defaultdict(count)
    over = Event()
    with ExitStack() as stack:

        def watch(name: str, run: Callable[[], object]) -> None:
            thread = Thread(target=watched, args=(name, run, over))
            thread.start()
            stack.callback(thread.join)

        systems = []
        own = [sys.executable, __file__, f"--port={store.port}"]
        if shutil.which("mpirun") and find_spec("mpi4py"):
            systems.append("OpenMPI")
            mpirun = f"mpirun -n {ranks} --oversubscribe --allow-run-as-root --bind-to none".split()
            watch("OpenMPI", subprocess.Popen([*mpirun, *own]).wait)
        for system in TRANSPORTS:
            systems.append(system)
            started = stack.enter_context(Ranks(ranks, backend=None))
            run = partial(started.run, over_torch, system, store.port, timeout=PATIENCE.total_seconds())
            watch(system, run)
        systems.append(APART)
        for rank in range(ranks):
            process = subprocess.Popen([*own, f"--rank={rank}", f"--ranks={ranks}"])
            watch(f"{APART}, rank {rank}", process.wait)
        stack.callback(lambda: [store.set(f"{system} {next(turns[system])}", "end") for system in systems])
        stack.callback(over.set)
        print(f"{ranks} ranks, load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")
        print(f"{'primitive':<15}{'bytes':>10}", *(f"{name:>9}: µs   best + write" for name in systems))
        for primitive, size in product(primitives, SIZES):
            row: dict[str, list[Turn]] = {name: [] for name in systems}
            for turn in range(rounds):
                for place in range(len(systems)):
                    system = systems[(turn + place) % len(systems)]
                    name = f"{system} {next(turns[system])}"
                    store.set(name, f"{primitive} {size}")
                    answers = [store.get(f"{name} {rank}").decode().split() for rank in range(ranks)]
                    row[system].append(
                        Turn(*(max(map(float, column)) for column in zip(*answers, strict=True)))
                    )
            print(report(primitive, size, row), flush=True)


def watched(name: str, run: Callable[[], object], over: Event) -> None:
    """Runs a part of a system. If it ends too soon, so does the program, and with its store every other rank."""
    from fivefold.proof.ranks import RankError

    try:
        end = f"ended with exit code {run()}"
    except RankError as error:
        end = str(error)
    if not over.is_set():
        print(f"{name}: {end}", file=sys.stderr, flush=True)
        os._exit(1)


def serve(system: str, rank: int, ranks: int, store: Any, call: Call, barrier: Callable[[], object]) -> None:
    """One rank of a system: tells the mean seconds of a call, and with what is written before, of each of its turns."""
    import torch

    torch.set_num_threads(1)
    order = ""
    for turn in count():
        name = f"{system} {turn}"
        if (asked := store.get(name).decode()) != order:
            order = asked
            if order == "end":
                return
            primitive, size = order.split()
            numel = int(size) // 4 // ranks * ranks
            whole, other, part = torch.ones(numel), torch.ones(numel), torch.ones(numel // ranks)
            out, source = {
                "all_reduce": (whole, whole),
                "reduce_scatter": (part, whole),
                "all_gather": (whole, part),
                "all_to_all": (other, whole),
            }[primitive]
            repeats = max(LEAST_CALLS, min(100, (1 << 26) // int(size)))
        for _ in range(WARM_UP_CALLS):
            call(primitive, out, source)
        barrier()
        calls = 0.0
        began = time.perf_counter()
        for _ in range(repeats):
            source.fill_(1.0)
            before = time.perf_counter()
            call(primitive, out, source)
            calls += time.perf_counter() - before
        store.set(f"{name} {rank}", f"{calls / repeats} {(time.perf_counter() - began) / repeats}")


def over_torch(rank: int, ranks: int, system: str, port: int) -> None:
    """A rank over gloo or shared memory."""
    import torch.distributed as dist

    from fivefold.collectives.group import register
    from fivefold.collectives.record import Recorder
    from fivefold.collectives.shared_memory.transport import SharedMemory

    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    backend = "gloo" if system == "gloo" else register(Recorder(), PATIENCE, SharedMemory())
    dist.init_process_group(backend, store=dist.PrefixStore(system, store), rank=rank, world_size=ranks)

    def call(primitive: str, out: Any, source: Any) -> None:
        if primitive == "all_reduce":
            dist.all_reduce(out)
        elif primitive == "reduce_scatter":
            dist.reduce_scatter_single(out, source)
        elif primitive == "all_gather":
            dist.all_gather_single(out, source)
        else:
            dist.all_to_all_single(out, source)

    serve(system, rank, ranks, store, call, dist.barrier)
    dist.destroy_process_group()


def over_mpi(port: int) -> None:
    """A rank that mpirun started."""
    from mpi4py import MPI
    from torch.distributed import TCPStore

    world = MPI.COMM_WORLD

    def call(primitive: str, out: Any, source: Any) -> None:
        out, source = out.numpy(), source.numpy()
        if primitive == "all_reduce":
            world.Allreduce(MPI.IN_PLACE, out)
        elif primitive == "reduce_scatter":
            world.Reduce_scatter_block(source, out)
        elif primitive == "all_gather":
            world.Allgather(source, out)
        else:
            world.Alltoall(source, out)

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    serve("OpenMPI", world.Get_rank(), world.Get_size(), store, call, world.Barrier)


def report(primitive: str, size: int, row: dict[str, list[Turn]]) -> str:
    """A line of the table with the ratios the bars are about."""
    cells, ratios = [], []
    for name, turns in row.items():
        calls, rounds = zip(*turns, strict=True)
        cells.append(f"{median(calls) * 1e6:13.0f} {min(calls) * 1e6:6.0f} {median(rounds) * 1e6:7.0f}")
        if name != "shm":
            pairs = list(zip(turns, row["shm"], strict=True))
            call = median(other.call / own.call for other, own in pairs)
            whole = median(other.round / own.round for other, own in pairs)
            best = min(calls) / min(own.call for own in row["shm"])
            ratios.append(f"{name} / shm = {call:.2f} (best {best:.2f}, + write {whole:.2f})")
    return f"{primitive:<15}{size:>10}" + " ".join(["", *cells, "  ", *ratios])


if __name__ == "__main__":
    main()
