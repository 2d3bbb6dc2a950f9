"""The matrices that Muon updates: which parameters, the FLOPs of orthogonalising one, and on which rank it is done."""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from math import prod

from fivefold.spec.parameters import Parameter

ROLES = ("attention", "ffn", "expert")
"""Roles of the matrices that Muon updates; embedding, head, router and all that is no matrix are updated by AdamW."""

ITERATIONS = 5
"""Newton-Schulz iterations, as in torch.optim.Muon."""

ITEMSIZE = 2
"""Bytes of an element sent to and from its owner: torch.optim.Muon rounds its input to bf16 first, and its result is
bf16, so sending bf16 loses nothing."""


def is_matrix(parameter: Parameter) -> bool:
    """Whether Muon updates it: `[rows, columns]`, or `[experts, rows, columns]`."""
    return (
        parameter.trained
        and parameter.role in ROLES
        and len(parameter.shape) >= 2
        and min(parameter.shape[-2:]) > 1
    )


def products(shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(m, n, k) of the products of one iteration for a matrix X of `shape` `[..., rows, columns]`, of which the shorter
    side is taken for the rows: A = X·Xᵀ, B = A·A, B·X (Jordan et al. 2024)."""
    rows, columns = sorted(shape[-2:])
    return (rows, rows, columns), (rows, rows, rows), (rows, columns, rows)


def work(shape: Sequence[int]) -> int:
    """FLOPs of orthogonalising a matrix, or each of `[experts, rows, columns]`."""
    return ITERATIONS * prod(shape[:-2]) * sum(2 * m * n * k for m, n, k in products(shape))


def owners(works: Sequence[int], ranks: int) -> list[int]:
    """The rank that orthogonalises each matrix: greedily, the largest first, each to the rank with the least work."""
    found = [0] * len(works)
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for index in sorted(range(len(works)), key=lambda index: -works[index]):
        load, rank = loads[0]
        found[index] = rank
        heapreplace(loads, (load + works[index], rank))
    return found
