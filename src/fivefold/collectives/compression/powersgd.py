"""PowerSGD (Vogels 2019): the sum of gradient matrices in low rank, by one step of power iteration a training step.

For each matrix M = Σ M_w: P = orth(Σ M_w Q), Q ← Σ M_wᵀ P, and the sum is taken for P Qᵀ. What rank w keeps is its
own part outside of the space of P, M_w − P Pᵀ M_w. The published form keeps M_w − P Qᵀ instead: right in the sum, but
on ranks that disagree each one's part grows with every step.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.compression.flat import Parts, summed
from fivefold.collectives.compression.state import Memory
from fivefold.ledger.compression import low_rank


class PowerSGD:
    """Sums gradients as matrices of rank `rank`, [dim 0, all other dims]; vectors and small matrices as they are."""

    def __init__(self, rank: int, seed: int = 0) -> None:
        self._rank = rank
        self._seed = seed
        self.memory = Memory()

    def prepare(self, parts: Parts) -> None:
        """Makes the state of parameters of these shapes."""
        for name, tensor in parts:
            if self._is_low(tensor):
                self.memory.set_own("error", name, torch.zeros_like(tensor))
                self.memory.set_shared("factor", name, self._right(name, tensor.flatten(1)))
        self.memory.settle(True)

    def reduce(self, parts: Parts, group: dist.ProcessGroup) -> None:
        """Sums the tensors over the group, in place. Collective."""
        low = [(name, tensor) for name, tensor in parts if self._is_low(tensor)]
        whole = [tensor for _, tensor in parts if not self._is_low(tensor)]
        matrices = [(tensor + self.memory.own("error", name, tensor)).flatten(1) for name, tensor in low]
        right = [self._right(name, matrix) for (name, _), matrix in zip(low, matrices, strict=True)]
        left = [matrix @ factor for matrix, factor in zip(matrices, right, strict=True)]
        # One message carries the first factors and all that is not compressed.
        totals = summed([*left, *whole], group)
        for tensor, total in zip(whole, totals[len(left) :], strict=True):
            tensor.copy_(total)
        if not low:
            return
        bases = [_orthonormal(total) for total in totals[: len(left)]]
        own = [matrix.T @ base for matrix, base in zip(matrices, bases, strict=True)]
        for (name, tensor), matrix, base, mine, total in zip(
            low, matrices, bases, own, summed(own, group), strict=True
        ):
            tensor.copy_((base @ total.T).view_as(tensor))
            self.memory.set_own("error", name, (matrix - base @ mine.T).view_as(tensor))
            self.memory.set_shared("factor", name, total)

    def _is_low(self, tensor: Tensor) -> bool:
        return low_rank(tensor.shape, self._rank)

    def _right(self, name: str, matrix: Tensor) -> Tensor:
        """The last step's right factor, [columns, rank]; at first a random one, the same on every rank."""
        found = self.memory.shared("factor", name)
        if found is not None:
            return found
        generator = torch.Generator().manual_seed(hash_of(f"{self._seed}/{name}"))
        drawn = torch.randn(matrix.shape[1], self._rank, generator=generator)
        return drawn.to(matrix.dtype)


def hash_of(text: str) -> int:
    """A number for a text, the same in every process."""
    return int.from_bytes(text.encode()) % (2**61 - 1)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Columns that span those of `matrix`; NaN where it is not finite, so that every rank sees it."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    # Scaled columns: a vanishing one must not be lost beside a large one.
    scaled = matrix / matrix.norm(dim=0).clamp(min=torch.finfo(matrix.dtype).tiny)
    basis: Tensor = torch.linalg.qr(scaled).Q
    return basis
