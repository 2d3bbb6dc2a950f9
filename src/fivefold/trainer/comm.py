"""`fivefold comm bench` and `calibrate` on the ranks: joining, measuring, and the rows that rank 0 reports."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from fivefold.collectives.bench import Bench, Case
from fivefold.collectives.calibrate import Calibrated, Sizes, calibrate
from fivefold.collectives.execute import Operation
from fivefold.collectives.fit import Point, fit
from fivefold.collectives.record import Recorder
from fivefold.config.errors import BadInput, did_you_mean
from fivefold.ledger import gloo
from fivefold.ledger.hardware import Hardware, Measured
from fivefold.ledger.network import wire_bytes
from fivefold.ledger.programs.catalogue import PROGRAMS, TWO_LEVEL, Setting, best_pieces, program
from fivefold.ledger.programs.steps import Fabric, Link, seconds
from fivefold.trainer import machine
from fivefold.trainer.place import Place, open_store
from fivefold.trainer.session import torch_backend

SHIFT_SIZES = tuple(4**power for power in range(5, 13))  # 1 KiB to 16 MiB
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `comm bench`.

    Attributes:
        algorithms: names of backends and programs; a program may name its transport: "ring@gloo". Empty: all.
        local: ranks a host for two-level programs; 0 = what the launcher says.
        measured: rows of a cluster file, in place of a prediction from this run's own messages.
    """

    primitives: tuple[str, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    operation: Operation
    local: int
    measured: tuple[Measured, ...] = ()


class Groups(NamedTuple):
    """Of one backend: all ranks, this rank's host, and the ranks of its place on every host (None: just one)."""

    everyone: dist.ProcessGroup
    inside: dist.ProcessGroup | None
    between: dist.ProcessGroup | None


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank among the ranks that measure; `backend` is what training takes by default, and carries programs."""

    place: Place
    device: torch.device
    backend: str
    groups: dict[str, Groups]  # by backend
    local: int  # ranks a host

    @property
    def hosts(self) -> int:
        return self.place.world_size // self.local

    def bench(
        self,
        fabric: Fabric | Link,
        groups: Mapping[str, dist.ProcessGroup] | None = None,
        together: dist.ProcessGroup | None = None,
    ) -> Bench:
        synchronize = lambda: machine.synchronize(self.device)  # noqa: E731
        everyone = {name: found.everyone for name, found in self.groups.items()}
        return Bench(groups or everyone, fabric, self.local, self.device, synchronize, together)


@contextmanager
def join(place: Place, backends: Sequence[str], local: int = 0) -> Iterator[Joined]:
    """Joins the group of all ranks over training's default backend, and one more for every other asked for.

    The groups are those that training makes, recording and all: what is measured is what a step will see.
    """
    device = machine.device(place.local_rank)
    default = machine.default_backend(device)
    world, per_host = place.world_size, local or place.local_world_size
    if world % per_host:
        raise BadInput(f"{world} ranks do not fill hosts of {per_host}; start equally many on every host")
    store, recorder = open_store(place, TIMEOUT_SECONDS), Recorder()
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    groups: dict[str, Groups] = {}
    for backend in dict.fromkeys((default, *backends)):
        name = torch_backend(backend, device, recorder, timeout)
        if not groups:
            dist.init_process_group(name, store=store, rank=place.rank, world_size=world, timeout=timeout)
            everyone = dist.group.WORLD
        else:
            everyone = dist.new_group(backend=name, timeout=timeout)
        assert everyone is not None
        groups[backend] = Groups(everyone, *_host_groups(name, per_host, world // per_host, timeout))
    yield Joined(place, device, default, groups, per_host)
    dist.barrier()
    dist.destroy_process_group()


def check_algorithms(request: Request) -> tuple[str, ...]:
    """The backends that a request names, before anything is started.

    Raises:
        BadInput: a name that is neither a backend nor a program of any of the primitives.
    """
    programs = {name for primitive in request.primitives for name in PROGRAMS[primitive]}
    no_real_ones = ("undefined", "fake")  # the second moves nothing
    listed = [name for name in dist.Backend.backend_list if name not in no_real_ones]
    known = [name for name in listed if dist.is_backend_available(name)]
    known += ["shm"] if machine.shares_memory() else []
    found = []
    for algorithm in request.algorithms:
        name, at, transport = algorithm.partition("@")
        backend = transport if at else name if name not in programs else ""
        if backend and backend not in known:
            hint = did_you_mean(backend, {*known, *programs})
            raise BadInput(f'--algorithms {algorithm}: no backend or algorithm "{backend}"; {hint}')
        if at and name not in programs:
            raise BadInput(f'--algorithms {algorithm}: no algorithm "{name}"; {did_you_mean(name, programs)}')
        found += [backend] if backend else []
    return tuple(dict.fromkeys(found))


def bench_rows(joined: Joined, request: Request, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of `comm bench`, the same on every rank. Collective."""
    fabrics = {backend: _fabric(joined, backend) for backend in joined.groups}
    bench = joined.bench(fabrics[joined.backend])
    rows = []
    for primitive in request.primitives:
        for size in request.sizes:
            tell(f"{primitive} {size}")
            if not (cases := _cases(joined, request, primitive, size)):
                continue  # of the algorithms asked for, none serves this primitive
            for result in bench.measure(cases):
                rows.append(_row(joined, request, fabrics, result.case, result.seconds, result.wrong))
    return rows


def _cases(joined: Joined, request: Request, primitive: str, size: int) -> list[Case]:
    ranks, dtype = joined.place.world_size, machine.DTYPES.get(request.dtype, torch.int64)
    unit = 1 if primitive in ("all_reduce", "broadcast") else ranks
    elements = max(1, size // (dtype.itemsize * unit)) * unit
    names = request.algorithms or (*joined.groups, *PROGRAMS[primitive])
    cases = []
    for algorithm in names:
        name, _, transport = algorithm.partition("@")
        one_host = name in TWO_LEVEL and joined.hosts == 1
        if name in joined.groups or (name in PROGRAMS[primitive] and (request.algorithms or not one_host)):
            carrier = name if name in joined.groups else transport or joined.backend
            cases.append(Case(primitive, name, carrier, elements, dtype, request.operation))
    return cases


def _row(
    joined: Joined,
    request: Request,
    fabrics: Mapping[str, Fabric | Link],
    case: Case,
    spent: float,
    wrong: int,
) -> dict[str, Any]:
    ranks = joined.place.world_size
    own = case.algorithm in joined.groups
    shown = (
        case.algorithm if own or case.transport == joined.backend else f"{case.algorithm}@{case.transport}"
    )
    reducing = case.primitive in ("all_reduce", "reduce_scatter")
    return {
        "primitive": case.primitive,
        "algorithm": shown,
        "bytes": case.size,
        "count": case.elements,
        "type": request.dtype,
        "redop": case.operation if reducing else "none",
        "ranks": ranks,
        "seconds": spent,
        "algbw": case.size / spent,
        "busbw": bus_bytes(case.primitive, case.size, ranks) / spent,
        "predicted_seconds": _predicted(joined, request, fabrics, case),
        "wrong": wrong,
    }


def bus_bytes(primitive: str, size: float, ranks: int) -> float:
    """Bytes over the busiest link of an ideal algorithm (nccl-tests' bus bandwidth, times the time)."""
    return size if primitive == "broadcast" else wire_bytes(primitive, size, ranks)


def _predicted(
    joined: Joined, request: Request, fabrics: Mapping[str, Fabric | Link], case: Case
) -> float | None:
    """From the cluster file's row of that backend; else by gloo's programs, or the program named, on the links of this
    run. The collectives of shm send no messages and are predicted by a file only."""
    shape = (joined.local, joined.hosts)
    for item in request.measured:
        same = (item.primitive, item.backend, item.local, item.hosts)
        if same == (case.primitive, case.algorithm, *shape):
            return item.link.seconds(case.size)
    ranks, primitive, name = joined.place.world_size, case.primitive, case.algorithm
    if name == "gloo":
        return gloo.seconds(primitive, case.size, ranks, fabrics[name])
    if name in joined.groups:
        return None
    pieces = best_pieces(ranks, case.size, fabrics[joined.backend])
    made = program(primitive, name, Setting(ranks, joined.local, pieces))
    return seconds(made, case.size, fabrics[case.transport])


def _fabric(joined: Joined, backend: str) -> Fabric | Link:
    """A backend's links as one round of a program sees them, from messages of every rank to its neighbour.

    Between hosts the first rank of each speaks alone: gloo's ranks share their host's port.
    """
    near, far = Link(1.0, 1.0), Link(1.0, 1.0)
    everyone, inside, between = joined.groups[backend]
    if joined.hosts == 1:
        return _link(joined.bench(near, {backend: everyone}))
    if inside is not None:
        near = _link(joined.bench(near, {backend: inside}))
    if between is not None and joined.place.rank % joined.local == 0:
        far = _link(joined.bench(far, {backend: between}))
    told = torch.tensor(far, dtype=torch.float64, device=joined.device)
    dist.broadcast(told, 0)
    far = Link(*told.tolist())
    return Fabric(near if joined.local > 1 else far, far, joined.local, shared=joined.device.type == "cpu")


def _host_groups(
    name: str, local: int, hosts: int, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's host, and the ranks of its place on every host; None of one rank, or on a single host."""
    inside = [list(range(host * local, (host + 1) * local)) for host in range(hosts)]
    between = [list(range(place, local * hosts, local)) for place in range(local)]
    mine: list[dist.ProcessGroup | None] = []
    for lists in (inside, between):
        if hosts == 1 or len(lists[0]) == 1:
            mine.append(None)
            continue
        made, _ = dist.new_subgroups_by_enumeration(lists, timeout, name)  # type: ignore[no-untyped-call]
        mine.append(made)
    return mine[0], mine[1]


def _link(bench: Bench) -> Link:
    return fit([Point(size, median(bench.shift(size))) for size in SHIFT_SIZES])


def calibration(joined: Joined, sizes: Sizes, tell: Callable[[str], None]) -> list[Calibrated]:
    """Every primitive of every backend inside a host, between hosts, and over all ranks; the default backend first.
    Collective.

    Between hosts all ranks of a host work at once, as in training, so a shared port is shared.
    """
    local, hosts, found = joined.local, joined.hosts, []
    for backend, (everyone, inside, between) in joined.groups.items():
        for group, shape in ((inside, (local, 1)), (between, (1, hosts))):
            if group is not None:
                bench = joined.bench(Link(1.0, 1.0), {backend: group}, everyone)
                found += calibrate(bench, backend, *shape, sizes, tell)
        if hosts == 1 or local > 1:
            bench = joined.bench(Link(1.0, 1.0), {backend: everyone})
            found += calibrate(bench, backend, local, hosts, sizes, tell)
    return found


def as_rows(found: Sequence[Calibrated]) -> list[dict[str, Any]]:
    """The fits, with the points behind them, for JSON."""
    return [
        msgspec.to_builtins(item.measured)
        | {"points": [point._asdict() for point in item.fitted]}
        | {"held_out": [point._asdict() for point in item.held_out]}
        for item in found
    ]


def calibrated_hardware(joined: Joined, base: Hardware, found: Sequence[Calibrated]) -> Hardware:
    """`base` with this cluster's shape, every fit, and the links as the default backend's ring all-reduces saw them."""
    local, hosts, sources = joined.local, joined.hosts, dict(base.sources)
    rows = tuple(item.measured for item in found)
    if local > 1:
        sources["node"] = "measured by fivefold comm calibrate"
    if hosts > 1:
        sources["network"] = "measured by fivefold comm calibrate"
    node = msgspec.structs.replace(base.node, devices=local, domain=0)
    shaped = msgspec.structs.replace(base, nodes=hosts, node=node, measured=rows, sources=sources)
    return msgspec.structs.replace(shaped.measured_over(joined.backend), measured=rows)
