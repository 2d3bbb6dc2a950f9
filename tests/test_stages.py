"""The stage split: every layer once, in order, and no split with a lighter heaviest stage (cases.md G)."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.errors import ConfigError
from fivefold.spec.stages import split_layers

cost = st.integers(1, 20).map(float)


@given(costs=st.lists(cost, min_size=1, max_size=9), stages=st.integers(1, 9), first=cost, last=cost)
def test_complete_ordered_and_minimal(costs: list[float], stages: int, first: float, last: float) -> None:
    layers = len(costs)
    if layers < stages <= layers + 2:
        split = split_layers(costs, stages, first=first, last=last)
        assert [layer for own in split for layer in own] == list(range(layers))
        return
    if stages > layers:
        with pytest.raises(ConfigError, match=f"1 to {layers}"):
            split_layers(costs, stages, first=first, last=last)
        return

    def heaviest(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, layers)
        loads = [sum(costs[a:b]) for a, b in pairwise(edges)]
        loads[0] += first
        loads[-1] += last
        return max(loads)

    split = split_layers(costs, stages, first=first, last=last)
    assert [layer for own in split for layer in own] == list(range(layers))
    assert all(own for own in split)
    best = min(heaviest(cuts) for cuts in combinations(range(1, layers), stages - 1))
    assert heaviest(tuple(own.start for own in split[1:])) == pytest.approx(best)


@given(layers=st.integers(1, 130), stages=st.integers(1, 40))
def test_equal_layers_are_spread_within_one(layers: int, stages: int) -> None:
    if stages <= layers:
        sizes = [len(own) for own in split_layers([1.0] * layers, stages)]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes)


def test_the_head_counts() -> None:
    """30 layers on 4 stages is no 28 (Megatron-LM#1304), and a heavy head takes layers off the last stage."""
    assert [len(own) for own in split_layers([1.0] * 30, 4)] == [7, 7, 8, 8]
    assert [len(own) for own in split_layers([1.0] * 30, 4, last=3.0)] == [8, 8, 8, 6]
