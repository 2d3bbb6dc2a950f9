"""Ring attention and Ulysses equal attention on whole sequences, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.tree import Parallel
from fivefold.nn.attention import Segments, causal_attention
from fivefold.parallel.context import context_core
from fivefold.parallel.cut import Cut
from fivefold.parallel.mesh import new_group
from fivefold.spec.sequence import Kind, spans
from ranks import Ranks


@dataclass(frozen=True)
class Case:
    """Sizes of an attention, and how it is cut."""

    kind: Kind = "ring"
    length: int = 24
    heads: int = 4
    kv_heads: int = 4
    documents: bool = False
    keep: bool = True
    dtype: torch.dtype = torch.float64
    head_dim: int = 6
    batch: int = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def data(case: Case) -> tuple[list[Tensor], Tensor, Segments]:
    """Query, key and value, the gradient of the result, and the documents."""
    generator = torch.Generator().manual_seed(5)

    def draw(heads: int) -> Tensor:
        shape = (case.batch, heads, case.length, case.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    inputs = [draw(case.heads), draw(case.kv_heads), draw(case.kv_heads)]
    lengths = torch.randint(1, max(3, case.length // 3), (case.batch, case.length), generator=generator)
    ends = lengths.cumsum(1)
    places = torch.arange(case.length)
    documents = (places.view(1, -1, 1) >= ends.unsqueeze(1)).sum(-1) if case.documents else torch.zeros(1, 1)
    documents = documents.int().expand(case.batch, case.length)
    return inputs, draw(case.heads), Segments.from_documents(documents)


def dense(case: Case) -> list[Tensor]:
    """The result and the gradients of query, key and value, by one full score matrix."""
    inputs, grad, segments = data(case)
    exact = torch.promote_types(case.dtype, torch.float32)
    query, key, value = (x.to(exact).requires_grad_() for x in inputs)
    group = case.heads // case.kv_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) / case.head_dim**0.5
    hidden = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
    if segments.documents is not None:
        hidden = hidden | (segments.documents.unsqueeze(2) != segments.documents.unsqueeze(1)).unsqueeze(1)
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.repeat_interleave(group, 1)
    out.backward(grad.to(exact))
    return [out.detach(), *(x.grad for x in (query, key, value))]  # type: ignore[misc]


def cut_up(rank: int, _: int, case: Case, cp: int) -> list[Tensor]:
    """This rank's part of what `dense` gives, and which tokens it is."""
    group = new_group(range(cp), "cp")
    cut = Cut(group, case.kind, case.length)
    parallel = Parallel(context=case.kind, recompute="none" if case.keep else "attention")
    core = context_core(group, parallel, causal_attention)
    inputs, grad, segments = data(case)
    places = torch.cat([torch.arange(*span) for span in cut.spans(rank)])
    own = [x[:, :, places].requires_grad_() for x in inputs]
    out = core(*own, segments)
    out.backward(grad[:, :, places])
    return [places, out.detach(), *(x.grad for x in own)]  # type: ignore[misc]


def check(ranks: Ranks, case: Case, cp: int, bound: float) -> None:
    expected = dense(case)
    parts = ranks.run(cut_up, case, cp, world_size=cp, timeout=300)
    places = torch.cat([part[0] for part in parts])
    assert places.sort().values.tolist() == list(range(case.length))
    for number, whole in enumerate(expected):
        found = torch.empty_like(whole)
        for part in parts:
            found[:, :, part[0]] = part[number + 1].to(whole.dtype)
        error = (found - whole).norm() / whole.norm()
        assert error <= bound, f"{case}, cp {cp}, {('out', 'query', 'key', 'value')[number]}: {error:.1e}"


RING: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2, "documents": True},
    {"kv_heads": 1, "length": 23, "keep": False},
    {"documents": True, "keep": False},
    {"length": 9, "documents": True},
    {"length": 4},
    {"length": 600, "kv_heads": 2, "documents": True, "batch": 1},
]


@pytest.mark.parametrize("cp", [2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("change", RING)
def test_ring_is_attention(ranks: Ranks, cp: int, change: dict[str, Any]) -> None:
    check(ranks, replace(Case(), **change), cp, 1e-13)


ULYSSES: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2, "documents": True},
    {"kv_heads": 1, "length": 23},
    {"kv_heads": 12, "length": 5, "documents": True},
]


@pytest.mark.parametrize("cp", [2, 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("change", ULYSSES)
def test_ulysses_is_attention(ranks: Ranks, cp: int, change: dict[str, Any]) -> None:
    case = replace(Case(kind="ulysses", heads=12), **change)
    if case.kv_heads % cp and cp % case.kv_heads:
        case = replace(case, kv_heads=cp)
    check(ranks, case, cp, 1e-13)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_half_precision_is_that_of_the_inputs(ranks: Ranks, kind: Kind, keep: bool) -> None:
    """The exact result of bf16 inputs, rounded once: softmax and sums are in float32."""
    case = Case(kind=kind, dtype=torch.bfloat16, keep=keep, length=64, kv_heads=2)
    check(ranks, case, 2, 4e-3)
    check(ranks, replace(case, dtype=torch.float32), 2, 1e-6)


def whole_here(_: int, world_size: int, case: Case) -> Tensor:
    group = new_group(range(world_size), "cp")
    inputs, _grad, segments = data(case)
    return context_core(group, Parallel(context=case.kind), causal_attention)(*inputs, segments)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_rank_with_whole_sequences_asks_nobody(ranks: Ranks, kind: Kind) -> None:
    """Generation: every rank runs the whole text."""
    case = Case(kind=kind, documents=True, length=7)
    for found in ranks.run(whole_here, case, world_size=2, timeout=300):
        assert torch.allclose(found, dense(case)[0], atol=1e-13)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("cp", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [5, 8, 13, 24])
def test_a_cut_holds_every_token_once_and_evenly(kind: Kind, cp: int, length: int) -> None:
    held = [[place for span in spans(length, cp, rank, kind) for place in range(*span)] for rank in range(cp)]
    assert sorted(place for places in held for place in places) == list(range(length))
    assert all(places == sorted(places) for places in held)
    sizes = [len(places) for places in held]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == -(-length // cp)


def test_the_ring_balances_causal_attention() -> None:
    """Pairs of query and key that a rank works on: its queries' places, added up."""
    work = [
        sum(place + 1 for span in spans(96, 4, rank, "ring") for place in range(*span)) for rank in range(4)
    ]
    assert max(work) == min(work)
