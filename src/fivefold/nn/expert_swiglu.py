"""SwiGLU of experts on CPUs, in pieces of their rows: the tensors of a piece stay in the cache from the first matmul
to the last, and the matmuls have few different shapes.

oneDNN compiles a kernel for each new shape (about 1 ms and 1 MB) and caches a thousand of them, but the number of
rows of an expert differs in every step. So pieces have `PIECE` rows, and an expert's remainder is rounded up to a
multiple of `TILE` rows. The extra rows belong to the next expert: their results are wrong, and overwritten when that
expert is computed; they do not contribute to the weight gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PIECE = 512
TILE = 64
silu, silu_backward = torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input


class _Piece(NamedTuple):
    """Rows `start` to `stop` of one expert; rows up to `end` are computed."""

    expert: int
    start: int
    stop: int
    end: int

    def of(self, rows: Tensor) -> Tensor:
        """The rows `start` to `end`; a zero-padded copy if the tensor ends before `end`."""
        if self.end <= len(rows):
            return rows[self.start : self.end]
        filled = rows.new_zeros(self.end - self.start, rows.shape[1])
        filled[: self.stop - self.start] = rows[self.start : self.stop]
        return filled

    def put(self, result: Tensor, rows: Tensor) -> None:
        """Copies what was written to `of(rows)` back, if that was a copy."""
        if self.end > len(rows):
            rows[self.start : self.stop] = result[: self.stop - self.start]

    def clear_others(self, *results: Tensor) -> None:
        """Zeroes the rows of other experts."""
        for result in results:
            result[self.stop - self.start :].zero_()


def _pieces(sizes: Sequence[int], experts: int) -> Iterator[_Piece]:
    start = 0
    for group, size in enumerate(sizes):
        after = start + size
        for first in range(start, after, PIECE):
            stop = min(first + PIECE, after)
            yield _Piece(group % experts, first, stop, first + -(-(stop - first) // TILE) * TILE)
        start = after


def expert_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, sizes: Sequence[int]) -> Tensor:
    """down(silu(gate(x)) · up(x)), each group of rows with its expert's matrices.

    Args:
        x: `[rows, hidden]`.
        gate, up: `[experts, ffn, hidden]`.
        down: `[experts, hidden, ffn]`.
        sizes: rows of each group: of expert 0, 1, …, and again of expert 0, … if there are more groups than experts.

    Returns:
        `[rows, hidden]`.
    """
    return _ExpertSwiGLU.apply(x, gate, up, down, list(sizes))  # type: ignore[no-any-return,no-untyped-call]


class _ExpertSwiGLU(torch.autograd.Function):
    """Keeps its input and the first two products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, sizes: list[int]) -> Tensor:
        out: Tensor
        gated, upped, out = expert_products(x, gate, up, down, sizes)
        ctx.save_for_backward(x, gate, up, down, gated, upped)
        ctx.sizes = sizes
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor, ...] = expert_gradients(grad.contiguous(), *ctx.saved_tensors, ctx.sizes)
        return *gradients, None


@torch.library.custom_op("fivefold::expert_products", mutates_args=())
def expert_products(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The three products. An operator, so that recomputation may keep its results."""
    ffn = gate.shape[1]
    gated, upped, out = x.new_empty(len(x), ffn), x.new_empty(len(x), ffn), torch.empty_like(x)
    scratch = x.new_empty(PIECE, ffn)
    for piece in _pieces(sizes, len(gate)):
        rows, expert = piece.of(x), piece.expert
        results = [piece.of(place) for place in (gated, upped, out)]
        inner = scratch[: len(rows)]
        torch.mm(rows, gate[expert].T, out=results[0])
        torch.mm(rows, up[expert].T, out=results[1])
        silu(results[0], out=inner)
        torch.mm(inner.mul_(results[1]), down[expert].T, out=results[2])
        for result, place in zip(results, (gated, upped, out), strict=True):
            piece.put(result, place)
    return gated, upped, out


EXPERT_PRODUCTS = torch.ops.fivefold.expert_products.default


@torch.library.custom_op("fivefold::expert_gradients", mutates_args=())
def expert_gradients(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gated: Tensor,
    upped: Tensor,
    sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the input and the three weights; six products."""
    into_x = torch.empty_like(x)
    into = [torch.empty_like(weight) for weight in (gate, up, down)]
    seen = [False] * len(gate)
    scratch = x.new_empty(4, PIECE, gate.shape[1])
    for piece in _pieces(sizes, len(gate)):
        expert = piece.expert
        grads, rows, gates, ups = (piece.of(each) for each in (grad, x, gated, upped))
        inner, into_inner, into_gate, into_up = scratch[:, : len(rows)]
        torch.mm(grads, down[expert], out=into_inner)
        silu(gates, out=into_up)
        torch.mul(into_up, ups, out=inner)
        into_up.mul_(into_inner)
        silu_backward(into_inner.mul_(ups), gates, grad_input=into_gate)
        into_rows = piece.of(into_x)
        torch.mm(into_gate, gate[expert], out=into_rows)
        into_rows.addmm_(into_up, up[expert])
        piece.put(into_rows, into_x)
        piece.clear_others(inner, into_gate, into_up)
        for total, left, right in zip(into, (into_gate, into_up, grads), (rows, rows, inner), strict=True):
            total[expert].addmm_(left.T, right, beta=float(seen[expert]))
        seen[expert] = True
    for expert, used in enumerate(seen):
        if not used:
            for total in into:
                total[expert].zero_()
    return into_x, into[0], into[1], into[2]
