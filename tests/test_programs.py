"""Collective programs compute what they should, and cost what their formulas say."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.errors import BadInput
from fivefold.ledger.programs import catalogue, doubling, exchange, halving, hierarchical, ring, tree
from fivefold.ledger.programs.catalogue import PROGRAMS, TWO_LEVEL, Setting
from fivefold.ledger.programs.steps import Fabric, Link, Program, run, seconds

LINK = Link(latency=2e-6, bandwidth=100e9)
SLOW = Link(latency=50e-6, bandwidth=1e9)
EVERY = [(primitive, name) for primitive, names in PROGRAMS.items() for name in names]


def check(program: Program) -> None:
    """Every rank ends with what the primitive promises, each contribution counted exactly once."""
    n = program.ranks
    reduces = program.primitive in ("all_reduce", "reduce_scatter")

    def value(rank: int, chunk: int) -> float:
        # One bit a rank: whatever is added twice, or never, shows.
        return float(2**rank + (chunk << n)) if reduces else float(chunk)

    held = run(program, [[value(rank, chunk) for chunk in program.starts(rank)] for rank in range(n)])
    for rank in range(n):
        for chunk in program.ends(rank):
            total = sum(value(other, chunk) for other in range(n)) if reduces else value(0, chunk)
            assert held[rank][chunk] == total, (program.name, rank, chunk)


@pytest.mark.parametrize(("primitive", "name"), EVERY)
@given(data=st.data())
def test_every_program_does_what_its_primitive_promises(
    primitive: str, name: str, data: st.DataObject
) -> None:
    local, hosts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    ranks = local * hosts if name in TWO_LEVEL else data.draw(st.integers(1, 13))
    setting = Setting(ranks, local, data.draw(st.integers(1, 5)), data.draw(st.integers(0, ranks - 1)))
    check(catalogue.program(primitive, name, setting))


@pytest.mark.parametrize(("primitive", "name"), EVERY)
@given(ranks=st.integers(2, 12))
def test_a_rank_has_one_partner_in_each_direction(primitive: str, name: str, ranks: int) -> None:
    """So that a round really costs one latency (a tree's inner rank has two)."""
    program = catalogue.program(primitive, name, Setting(ranks, 1, 3))
    for round_ in program:
        partners = {(t.source, t.target) for t in round_}
        sources, targets = [a for a, _ in partners], [b for _, b in partners]
        most = 2 if name == "double-tree" else 1
        assert max(map(sources.count, sources)) <= most * 2 - 1
        assert max(map(targets.count, targets)) <= most * 2 - 1


@given(n=st.integers(2, 12))
def test_costs_are_those_of_the_formulas(n: int) -> None:
    """shared formulas: 2(n−1)(α + S/n·β) and its relatives."""
    a, b, size, levels = LINK.latency, 1 / LINK.bandwidth, 1e6, ceil(log2(n))
    once = (n - 1) / n * size * b
    assert seconds(ring.all_reduce(n), size, LINK) == pytest.approx(2 * (n - 1) * a + 2 * once)
    assert seconds(ring.all_gather(n), size, LINK) == pytest.approx((n - 1) * a + once)
    assert seconds(doubling.all_gather(n), size, LINK) == pytest.approx(levels * a + once)
    assert seconds(doubling.reduce_scatter(n), size, LINK) == pytest.approx(levels * a + once)
    assert seconds(exchange.pairwise(n), size, LINK) == pytest.approx((n - 1) * a + once)
    fold = 2 * (a + size * b) if n & (n - 1) else 0.0
    floor = n.bit_length() - 1
    doubled = floor * (a + size * b) + fold
    assert seconds(halving.doubling_all_reduce(n), size, LINK) == pytest.approx(doubled)
    assert seconds(halving.all_reduce(n), size, LINK) == pytest.approx(
        halving.all_reduce_seconds(n, size, LINK)
    )
    binomial = catalogue.program("broadcast", "binomial", Setting(n))
    assert seconds(binomial, size, LINK) == pytest.approx(levels * (a + size * b))


@given(local=st.integers(1, 5), hosts=st.integers(1, 5), size=st.floats(1e3, 1e9))
def test_two_level_costs(local: int, hosts: int, size: float) -> None:
    """2(G−1)α₁ + 2(G−1)/G·Sβ₁ + 2(N−1)α₂ + 2(N−1)/N·(S/G)β₂, and S for S/G behind one shared port."""
    n = local * hosts
    inside, between = 1 / LINK.bandwidth, 1 / SLOW.bandwidth
    own, shared = Fabric(LINK, SLOW, local), Fabric(LINK, SLOW, local, shared=True)
    near = 2 * (local - 1) * (LINK.latency + size / local * inside)
    far = 2 * (hosts - 1) * (SLOW.latency + size / n * between)
    far_shared = 2 * (hosts - 1) * (SLOW.latency + size / hosts * between)
    program = hierarchical.all_reduce(n, local)
    assert seconds(program, size, own) == pytest.approx(near + far)
    assert seconds(program, size, shared) == pytest.approx(near + far_shared)
    hops = (local - 1) * (LINK.latency + size / local * inside)
    hops += (hosts - 1) * (SLOW.latency + size / hosts * between)
    assert seconds(exchange.two_hop(n, local), size, own) == pytest.approx(hops)


@given(n=st.integers(2, 128))
def test_double_tree_shape(n: int) -> None:
    """Depth ⌈lg n⌉ in both trees, two children at most, inner in both: none for even n, one for odd."""
    first, second = tree.parents(n)
    for up in (first, second):
        assert max(tree.depth(up)) == ceil(log2(n))
        assert all(up.count(rank) <= 2 for rank in range(n))
    both = [rank for rank in range(n) if rank in first and rank in second]
    assert len(both) == n % 2 or n <= 3


def test_tree_wins_small_and_ring_wins_large() -> None:
    assert tree.all_reduce_seconds(64, 1e4, LINK) < seconds(ring.all_reduce(64), 1e4, LINK)
    assert tree.all_reduce_seconds(8, 1e9, LINK) > seconds(ring.all_reduce(8), 1e9, LINK)


def test_bad_names_and_hosts_are_refused() -> None:
    with pytest.raises(BadInput, match=r'did you mean "all_reduce"'):
        catalogue.program("allreduce", "ring", Setting(2))
    with pytest.raises(BadInput, match=r'did you mean "ring"'):
        catalogue.program("all_reduce", "rings", Setting(2))
    with pytest.raises(BadInput, match="divisor of 6"):
        catalogue.program("all_reduce", "hierarchical", Setting(6, 4))
