"""Time collectives, the backend's own beside programs, and check what they compute.

Starts local ranks, or is one under torchrun, srun or mpirun. Columns as nccl-tests has them: busbw is algbw times
2(n−1)/n for an all-reduce, (n−1)/n for reduce-scatter, all-gather and all-to-all, 1 for a broadcast.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fivefold.cli.arguments import add_debug_argument, add_json_argument, new_file, whole_number
from fivefold.cli.comm.sizes import check_memory, read_sizes
from fivefold.cli.extras import load_torch
from fivefold.config.errors import BadInput, RunFailed, did_you_mean
from fivefold.config.tree import Cluster
from fivefold.ledger.hardware import load_hardware
from fivefold.ledger.programs.catalogue import PRIMITIVES, PROGRAMS
from fivefold.render.comm import bench_page, bench_text

if TYPE_CHECKING:
    from fivefold.trainer.comm import Request
    from fivefold.trainer.place import Place

SIZES = "1K:16M"
TYPES = {"float32": 4, "float64": 8, "bf16": 2, "fp16": 2, "int64": 8}
"""Bytes of an element."""
OPERATIONS = ("sum", "mean", "max", "min")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks_argument(parser)
    parser.add_argument(
        "--sizes", default=SIZES, help=f"bytes: 64K,16M or 1K:64M (fourfold); default {SIZES}"
    )
    parser.add_argument(
        "--primitives", default=",".join(PRIMITIVES), help=f"of {', '.join(PRIMITIVES)}; default: all"
    )
    parser.add_argument(
        "--algorithms",
        default="",
        help="backends and programs, ring or ring@gloo; default: training's backend and every program over it",
    )
    parser.add_argument(
        "--type", default="float32", choices=list(TYPES), help="of the elements; default float32"
    )
    parser.add_argument("--op", default="sum", choices=OPERATIONS, help="what a reduction takes; default sum")
    parser.add_argument("--per-host", type=whole_number, default=0, help="take so many ranks for a host")
    parser.add_argument("--cluster", metavar="FILE", help="predict from this calibrated file")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with pictures")
    add_json_argument(parser)
    add_debug_argument(parser)


def add_ranks_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=whole_number, default=2, help="local ranks to start; default 2")


def run(arguments: argparse.Namespace) -> int:
    """0 = done, 1 = some element was wrong."""
    load_torch("fivefold.trainer.comm")
    from fivefold.trainer.launch import as_rank
    from fivefold.trainer.place import place_from

    place = place_from(os.environ)
    with as_rank(place, debug=arguments.debug):
        request = _request(arguments)
        check_room(request.sizes, arguments.ranks, place, _buffers(request))
        if place is None:
            return start(arguments.ranks, arguments.per_host, sys_words(arguments))
        return _rank(arguments, request, place)


def check_room(sizes: Sequence[int], ranks: int, place: "Place | None", buffers: int) -> None:
    """Refuses sizes for which this host has no memory: its ranks in `place`, or else `ranks` that are to be started
    here, each with so many buffers.
    """
    import torch

    from fivefold.trainer.host_memory import host_memory
    from fivefold.trainer.launch import check_count

    if place is None:
        check_count(ranks)
    local, available = place.local_world_size if place else ranks, host_memory()[0]
    if local and available and not torch.accelerator.is_available():
        check_memory(sizes, local, buffers, available)


def _buffers(request: "Request") -> int:
    """About how many buffers of one size a rank holds: one for each algorithm of a primitive, and three of 8 bytes an
    element by which results are checked."""
    programs = {name for primitive in request.primitives for name in PROGRAMS[primitive]}
    elsewhere = {primitive: programs - set(PROGRAMS[primitive]) for primitive in request.primitives}
    cases = max(
        sum(name.partition("@")[0] not in elsewhere[primitive] for name in request.algorithms)
        or 1 + len(PROGRAMS[primitive])
        for primitive in request.primitives
    )
    return cases + 3 * 8 // TYPES[request.dtype]


def sys_words(arguments: argparse.Namespace) -> list[str]:
    """The arguments again, for the ranks."""
    words = ["comm", arguments.action]
    for name, value in vars(arguments).items():
        if name == "action" or value in (None, False, "", 0):
            continue
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words


def start(ranks: int, per_host: int, words: list[str]) -> int:
    """Starts local ranks with these arguments.

    Raises:
        BadInput: too few to communicate, or they do not fill hosts of `per_host` ranks (0: there is one host).
    """
    from fivefold.trainer.launch import start_local

    if ranks < 2:
        raise BadInput(f"--ranks {ranks}: collectives need two ranks at least")
    if per_host and ranks % per_host:
        raise BadInput(
            f"--per-host {per_host}: {ranks} ranks do not fill such hosts; give a divisor of {ranks}"
        )
    sys.stdout.flush()
    imports = ["fivefold.trainer.comm"]
    return start_local(["-m", "fivefold", *words], ranks, imports=imports, saves=False)


def _request(arguments: argparse.Namespace) -> "Request":
    from fivefold.trainer.comm import Request, check_algorithms

    primitives = tuple(filter(None, arguments.primitives.split(",")))
    if not primitives:
        raise BadInput(f"--primitives: name one at least, of {', '.join(PRIMITIVES)}")
    for primitive in primitives:
        if primitive not in PRIMITIVES:
            hint = did_you_mean(primitive, PRIMITIVES)
            raise BadInput(f'--primitives: unknown primitive "{primitive}"; {hint}')
    if arguments.op == "mean" and arguments.type == "int64":
        raise BadInput("--op mean --type int64: whole numbers have no exact mean; take sum, max or min")
    hardware = load_hardware(Cluster(path=arguments.cluster)) if arguments.cluster else None
    request = Request(
        primitives,
        tuple(filter(None, arguments.algorithms.split(","))),
        tuple(read_sizes(arguments.sizes)),
        arguments.type,
        arguments.op,
        arguments.per_host,
        hardware.measured if hardware else (),
    )
    check_algorithms(request)
    return request


def _rank(arguments: argparse.Namespace, request: "Request", place: "Place") -> int:
    from fivefold.trainer.comm import bench_rows, check_algorithms, join

    with join(place, check_algorithms(request), request.local) as joined:
        rows = bench_rows(joined, request, progress(place.rank))
    if place.rank == 0:
        _show(arguments, rows)
        bad = [
            f"{row['algorithm']} {row['primitive']} of {row['bytes']} bytes" for row in rows if row["wrong"]
        ]
        if bad:
            raise RunFailed(f"wrong results: {', '.join(bad)}")
    return 0


def progress(rank: int) -> Any:
    """Tells on a terminal's stderr what is being measured."""
    shown = rank == 0 and sys.stderr.isatty()
    return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True) if shown else None


def _show(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if arguments.html:
        arguments.html.write_text(bench_page(rows), encoding="utf-8")
    print(json.dumps({"rows": rows}, indent=1) if arguments.json else bench_text(rows))
