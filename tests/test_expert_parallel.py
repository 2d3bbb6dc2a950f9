"""Experts dealt over ranks compute what they compute on one, and send what they must."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder, Row
from fivefold.config.model import Experts as Options
from fivefold.config.model import Model
from fivefold.nn.experts import Experts
from fivefold.parallel.expert import Exchange
from fivefold.parallel.mesh import new_group
from fivefold.proof.error import errors
from ranks import Ranks

MODEL = Model(hidden=12, heads=2, experts=Options(count=8, top_k=2, ffn=10, auxiliary_loss=0.1))
TOKENS = (5, 0, 7, 1)  # of each rank


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def made(dtype: torch.dtype, favourite: int | None) -> Experts:
    """Experts with fixed weights; with a favourite all tokens go there and to its neighbour."""
    module = Experts(MODEL).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        if favourite is not None:
            module.router.weight.zero_()
            module.router.weight[favourite, 0], module.router.weight[favourite + 1, 0] = 2.0, 1.0
    return module


def tokens_of(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A rank's tokens and the gradient of what they become."""
    generator = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(1, TOKENS[rank], 12, generator=generator)
    x[..., 0].abs_()
    return x.to(dtype), torch.randn(x.shape, generator=generator).to(dtype)


def on_ranks(
    rank: int, world_size: int, dtype: torch.dtype, favourite: int | None
) -> tuple[dict[str, Tensor], list[Row]]:
    recorder = Recorder()
    dist.init_process_group(register(recorder, timedelta(seconds=60)))
    module = made(dtype, favourite)
    own = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    for projection in (module.gate, module.up, module.down):
        projection.weight = torch.nn.Parameter(projection.weight.detach()[own].clone())
    module.exchange = Exchange(new_group(range(world_size), "ep"))
    x, grad = tokens_of(rank, dtype)
    recorder.clear()
    with recorder.phase("forward"):
        out, _ = module(x.requires_grad_())
    with recorder.phase("backward"):
        out.backward(grad)
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {"x": x.grad, "out": out.detach()}, recorder.rows()  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("favourite", [None, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_equal_one(ranks: Ranks, world_size: int, favourite: int | None, dtype: torch.dtype) -> None:
    """Also with a rank without tokens, and experts and ranks that no token wants (DeepSpeed#5066)."""
    results = ranks.run(on_ranks, dtype, favourite, world_size=world_size, timeout=300)
    module = made(dtype, favourite)
    for rank in range(world_size):
        x, grad = tokens_of(rank, dtype)
        out, _ = module(x.requires_grad_())
        out.backward(grad)
        found = results[rank][0]
        assert torch.allclose(found["out"], out, atol=1e-6 if dtype == torch.float32 else 1e-13)
        assert torch.allclose(found["x"], x.grad, atol=1e-6 if dtype == torch.float32 else 1e-13)  # type: ignore[arg-type]
    gradients: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        parts = [found[name] for found, _ in results]
        owned = name.split(".")[0] in ("gate", "up", "down")
        gradients[name] = torch.cat(parts) if owned else torch.stack(parts).sum(0)
        assert gradients[name].shape == parameter.shape
    worst = errors(gradients, {name: p.grad for name, p in module.named_parameters()})  # type: ignore[misc]
    assert max(worst.values()) <= (1e-12 if dtype == torch.float64 else 1e-5), worst


@pytest.mark.parametrize("favourite", [None, 2])
def test_dispatch_moves_each_choice_once(ranks: Ranks, favourite: int | None) -> None:
    """Rows out of every rank: its tokens · top_k; over the group as many come in. And 8 numbers of 8 bytes."""
    sums = {"forward": 0, "backward": 0}
    for rank, (_, rows) in enumerate(ranks.run(on_ranks, torch.float32, favourite, timeout=300)):
        assert [(row.axis, row.primitive, row.phase, row.count) for row in rows] == [
            ("ep", "all_to_all", "backward", 2),
            ("ep", "all_to_all", "forward", 3),
        ]
        own = TOKENS[rank] * 2 * 12 * 4
        for row in rows:
            sizes = 64 if row.phase == "forward" else 0
            assert row.bytes_per_rank >= own + sizes
            sums[row.phase] += row.bytes_per_rank - sizes
    assert sums == dict.fromkeys(sums, 2 * sum(TOKENS) * 2 * 12 * 4)
