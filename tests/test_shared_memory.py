"""Collectives through shared memory: right for every size, world, dtype and reduction, and for every order of use."""

from __future__ import annotations

import platform
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.segment import sleep
from fivefold.collectives.shared_memory.transport import SharedMemory
from ranks import Ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
SLOT, RING = 4096, 1024  # small, so that little data takes many rounds


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as ranks:
        yield ranks


def join(host: str = "") -> None:
    shared = SharedMemory(host=host, slot_bytes=SLOT, ring_bytes=RING)
    dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared))


def draw(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """The numbers of one rank: any rank can draw those of every other."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return torch.randint(-50, 50, (numel,), generator=generator)
    return torch.randn(numel, generator=generator, dtype=torch.float32).to(dtype)


def reduced(parts: list[Tensor], operation: Any) -> Tensor:
    """What a reduction should give, to the rounding of its dtype: computed in float64 (int64 for integers)."""
    dtype = parts[0].dtype
    whole = torch.stack([part if dtype == torch.int64 else part.double() for part in parts])
    if operation == dist.ReduceOp.AVG:
        return (
            whole.mean(0)
            if whole.is_floating_point()
            else whole.sum(0).div(len(parts), rounding_mode="trunc")
        )
    reductions: dict[Any, Callable[[Tensor], Tensor]] = {
        dist.ReduceOp.SUM: lambda t: t.sum(0),
        dist.ReduceOp.PRODUCT: lambda t: t.prod(0),
        dist.ReduceOp.MAX: lambda t: t.amax(0),
        dist.ReduceOp.MIN: lambda t: t.amin(0),
    }
    return reductions[operation](whole)


def check_close(got: Tensor, right: Tensor, n: int) -> None:
    """Within n roundings of the dtype, relative to the largest of the numbers."""
    if got.dtype == torch.int64:
        assert torch.equal(got, right)
    elif got.numel():
        bound = n * torch.finfo(got.dtype).eps * max(1.0, float(right.abs().max()))
        assert float((got.double() - right).abs().max()) <= bound


def check_random(rank: int, n: int, seed: int, count: int, hosts: str = "") -> None:
    """`count` random collectives, the same on every rank. `hosts` has a letter per rank; all are one by default."""
    join(hosts[rank : rank + 1])
    choose = random.Random(seed)
    operations = [
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.MAX,
        dist.ReduceOp.MIN,
        dist.ReduceOp.PRODUCT,
    ]
    for i in range(count):
        dtype, operation, root = choose.choice(DTYPES), choose.choice(operations), choose.randrange(n)
        # nothing, one, fewer than ranks, around a slot, and many slots
        numel = choose.choice([0, 1, 2, 3, 5, 64, 511, 512, 513, 1000, 5000])
        parts = [draw(numel * n, dtype, hash((seed, i, r))) for r in range(n)]
        one = [part[:numel].clone() for part in parts]
        kind = choose.choice(KINDS)
        kind(rank, n, parts, one, operation, root)


def all_reduce(rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int) -> None:
    x = parts[rank].clone()
    dist.all_reduce(x, operation)
    check_close(x, reduced(parts, operation), n)
    everyone = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(everyone, x)
    assert all(torch.equal(x, other) for other in everyone)  # to the bit, on every rank


def reduce(rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int) -> None:
    x = parts[rank].clone()
    dist.reduce(x, root, operation)
    if rank == root:
        check_close(x, reduced(parts, operation), n)
    else:
        assert torch.equal(x, parts[rank])


def reduce_scatter(
    rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int
) -> None:
    right = reduced(parts, operation)
    numel = one[0].numel()
    mine = right[rank * numel : (rank + 1) * numel]
    out = torch.empty_like(one[0])
    dist.reduce_scatter_single(out, parts[rank], operation)
    check_close(out, mine, n)
    out.zero_()
    dist.reduce_scatter(out, [part.clone() for part in parts[rank].view(n, numel)], operation)
    check_close(out, mine, n)
    source = parts[rank].clone()  # in place, as FSDP may ask
    within = source[rank * numel : (rank + 1) * numel]
    dist.reduce_scatter_single(within, source, operation)
    check_close(within, mine, n)


def all_gather(rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int) -> None:
    out = torch.empty_like(parts[0])
    dist.all_gather_single(out, one[rank])
    assert torch.equal(out, torch.cat(one))
    out.zero_()
    numel = one[0].numel()
    within = out[rank * numel : (rank + 1) * numel]
    within.copy_(one[rank])
    dist.all_gather_single(out, within)
    assert torch.equal(out, torch.cat(one))
    places = [torch.empty_like(part) for part in one]
    dist.all_gather(places, one[rank])
    assert torch.equal(torch.cat(places), torch.cat(one))


def all_to_all(rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int) -> None:
    numel = one[0].numel()
    right = torch.cat([part[rank * numel : (rank + 1) * numel] for part in parts])
    out = torch.empty_like(parts[0])
    dist.all_to_all_single(out, parts[rank])
    assert torch.equal(out, right)
    same = parts[rank].clone()
    dist.all_to_all_single(same, same)
    assert torch.equal(same, right)
    # uneven: rank s sends (s + 2 r) % (numel + 1) numbers to rank r
    sends = [[(s + 2 * r) % (numel + 1) for r in range(n)] for s in range(n)]
    sources = [list(parts[s][: sum(sends[s])].split(sends[s])) for s in range(n)]
    right = torch.cat([sources[s][rank] for s in range(n)])
    received = [sends[s][rank] for s in range(n)]
    out = torch.empty_like(right)
    dist.all_to_all_single(out, torch.cat(sources[rank]), received, sends[rank])
    assert torch.equal(out, right)
    places = [torch.empty(k, dtype=right.dtype) for k in received]
    dist.all_to_all(places, sources[rank])
    assert torch.equal(torch.cat(places), right)


def one_to_all(rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int) -> None:
    x = one[rank].clone()
    dist.broadcast(x, root)
    assert torch.equal(x, one[root])
    x = torch.empty_like(one[rank])
    dist.scatter(x, one if rank == root else None, root)
    assert torch.equal(x, one[rank])
    places = [torch.empty_like(part) for part in one] if rank == root else None
    dist.gather(one[rank], places, root)
    if places is not None:
        assert torch.equal(torch.cat(places), torch.cat(one))


def messages(rank: int, n: int, parts: list[Tensor], one: list[Tensor], operation: Any, root: int) -> None:
    """To every other rank at once, in another order than they are received, tags included."""
    numel = one[0].numel()
    got = [[torch.empty_like(one[0]), torch.empty_like(one[0])] for _ in range(n)]
    works = []
    for r in range(n):
        if r != rank:
            works.append(dist.isend(parts[rank][:numel], r, tag=1))
            works.append(dist.isend(parts[rank][numel * r : numel * (r + 1)], r, tag=2))
    for r in reversed(range(n)):
        if r != rank:
            works.append(dist.irecv(got[r][1], r, tag=2))
            works.append(dist.irecv(got[r][0], r, tag=1))
    for work in works:
        assert work is not None
        work.wait()
    for r in range(n):
        if r != rank:
            assert torch.equal(got[r][0], parts[r][:numel])
            assert torch.equal(got[r][1], parts[r][numel * rank : numel * (rank + 1)])


KINDS = (all_reduce, reduce, reduce_scatter, all_gather, all_to_all, one_to_all, messages)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_collectives(ranks: Ranks, world_size: int, seed: int) -> None:
    ranks.run(check_random, 10 * seed + world_size, 60, world_size=world_size)


@pytest.mark.parametrize("hosts", ["aabb", "abab", "ab", "aab", "abcc"])
def test_random_collectives_between_hosts(ranks: Ranks, hosts: str) -> None:
    ranks.run(check_random, 5, 40, hosts, world_size=len(hosts))


Start: TypeAlias = tuple[Callable[..., Any], Tensor, Tensor]
"""A call to be given its group, where its result will be, and what that must be."""


def start_all_reduce(rank: int, parts: list[Tensor]) -> Start:
    return partial(dist.all_reduce, parts[rank]), parts[rank], torch.stack(parts).sum(0)


def start_broadcast(rank: int, parts: list[Tensor]) -> Start:
    return partial(dist.broadcast, parts[rank], 1), parts[rank], parts[1].clone()


def start_all_gather(rank: int, parts: list[Tensor]) -> Start:
    out = torch.empty_like(torch.cat(parts))
    return partial(dist.all_gather_single, out, parts[rank]), out, torch.cat(parts)


def start_reduce_scatter(rank: int, parts: list[Tensor]) -> Start:
    right = torch.stack(parts).sum(0).chunk(len(parts))[rank]
    out = torch.empty_like(right)
    return partial(dist.reduce_scatter_single, out, parts[rank]), out, right


def start_all_to_all(rank: int, parts: list[Tensor]) -> Start:
    out = torch.empty_like(parts[rank])
    right = torch.cat([part.chunk(len(parts))[rank] for part in parts])
    return partial(dist.all_to_all_single, out, parts[rank]), out, right


STARTS = (start_all_reduce, start_broadcast, start_all_gather, start_reduce_scatter, start_all_to_all)


def check_asynchronous(rank: int, n: int, seed: int, hosts: str = "") -> None:
    """Many under way at once over several groups, waited for in an order that differs from rank to rank."""
    join(hosts[rank : rank + 1])
    groups = [dist.group.WORLD, dist.new_group(), dist.new_group()]
    choose, mine = random.Random(seed), random.Random(seed + 100 + rank)
    pending: list[tuple[Any, Tensor, Tensor]] = []
    for i in range(80):
        group, numel = choose.choice(groups), choose.choice([1, 100, 3000])
        parts = [draw(numel * n, torch.int64, hash((seed, i, r))) for r in range(n)]
        start, x, right = choose.choice(STARTS)(rank, parts)
        if choose.random() < 0.3:
            start(group=group)
            assert torch.equal(x, right)
            continue
        work = start(group=group, async_op=True)
        pending.append((work, x, right))
        while pending and mine.random() < 0.5:
            work, x, right = pending.pop(mine.randrange(len(pending)))
            kind = mine.randrange(3)
            if kind == 1:
                work.get_future().wait()
            while kind == 2 and not work.is_completed():
                time.sleep(0.0001)
            work.wait()
            assert torch.equal(x, right)
    for work, x, right in pending:
        work.wait()
        assert torch.equal(x, right)


@pytest.mark.parametrize(("seed", "hosts"), [(0, ""), (1, ""), (2, "aabb")])
def test_asynchronous_and_synchronous_mixed(ranks: Ranks, seed: int, hosts: str) -> None:
    ranks.run(check_asynchronous, seed, hosts)


def check_progress(rank: int, n: int) -> None:
    """What is waited for late, or only through its future, goes on while the caller is elsewhere."""
    join()
    x = torch.full((5000,), float(rank))
    future = dist.all_reduce(x, async_op=True).get_future()
    deadline = time.monotonic() + 10
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.001)  # never calls into the group
    assert torch.equal(x, torch.full((5000,), float(sum(range(n)))))
    big = torch.arange(50_000.0)  # far more than a ring holds
    if rank == 0:
        sent = dist.isend(big, 1)
        dist.barrier()  # rank 1 has not received it yet: sending must not have blocked
        assert sent is not None
        sent.wait()
    elif rank == 1:
        got = torch.empty(50_000)
        dist.barrier()
        dist.recv(got, 0)
        assert torch.equal(got, big)
    else:
        dist.barrier()


def test_asynchronous_calls_advance_without_their_caller(ranks: Ranks) -> None:
    ranks.run(check_progress, world_size=3)


def check_order(rank: int, n: int) -> Tensor:
    """A sum whose value depends on the order of its terms, with ranks arriving in another order each time."""
    join()
    terms = torch.tensor([1e16, 1.0, -1e16, 3.0], dtype=torch.float64)
    found = []
    for late in range(n):
        for numel in (1, 5000):  # reduced at once, and shared out
            if rank == late:
                time.sleep(0.01)
            x = terms[rank].repeat(numel)
            dist.all_reduce(x)
            found.append(x.unique())
    return torch.stack(found)


def test_the_order_of_a_sum_does_not_depend_on_arrival(ranks: Ranks) -> None:
    for found in ranks.run(check_order):
        assert found.tolist() == [[((1e16 + 1.0) + -1e16) + 3.0]] * 8


def check_strides(rank: int, n: int) -> None:
    join()
    parameter = torch.nn.Parameter(torch.full((6, 4), float(rank)).t())  # autograd must not notice
    version = parameter._version
    dist.all_reduce(parameter)
    assert torch.equal(parameter, torch.full((4, 6), float(sum(range(n)))))
    assert parameter._version == version
    out = torch.zeros(4, 2 * n)[:, ::2]
    dist.all_gather([out[:, i] for i in range(n)], torch.full((4,), float(rank)))
    assert torch.equal(out, torch.arange(float(n)).expand(4, n))
    tensors = [torch.full((k,), float(rank)) for k in (1, 0, 2000)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all((tensor == sum(range(n))).all() for tensor in tensors)
    halves = torch.full((3,), 0.001 if rank else 1.0, dtype=torch.bfloat16)  # 3 × 0.001 is lost term by term
    dist.all_reduce(halves)
    assert halves.tolist() == torch.full((3,), 1.0 + (n - 1) * 0.001).bfloat16().tolist()


def test_strides_parameters_coalesced_calls_and_halves(ranks: Ranks) -> None:
    ranks.run(check_strides)


def check_sleep(rank: int, n: int) -> list[int]:
    """Rank 0 sleeps for a word in each of two groups; rank 1 writes that of the second once it does."""
    join()
    groups = [dist.group.WORLD, dist.new_group()]
    segments = [group._transport._segment for group in groups]
    words = [segment.written(1, 0) for segment in segments]
    if rank == 0:
        sleep([(segment, word, 64) for segment, word in zip(segments, words, strict=True)], 1000.0)
    else:
        while not any(segments[1]._sleepers):
            time.sleep(0.001)
        segments[1].set(words[1], 64)
    return [segment.words[word] for segment, word in zip(segments, words, strict=True)]


@pytest.mark.skipif(
    tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 16), reason="sleeps for one word only"
)
def test_a_sleeper_is_woken_by_any_of_its_words(ranks: Ranks) -> None:
    assert ranks.run(check_sleep, world_size=2)[0] == [0, 64]
