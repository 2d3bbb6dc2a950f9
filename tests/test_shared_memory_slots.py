"""A rank writes two slots in turn, or many where that is faster, and never one that may still be read."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory import exchange, slots
from fivefold.collectives.shared_memory.slots import MANY, Slots
from fivefold.collectives.shared_memory.transport import SHARED_MEMORY, SharedMemory
from ranks import Ranks

Machine: TypeAlias = Callable[[int], float]
"""Seconds per byte of a write into a slot that was last written so many writes ago."""
WRITES = 8000


def near(age: int) -> float:
    return 0.024e-9 if age <= 8 else 0.09e-9


def far(age: int) -> float:
    return 0.41e-9 if age <= 4 else 0.35e-9 if age <= 8 else 0.11e-9


def starved(age: int) -> float:
    """Memory is slow, and nothing else matters."""
    return 0.3e-9


def write(own: Slots, machine: Machine, draw: random.Random) -> list[int]:
    """How old each written slot was; one write of ten is interrupted for a thousand times as long."""
    last: dict[int, int] = {}
    ages, before = [], -1
    for now in range(WRITES):
        number = own.next()
        assert number != before
        ages.append(min(now - last.get(number, -MANY), MANY))
        last[number], before = now, number
        if now % own.timed_every == 0:
            own.took(1 << 20, machine(ages[-1]) * (1 << 20) * (1000 if draw.random() < 0.1 else 1))
    return ages


@pytest.mark.parametrize(("machine", "least", "most"), [(near, 0, 0.05), (far, 0.85, 1), (starved, 0, 0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_many_slots_where_they_are_faster(machine: Machine, least: float, most: float, seed: int) -> None:
    ages = write(Slots(), machine, random.Random(seed))
    assert least <= sum(age == MANY for age in ages) / WRITES <= most


def test_the_choice_follows_the_machine() -> None:
    own, draw = Slots(), random.Random(0)
    for machine, age in ((near, 2), (far, MANY), (near, 2), (far, MANY)):
        ages = write(own, machine, draw)
        assert sum(found == age for found in ages) > 0.85 * WRITES


def test_without_memory_there_are_two() -> None:
    own = Slots()
    while own.next() < 2:
        own.took(1, 1.0)
    own.only_two()
    assert [own.next() for _ in range(4)] == [0, 1, 0, 1]
    assert set(write(own, far, random.Random(0))) == {2, MANY}  # MANY: never written before
    assert set(write(Slots(2), far, random.Random(0))) == {2, MANY}


def check_changing(rank: int, n: int, directory: Path, fill: bool) -> tuple[set[int], set[int]]:
    """Collectives while every rank changes between two and many slots; those that its segment has memory for."""
    restless = {"SLOW_SECONDS_PER_BYTE": 0.0, "STAY": 5 + 2 * rank, "BETTER": 0.0 if rank else 1.0}
    with (
        mock.patch.object(exchange, "TIMED_BYTES", 1),
        mock.patch.multiple(slots, SELDOM=1, **restless),
    ):
        shared = SharedMemory(directory=directory, slot_bytes=256)
        dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared))
        dist.barrier()
        if fill and rank == 0:
            free = os.statvfs(directory)
            (directory / "file").write_bytes(bytes(free.f_bfree * free.f_bsize))
        dist.barrier()
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
        return dist.group.WORLD._transport._collectives._reserved  # type: ignore[union-attr]


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_while_slots_change(world_size: int) -> None:
    with Ranks(world_size, backend=None) as ranks:
        for used in ranks.run(check_changing, SHARED_MEMORY, False):
            assert used == set(range(MANY))


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        with Ranks(2, backend=None) as ranks:
            for used in ranks.run(check_changing, tmp_path, True):
                assert used < set(range(MANY))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
