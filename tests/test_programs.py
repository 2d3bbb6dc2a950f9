"""Collective programs compute what they should, and cost what their formulas say."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.ledger.programs import halving, ring, tree
from fivefold.ledger.programs.steps import Link, Program, run, seconds

LINK = Link(latency=2e-6, bandwidth=100e9)


def summed(program: Program) -> list[list[float]]:
    return run(
        program,
        [[float(2**rank + chunk) for chunk in range(program.chunks)] for rank in range(program.ranks)],
    )


def expected(program: Program) -> list[float]:
    n = program.ranks
    return [float(2**n - 1 + n * chunk) for chunk in range(program.chunks)]


@given(n=st.integers(2, 12))
def test_ring_sums_and_costs_its_formula(n: int) -> None:
    program = ring.all_reduce(n)
    assert summed(program) == [expected(program)] * n
    assert seconds(program, 1e6, LINK) == pytest.approx(2 * (n - 1) * (2e-6 + 1e6 / n / 100e9))
    scattered = summed(ring.reduce_scatter(n))
    assert [scattered[r][r] for r in range(n)] == expected(program)


@given(n=st.integers(2, 12), pieces=st.integers(1, 5))
def test_double_tree_sums(n: int, pieces: int) -> None:
    program = tree.all_reduce(n, pieces)
    assert summed(program) == [expected(program)] * n


@given(n=st.integers(2, 128))
def test_double_tree_shape(n: int) -> None:
    """Depth ⌈lg n⌉ in both trees, two children at most, inner in both: none for even n, one for odd."""
    first, second = tree.parents(n)
    for up in (first, second):
        assert max(tree.depth(up)) == ceil(log2(n))
        assert all(up.count(rank) <= 2 for rank in range(n))
    both = [rank for rank in range(n) if rank in first and rank in second]
    assert len(both) == n % 2 or n <= 3


@given(levels=st.integers(1, 4))
def test_halving_doubling_sums_and_costs_its_formula(levels: int) -> None:
    n = 2**levels
    program = halving.all_reduce(n)
    assert summed(program) == [expected(program)] * n
    assert seconds(program, 1e6, LINK) == pytest.approx(halving.all_reduce_seconds(n, 1e6, LINK))


def test_tree_wins_small_and_ring_wins_large() -> None:
    assert tree.all_reduce_seconds(64, 1e4, LINK) < seconds(ring.all_reduce(64), 1e4, LINK)
    assert tree.all_reduce_seconds(8, 1e9, LINK) > seconds(ring.all_reduce(8), 1e9, LINK)
