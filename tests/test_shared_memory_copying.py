"""Copies through the caches and past them do the same, and a rank writes in the way that is faster."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory import copying, exchange
from fivefold.collectives.shared_memory.copying import (
    PIECE_BYTES,
    TIMED_BYTES,
    USUAL_CACHE_BYTES,
    Copy,
    Writing,
    cache_bytes,
    copy,
    stream,
)
from fivefold.collectives.shared_memory.transport import SharedMemory
from ranks import Ranks

Machine: TypeAlias = Callable[[bool], float]
"""Seconds per byte of a write into memory that another core has read: through the caches, or past them."""
WRITES = 5000


@pytest.fixture(params=[True, False], ids=["past", "not allowed"])
def streams(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether memory can be made executable."""
    copying._streaming.cache_clear()
    with mock.patch.object(ctypes, "CDLL") if not request.param else mock.MagicMock():
        assert (copying._streaming() is not None) == request.param
        yield request.param
    copying._streaming.cache_clear()


@pytest.mark.parametrize("way", [copy, stream])
def test_every_byte_and_none_beside(way: Copy, streams: bool) -> None:
    draw = random.Random(0)
    source = torch.randint(256, (PIECE_BYTES * 5,), dtype=torch.uint8)
    place = torch.zeros_like(source)
    longest = (0, 1, 63, 64, 65, 200, 5000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, PIECE_BYTES * 4)
    for _ in range(300):
        size = draw.randint(0, draw.choice(longest))
        start, to = draw.randrange(source.numel() - size), draw.randrange(source.numel() - size)
        place[max(0, to - 64) : to + size + 64] = 0
        expected = place.clone()
        expected[to : to + size] = source[start : start + size]
        way(place.data_ptr() + to, source.data_ptr() + start, size)
        assert torch.equal(place, expected)


def near(past: bool) -> float:
    return 0.045e-9 if past else 0.025e-9


def far(past: bool) -> float:
    return 0.045e-9 if past else 0.4e-9


def starved(past: bool) -> float:
    """Memory is slow, and nothing else matters."""
    return 0.3e-9


def share_past(writing: Writing, machine: Machine, draw: random.Random) -> float:
    """Of all writes, how many went past the caches; one of ten is interrupted for a thousand times as long."""
    now, count = 0.0, 0

    def take(size: int, past: bool) -> None:
        nonlocal now, count
        now += machine(past) * size * (1000 if draw.random() < 0.1 else 1)
        count += past

    with (
        mock.patch.object(time, "perf_counter", side_effect=lambda: now),
        mock.patch.object(copying, "memmove", side_effect=lambda to, source, size: take(size, False)),
        mock.patch.object(copying, "_streaming", return_value=lambda to, source, size: take(size, True)),
    ):
        for _ in range(WRITES):
            writing.write(0, 0, TIMED_BYTES * 2)
    return count / WRITES


@pytest.mark.parametrize(("machine", "least", "most"), [(near, 0, 0.05), (far, 0.9, 1), (starved, 0, 0.05)])
@pytest.mark.parametrize("seed", range(5))
def test_past_the_caches_where_that_is_faster(machine: Machine, least: float, most: float, seed: int) -> None:
    assert least <= share_past(Writing(), machine, random.Random(seed)) <= most


def test_the_way_follows_the_machine() -> None:
    writing, draw = Writing(), random.Random(0)
    for machine in (near, far, near, far):
        share = share_past(writing, machine, draw)
        assert share > 0.9 if machine is far else share < 0.1


def test_caches_are_shared_out(tmp_path: Path) -> None:
    assert cache_bytes(4, range(4), tmp_path) == USUAL_CACHE_BYTES // 4
    for core in range(4):
        place = tmp_path / f"cpu{core}/cache/index3"
        place.mkdir(parents=True)
        (place / "size").write_text("32768K\n")
        (place / "shared_cpu_list").write_text("0-1\n" if core < 2 else "2-3\n")
    assert [cache_bytes(ranks, range(4), tmp_path) >> 20 for ranks in (1, 2, 4, 8)] == [32, 32, 16, 8]
    assert cache_bytes(2, {1}, tmp_path) >> 20 == 16


def check_changing(rank: int, n: int) -> None:
    """Collectives while every rank writes now in this way, now in that, and lets all results go past the caches."""
    restless = {"TIMED_BYTES": 1, "SUSPICIOUS_SECONDS_PER_BYTE": 0.0, "WORTH": 1.0, "STAY": 5 + 2 * rank}
    with mock.patch.multiple(copying, **restless), mock.patch.object(exchange, "cache_bytes", return_value=0):
        shared = SharedMemory(slot_bytes=1 << 10)
        dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared))
        draw = random.Random(0)
        for i in range(300):
            numel = draw.choice([1, 7, 60, 300])
            parts = torch.arange(n * n * numel).view(n, n, numel) * (i + 1)
            whole = parts[rank].flatten().clone()
            dist.all_reduce(whole)
            assert torch.equal(whole, parts.sum(0).flatten())
            out = torch.empty(numel, dtype=torch.int64)
            dist.reduce_scatter_single(out, parts[rank].flatten())
            assert torch.equal(out, parts[:, rank].sum(0))
            dist.all_gather_single(whole, parts[rank, 0])
            assert torch.equal(whole, parts[:, 0].flatten())
            dist.all_to_all_single(whole, parts[rank].flatten())
            assert torch.equal(whole, parts[:, rank].flatten())
            dist.broadcast(whole, i % n)
            assert torch.equal(whole, parts[:, i % n].flatten())
            dist.reduce(out, i % n)
            assert rank != i % n or torch.equal(out, parts.sum((0, 1)))


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_while_the_way_changes(world_size: int) -> None:
    with Ranks(world_size, backend=None) as ranks:
        ranks.run(check_changing)
