"""Grouped matrix products: rows are grouped by expert, and each group is multiplied by its expert's matrix."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TILE = 32
"""On CPUs rows are multiplied in multiples of a tile: oneDNN compiles a kernel for each new shape and caches a
thousand of them, but the number of rows of an expert differs in every step."""


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group of rows times its expert's matrix, transposed.

    Computed expert by expert for float64, and on accelerators for widths that are not multiples of 16 bytes (as shards
    may have): torch's grouped matmul supports neither. On CPUs other dtypes are computed in tiles.

    Args:
        x: `[rows, in]`, the rows of expert 0 first, then those of expert 1, ….
        weight: `[experts, out, in]`.
        counts: `[experts]`, int64, rows of each expert; some may have none.

    Returns:
        `[rows, out]`.
    """
    if x.dtype == torch.float64:
        return _one_by_one(x, weight, counts)
    if x.device.type == "cpu":
        return _Tiled.apply(x, weight, counts)  # type: ignore[no-any-return,no-untyped-call]
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    return _together(x, weight, counts) if aligned else _one_by_one(x, weight, counts)


def _one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    groups = torch.split(x, counts.tolist())
    return torch.cat([rows @ matrix.T for rows, matrix in zip(groups, weight.unbind(), strict=True)])


def _together(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


class _Tiled(torch.autograd.Function):
    """Expert by expert: first the whole tiles of a group's rows, then the remainder, padded to a tile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = counts.tolist()
        out: Tensor = rows_times(x, weight.transpose(1, 2), ctx.sizes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return (
            rows_times(grad, weight, ctx.sizes) if needs_x else None,
            transposed_times(grad, x, ctx.sizes) if needs_weight else None,
            None,
        )


@torch.library.custom_op("fivefold::rows_times", mutates_args=())
def rows_times(x: Tensor, matrices: Tensor, sizes: list[int]) -> Tensor:
    """Each group of rows times its matrix `[in, out]`. An operator, so that recomputation may keep its result."""
    out = x.new_empty(len(x), matrices.shape[2])
    for rows, result, matrix in zip(torch.split(x, sizes), torch.split(out, sizes), matrices, strict=True):
        whole = len(rows) // TILE * TILE
        torch.mm(rows[:whole], matrix, out=result[:whole])
        if whole < len(rows):
            result[whole:] = (_filled(rows[whole:]) @ matrix)[: len(rows) - whole]
    return out


ROWS_TIMES = torch.ops.fivefold.rows_times.default


@torch.library.custom_op("fivefold::transposed_times", mutates_args=())
def transposed_times(grad: Tensor, x: Tensor, sizes: list[int]) -> Tensor:
    """Of each group, `[rows, out]` transposed times `[rows, in]`."""
    out = x.new_empty(len(sizes), grad.shape[1], x.shape[1])
    for left, right, result in zip(torch.split(grad, sizes), torch.split(x, sizes), out, strict=True):
        whole = len(left) // TILE * TILE
        torch.mm(left[:whole].T, right[:whole], out=result)
        if whole < len(left):
            result.addmm_(_filled(left[whole:]).T, _filled(right[whole:]))
    return out


def _filled(rows: Tensor) -> Tensor:
    """A tile whose last rows are zero."""
    tile = rows.new_zeros(TILE, rows.shape[1])
    tile[: len(rows)] = rows
    return tile


class _CopyInOrder(torch.autograd.Function):
    """Saves only the inverse order for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, order // copies if copies > 1 else order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = grad.index_select(0, back)
        return (
            rows.view(-1, ctx.copies, rows.shape[1]).sum(dim=1) if ctx.copies > 1 else rows,
            None,
            None,
            None,
        )


def copied_in_order(x: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Each row of `x` `copies` times, in another order. Backward is a gather too, whereas torch's own scatters element
    by element on CPUs.

    Args:
        x: `[rows, hidden]`.
        order: `[rows · copies]`: the copy that each row of the result takes; copy c is of row c // copies.
        back: the inverse of `order`.
    """
    return _CopyInOrder.apply(x, order, back, copies)  # type: ignore[no-any-return,no-untyped-call]


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation of `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def sorted_by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
    """The permutation from rows sorted by (source, expert) to rows sorted by (expert, source), and its inverse.

    Args:
        counts: `[sources, experts]`, rows of each.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    order = experts.repeat_interleave(counts.flatten()).argsort(stable=True)
    return order, inverse(order)


class GroupedLinear(nn.Module):
    """A linear layer without bias for each expert."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `grouped_linear`."""
        return grouped_linear(x, self.weight, counts)
