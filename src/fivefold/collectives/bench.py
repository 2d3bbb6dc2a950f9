"""Times collectives, backends' own and programs, on the ranks of a running group, and checks what they compute.

Times are per call in a row of calls, as nccl-tests counts them; the slowest rank's counts. The algorithms of one
size take turns, so that a machine's drift touches all alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.execute import Execution, Operation
from fivefold.ledger.programs.catalogue import Setting, best_pieces, program
from fivefold.ledger.programs.steps import Fabric, Link

TURNS = 7
TURN_SECONDS = 0.004  # of one algorithm in one turn
MOST_CALLS = 200
SLOW_SECONDS = 0.03
SLOW_TURNS = 3
"""Calls of at least SLOW_SECONDS average out short disturbances of the machine, so a few turns are enough."""
_OWN: dict[Operation, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_REDUCING = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Case:
    """A collective to be timed.

    Attributes:
        algorithm: the name of a backend (its own algorithm) or of a program, run over `transport`.
        elements: in all, as the primitive's bytes are counted: the output of an all-gather, the input of a
            reduce-scatter or all-to-all; a multiple of the ranks for these.
    """

    primitive: str
    algorithm: str
    transport: str
    elements: int
    dtype: torch.dtype
    operation: Operation = "sum"

    @property
    def size(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Result:
    """One case's seconds a call in every turn, and how many elements were wrong, on all ranks together."""

    case: Case
    turns: tuple[float, ...]
    wrong: int

    @property
    def seconds(self) -> float:
        return median(self.turns)


