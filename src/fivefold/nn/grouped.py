"""Matrix products of rows that are grouped by expert, each group with its expert's matrix."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows times its expert's matrix, transposed.

    Float64 goes expert by expert, and widths that are not whole multiples of 16 bytes (a shard's may be): torch's
    grouped product does not have them.

    Args:
        x: `[rows, in]`, the rows of expert 0 first, then those of expert 1, ….
        weight: `[experts, out, in]`.
        counts: `[experts]`, int64, rows of each expert; some may have none.

    Returns:
        `[rows, out]`.
    """
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    together = aligned and x.dtype != torch.float64
    return _together(x, weight, counts) if together else _one_by_one(x, weight, counts)


def _one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    groups = torch.split(x, counts.tolist())
    return torch.cat([rows @ matrix.T for rows, matrix in zip(groups, weight.unbind(), strict=True)])


def _together(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


class _Chosen(torch.autograd.Function):
    """Keeps two lists of numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = slope.index_select(0, back)
        return (
            rows.view(-1, ctx.copies, rows.shape[1]).sum(dim=1) if ctx.copies > 1 else rows,
            None,
            None,
            None,
        )


def copied_in_order(x: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Each row of `x` `copies` times, in another order. The backward gathers too: torch's own scatters element by
    element on CPUs.

    Args:
        x: `[rows, hidden]`.
        order: `[rows · copies]`: for each row of the result which copy it is; copy c is of row c // copies.
        back: the inverse of `order`: where each copy has gone.
    """
    return _Chosen.apply(x, order, back, copies)  # type: ignore[no-any-return,no-untyped-call]


class GroupedLinear(nn.Module):
    """A projection without bias for each of a number of experts."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `grouped_linear`."""
        return grouped_linear(x, self.weight, counts)
