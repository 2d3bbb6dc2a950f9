"""Compressed sums of gradients: nothing is lost, over steps and skipped steps. Through checkpoints and changes of the
ranks: test_compressed_training.py."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.compression import Compressor, compressor
from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.ledger.compression import Compression, messages
from ranks import Ranks

METHODS = [
    Compression("bf16"),
    Compression("fp16"),
    Compression("int8"),
    Compression("topk", density=0.05),
    Compression("topk", density=0.5),
    Compression("threshold", threshold=2.0),
    Compression("threshold", threshold=0.1),
    Compression("powersgd", rank=2),
]
SHAPES = {"embedding": (37, 16), "norm": (16,), "up": (48, 20), "down": (20, 48), "bias": (1,)}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One rank's, the same wherever they are computed; scales differ by parameter as in a model."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**-index).to(dtype)
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def buckets(named: dict[str, Tensor]) -> list[list[tuple[str, Tensor]]]:
    items = list(named.items())
    return [items[:2], items[2:]]


def reduce(made: Compressor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every bucket summed, in place."""
    group = dist.group.WORLD
    assert group is not None
    for bucket in buckets(named):
        made.reduce(bucket, group)
    return named


def kept(made: Compressor, name: str) -> Tensor:
    """Σ over the ranks of what they keep of a parameter."""
    total = made.memory.own("error", name, torch.zeros(SHAPES[name], dtype=torch.float64)).clone()
    dist.all_reduce(total)
    return total


def check_balance(made: Compressor, applied: dict[str, Tensor], true: dict[str, Tensor]) -> None:
    for name, total in true.items():
        torch.testing.assert_close(applied[name] + kept(made, name), total, rtol=1e-12, atol=1e-12)


def check_every_step(rank: int, n: int, how: Compression) -> None:
    made = compressor(how)
    assert made is not None
    applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    true = {name: torch.zeros_like(total) for name, total in applied.items()}
    for step in range(8):
        mine = gradients(rank, step)
        if step == 4 and rank == n - 1:
            mine["up"][3, 4] = torch.inf if n == 3 else torch.nan
        found = reduce(made, mine)
        everyone: list[dict[str, Tensor]] = [{} for _ in range(n)]
        dist.all_gather_object(everyone, found)
        if step == 4:  # an overflow on one rank: seen by all, applied by none
            assert all(not bool(each["up"].isfinite().all()) for each in everyone)
            made.memory.settle(False)
        else:
            for name in SHAPES:
                assert all(torch.equal(each[name], found[name]) for each in everyone)
                applied[name] += found[name]
                true[name] += sum(gradients(other, step)[name] for other in range(n))
            made.memory.settle(True)
        check_balance(made, applied, true)


@pytest.mark.parametrize("how", METHODS, ids=lambda how: f"{how.method}-{how.density:g}-{how.threshold:g}")
@pytest.mark.parametrize("n", [2, 3])
def test_what_is_sent_and_kept_is_the_true_gradient_at_every_step(
    ranks: Ranks, how: Compression, n: int
) -> None:
    ranks.run(check_every_step, how, world_size=n)


def check_disagreement(rank: int, n: int) -> tuple[float, float]:
    """rms of what a rank keeps after 30 and after 300 steps, where ranks disagree by a fixed amount that sums to 0."""
    made = compressor(Compression("powersgd", rank=2))
    group = dist.group.WORLD
    assert made is not None
    assert group is not None
    offsets = torch.randn(n, 24, 24, generator=torch.Generator().manual_seed(1))
    mine, sizes = (offsets - offsets.mean(0))[rank], []
    for step in range(300):
        shared = torch.randn(24, 24, generator=torch.Generator().manual_seed(step))
        made.reduce([("w", shared + mine)], group)
        made.memory.settle(True)
        if step in (29, 299):
            sizes.append(float(made.memory.own("error", "w", shared).square().mean().sqrt()))
    return sizes[0], sizes[1]


def test_what_powersgd_keeps_stays_bounded_where_ranks_disagree(ranks: Ranks) -> None:
    """M − P Qᵀ, the usual form, grows in proportion to the steps: by ten here."""
    for early, late in ranks.run(check_disagreement):
        assert late < 2 * early


def check_momentum(rank: int, n: int) -> None:
    """Σ sent + what waits = Σ velocities; and sent densely it is SGD with momentum."""
    shape, group = (50,), dist.group.WORLD
    assert group is not None
    few, all_ = (
        compressor(Compression("topk", density=0.1), 0.9),
        compressor(Compression("topk", density=1.0), 0.9),
    )
    assert few is not None
    assert all_ is not None
    weights = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9)
    applied, dense, velocities = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for step in range(10):
        draws = [
            torch.randn(shape, generator=torch.Generator().manual_seed(9 * step + other), dtype=torch.float64)
            for other in range(n)
        ]
        velocity = 0.9 * few.memory.own("velocity", "w", weights.detach()) + draws[rank]
        velocities += velocity
        sent, densely = draws[rank].clone(), draws[rank].clone()
        few.reduce([("w", sent)], group)
        few.memory.settle(True)
        all_.reduce([("w", densely)], group)
        all_.memory.settle(True)
        applied += sent
        dense += densely
        weights.grad = torch.stack(draws).sum(0)
        optimizer.step()
    total = velocities.clone()
    dist.all_reduce(total)
    waiting = few.memory.own("error", "w", weights.detach()).clone()
    dist.all_reduce(waiting)
    torch.testing.assert_close(applied + waiting, total, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(-dense, weights.detach(), rtol=1e-12, atol=1e-12)


def test_momentum_correction(ranks: Ranks) -> None:
    ranks.run(check_momentum)


def check_exactly_once(rank: int, n: int, seed: int) -> None:
    """Whole numbers pass bf16 unchanged: any element left out, or added twice, shows."""
    generator = torch.Generator().manual_seed(seed)
    group = dist.group.WORLD
    assert group is not None
    for _ in range(10):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        sizes = torch.randint(0, 700, (count,), generator=generator).tolist()
        made = compressor(Compression("bf16"))
        assert made is not None
        parts = [(str(index), torch.arange(size).float() % 40 + rank) for index, size in enumerate(sizes)]
        made.reduce(parts, group)
        for (_, tensor), size in zip(parts, sizes, strict=True):
            assert torch.equal(tensor, n * (torch.arange(size).float() % 40) + n * (n - 1) / 2)


def test_each_element_is_summed_exactly_once(ranks: Ranks) -> None:
    ranks.run(check_exactly_once, int(torch.randint(0, 10**6, (1,))))


def check_bytes(rank: int, n: int) -> None:
    for how in METHODS:
        if how.method == "threshold":  # sends what the gradient holds
            continue
        recorder, made = Recorder(), compressor(how)
        assert made is not None
        group = dist.new_group(backend=register(recorder, timedelta(seconds=60)))
        recorder.clear()
        expected: dict[str, int] = {}
        for bucket in buckets(gradients(rank, 0, torch.float32)):
            for primitive, size in messages(how, [tensor.shape for _, tensor in bucket], 4, n):
                expected[primitive] = expected.get(primitive, 0) + size
            made.reduce(bucket, group)
        found: dict[str, int] = {}
        for row in recorder.rows():
            found[row.primitive] = found.get(row.primitive, 0) + row.bytes_per_rank
        assert found == expected, how


def test_bytes_on_the_wire_are_those_the_ledger_predicts(ranks: Ranks) -> None:
    ranks.run(check_bytes)