class Bench:
    """Runs cases on this rank; every rank makes one alike and calls it alike.

    `groups` are process groups over the same ranks by the name of their backend; `fabric` is what a program
    that adapts to its links (how many pieces a tree is cut into) is built for. All ranks of `together` (by default
    those of the groups) begin each timing at once, and the slowest of them counts: groups that share a link are then
    timed while they do.
    """

    def __init__(
        self,
        groups: Mapping[str, dist.ProcessGroup],
        fabric: Fabric | Link,
        local: int,
        device: torch.device,
        synchronize: Callable[[], None],
        together: dist.ProcessGroup | None = None,
    ) -> None:
        self._groups = groups
        self._fabric = fabric
        self._local = local
        self._device = device
        self._synchronize = synchronize
        self._group = next(iter(groups.values()))
        self._control = together or self._group
        self.rank, self.ranks = self._group.rank(), self._group.size()

    def measure(self, cases: Sequence[Case], turns: int = TURNS, *, check: bool = True) -> list[Result]:
        """Times the cases in turns. They should be of one size: a turn lasts as long for each. Without `check` no
        result is looked at, and none is called wrong."""
        buffers = [self._buffers(case) for case in cases]
        calls = [self._call(case, *pair) for case, pair in zip(cases, buffers, strict=True)]
        wrong = []
        for case, call, (given, output) in zip(cases, calls, buffers, strict=True):
            call()
            self._synchronize()
            in_place = case.primitive in ("all_reduce", "broadcast")
            wrong.append(self._wrong(case, given if in_place else output) if check else 0)
        taken = self._turns(calls, turns)
        totals = self._sum(wrong)
        return [
            Result(case, tuple(turn[index] for turn in taken), totals[index])
            for index, case in enumerate(cases)
        ]

    def shift(self, size: int, turns: int = TURNS) -> tuple[float, ...]:
        """Seconds of one round in which every rank sends to the next: what a program's round costs, by turns."""
        right, left = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        sent = torch.zeros(size, dtype=torch.uint8, device=self._device)
        received = torch.empty_like(sent)

        def exchange() -> None:
            ends = [
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=left),
                dist.P2POp(dist.isend, sent, group=self._group, group_peer=right),
            ]
            for work in dist.batch_isend_irecv(ends):
                work.wait()

        return tuple(turn[0] for turn in self._turns([exchange], turns))

    def _turns(self, calls: Sequence[Callable[[], None]], most: int) -> list[list[float]]:
        """Seconds a call, of every call in every turn."""
        first = self._agree([self._time(call, 1) for call in calls])
        is_slow = min(first) > SLOW_SECONDS
        if not is_slow:
            first = self._agree([self._time(call, 3) for call in calls])
        counts = [max(1, min(MOST_CALLS, int(TURN_SECONDS / seconds))) for seconds in first]
        return [
            self._agree([self._time(call, count) for call, count in zip(calls, counts, strict=True)])
            for _ in range(min(most, SLOW_TURNS) if is_slow else most)
        ]

    def _time(self, call: Callable[[], None], count: int) -> float:
        dist.barrier(self._control)
        self._synchronize()
        started = time.perf_counter()
        for _ in range(count):
            call()
        self._synchronize()
        return (time.perf_counter() - started) / count

    def _agree(self, seconds: Sequence[float]) -> list[float]:
        """The slowest rank's."""
        tensor = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control)
        return tensor.tolist()

    def _sum(self, counts: Sequence[int]) -> list[int]:
        tensor = torch.tensor(counts, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, group=self._control)
        return tensor.tolist()

    def _buffers(self, case: Case) -> tuple[Tensor, Tensor]:
        """What the rank gives, and room for what it gets (empty where that is in place)."""
        whole, part = case.elements, case.elements // self.ranks
        given = self._values(case, self.rank, whole)
        sizes = {"all_gather": whole, "reduce_scatter": part, "all_to_all": whole}
        output = torch.empty(sizes.get(case.primitive, 0), dtype=case.dtype, device=self._device)
        if case.primitive == "all_gather":
            given = given[self.rank * part : (self.rank + 1) * part].clone()
        return given, output

    def _values(self, case: Case, rank: int, length: int) -> Tensor:
        """Small whole numbers, so that every type sums them exactly in any order; they repeat in no chunk and on no
        rank, so that one taken for another shows (multiplicative hashing: Knuth 1998, 6.4)."""
        most = max(2, min(8, 256 // self.ranks))
        hashed = torch.arange(length, device=self._device).add_(104_729 * rank).mul_(2_654_435_769)
        return hashed.bitwise_and_(2**32 - 1).mul_(most).bitwise_right_shift_(32).to(case.dtype)

    def _wrong(self, case: Case, found: Tensor) -> int:
        """How many elements of this rank's result are not what they must be."""
        part = case.elements // self.ranks
        mine = slice(self.rank * part, (self.rank + 1) * part)
        if case.primitive in _REDUCING:
            expected = self._values(case, 0, case.elements).double()
            for other in range(1, self.ranks):
                value = self._values(case, other, case.elements).double()
                if case.operation in ("max", "min"):
                    pick = torch.maximum if case.operation == "max" else torch.minimum
                    expected = pick(expected, value)
                else:
                    expected += value
            if case.operation == "mean":
                expected /= self.ranks
            expected = expected[mine] if case.primitive == "reduce_scatter" else expected
            return int((found != expected.to(case.dtype)).sum())
        if case.primitive == "all_to_all":
            parts = [self._values(case, other, case.elements)[mine] for other in range(self.ranks)]
        elif case.primitive == "all_gather":
            cuts = [slice(other * part, (other + 1) * part) for other in range(self.ranks)]
            parts = [self._values(case, other, case.elements)[cut] for other, cut in enumerate(cuts)]
        else:
            parts = [self._values(case, 0, case.elements)]
        return int((found != torch.cat(parts)).sum())

    def _call(self, case: Case, given: Tensor, output: Tensor) -> Callable[[], None]:
        if case.algorithm in self._groups:
            return _own(case, self._groups[case.algorithm], given, output)
        pieces = best_pieces(self.ranks, case.size, self._fabric)
        made = program(case.primitive, case.algorithm, Setting(self.ranks, self._local, pieces))
        execution = Execution(made, self._groups[case.transport])
        return {
            "all_reduce": lambda: execution.all_reduce(given, case.operation),
            "all_gather": lambda: execution.all_gather(output, given),
            "reduce_scatter": lambda: execution.reduce_scatter(output, given, case.operation),
            "all_to_all": lambda: execution.all_to_all(output, given),
            "broadcast": lambda: execution.broadcast(given),
        }[case.primitive]


def _own(case: Case, group: dist.ProcessGroup, given: Tensor, output: Tensor) -> Callable[[], None]:
    """The backend's own collective."""
    operation, ranks = _OWN[case.operation], group.size()

    def reduce(collective: Callable[[], object], reduced: Tensor) -> None:
        collective()
        if case.operation == "mean":
            reduced.div_(ranks)

    return {
        "all_reduce": lambda: reduce(lambda: dist.all_reduce(given, operation, group=group), given),
        "all_gather": lambda: _ignore(dist.all_gather_single(output, given, group=group)),
        "reduce_scatter": lambda: reduce(
            lambda: dist.reduce_scatter_single(output, given, operation, group=group), output
        ),
        "all_to_all": lambda: _ignore(dist.all_to_all_single(output, given, group=group)),
        "broadcast": lambda: _ignore(dist.broadcast(given, group=group, group_src=0)),
    }[case.primitive]


def _ignore(work: object) -> None:
    """A synchronous call returns nothing to wait for."""
