"""The collectives of data parallel over one group: the backend's own, or a program's (`parallel.algorithm`).

The backend's are asynchronous. A program (`ledger.programs`) is a list of point-to-point messages, which this rank
sends and receives round by round: it has finished when the call returns.
"""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fivefold.collectives.execute import Execution
from fivefold.ledger.programs.steps import Program
from fivefold.ledger.synchronisation import program_of
from fivefold.spec.mesh import ranks_of_a_host
from fivefold.spec.synchronisation import Algorithm, Collective


class Pending(Protocol):
    """A collective that may still be running."""

    def wait(self) -> object: ...


class Done:
    """A collective that has finished."""

    def wait(self) -> None:
        """Returns immediately."""


class Collectives:
    """Collectives over `group`. Tensors are flat; a result is complete after `wait` on what the call returns.

    Args:
        per_host: ranks per host, consecutive in the run; 0 = all on one host.
    """

    def __init__(self, group: ProcessGroup, algorithm: Algorithm, per_host: int) -> None:
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()
        self._algorithm = algorithm
        first, second, *_ = dist.get_process_group_ranks(group)
        self._local = ranks_of_a_host(self.ranks, second - first, per_host or dist.get_world_size())
        self._made: dict[Program, Execution] = {}

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Sums `tensor` over the ranks, in place."""
        if self._algorithm == "backend":
            return _work(dist.all_reduce(tensor, group=self.group, async_op=True))
        self._execution("all_reduce", tensor).all_reduce(tensor)
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Pending:
        """This rank's part of the sum of `tensor`; all parts are equal."""
        if self._algorithm == "backend":
            return _work(dist.reduce_scatter_single(output, tensor, group=self.group, async_op=True))
        self._execution("reduce_scatter", tensor).reduce_scatter(output, tensor)
        return Done()

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        """Every rank's `part`, in rank order."""
        if self._algorithm == "backend":
            return _work(dist.all_gather_single(output, part, group=self.group, async_op=True))
        self._execution("all_gather", output).all_gather(output, part)
        return Done()

    def _execution(self, collective: Collective, whole: Tensor) -> Execution:
        program = program_of(self._algorithm, collective, whole.nbytes, self.ranks, self._local)
        if program not in self._made:
            self._made[program] = Execution(program, self.group)
        return self._made[program]


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
