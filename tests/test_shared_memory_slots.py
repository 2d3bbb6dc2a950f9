"""A rank writes two slots in turn, or many where that is faster, and never one that may still be read."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory import exchange, slots
from fivefold.collectives.shared_memory.memory import host_memory
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


def check_changing(rank: int, n: int, directory: Path, leaves: int) -> set[int]:
    """Collectives while every rank changes between two and many slots; those that its segment has memory for.

    `leaves`: the disk is filled but for so many bytes; 0: it is not.
    """
    restless = {"SLOW_SECONDS_PER_BYTE": 0.0, "STAY": 5 + 2 * rank, "BETTER": 0.0 if rank else 1.0}
    with (
        mock.patch.object(exchange, "TIMED_BYTES", 1),
        mock.patch.multiple(slots, SELDOM=1, **restless),
    ):
        shared = SharedMemory(directory=directory, slot_bytes=256)
        dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared))
        dist.barrier()
        if leaves and rank == 0:
            free = os.statvfs(directory)
            (directory / "file").write_bytes(bytes(free.f_bfree * free.f_bsize - leaves))
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
        return reserved(dist.group.WORLD)


def reserved(group: Any) -> set[int]:
    """The slots of this rank that have been written in that group."""
    return group._transport._collectives._reserved  # type: ignore[no-any-return]


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_while_slots_change(world_size: int) -> None:
    with Ranks(world_size, backend=None) as ranks:
        for used in ranks.run(check_changing, SHARED_MEMORY, 0):
            assert used == set(range(MANY))


@pytest.mark.parametrize("leaves", [1 << 12, 1 << 17])
def test_a_disk_that_fills_up(tmp_path: Path, leaves: int) -> None:
    """Many slots are not taken from the last of the memory, though 16 KiB would do for them."""
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        with Ranks(2, backend=None) as ranks:
            for used in ranks.run(check_changing, tmp_path, leaves):
                assert used == {0, 1}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def check_timed(rank: int, n: int) -> list[set[int]]:
    """The slots in use after all-reduces of two steps each, the first of them all even or all odd."""
    with (
        mock.patch.multiple(exchange, TIMED_BYTES=1, AT_ONCE_BYTES=64),
        mock.patch.object(slots, "SLOW_SECONDS_PER_BYTE", 0.0),
    ):
        shared = SharedMemory(slot_bytes=1 << 12)
        dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared))
        groups = [dist.group.WORLD, dist.new_group()]
        dist.barrier(groups[1])
        for group in groups:
            for _ in range(100):
                dist.all_reduce(torch.ones(200), group=group)
        return [reserved(group) for group in groups]


def test_writes_are_timed_whatever_their_rhythm() -> None:
    with Ranks(3, backend=None) as ranks:
        for used in ranks.run(check_timed):
            assert used == [set(range(MANY))] * 2


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cgroup", "files", "free_gib"),
    [
        ("0::/\n", {}, 20),
        ("0::/\n", {"": (8, 5, 1)}, 4),
        ("0::/job/task\n", {"job/task": ("max", 5, 0), "job": (8, 7, 0)}, 1),
        ("0::/job/task\n", {"job/task": (64, 5, 0)}, 20),
        ("4:cpu,cpuacct:/job\n2:memory:/outside\n0::/\n", {"memory": (6, 3, 1)}, 4),
        ("2:memory:/job\n0::/\n", {"memory": (1 << 32, 9, 0), "memory/job": (2, 3, 0)}, 0),
    ],
)
def test_memory_that_is_free(
    tmp_path: Path, cgroup: str, files: dict[str, tuple[int | str, int, int]], free_gib: int
) -> None:
    """`files`: by cgroup its limit, what is used and what of it can be given up, in GiB."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup)
    (tmp_path / "meminfo").write_text(f"MemFree: 1 kB\nMemAvailable: {20 * GIB >> 10} kB\n")
    for name, (limit, used, inactive) in files.items():
        directory = tmp_path / "cgroups" / name
        directory.mkdir(parents=True, exist_ok=True)
        old = name.startswith("memory")
        most = limit if isinstance(limit, str) else limit * GIB
        (directory / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{most}\n")
        (directory / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used * GIB}\n")
        prefix = "total_" if old else ""
        (directory / "memory.stat").write_text(f"cache 5\n{prefix}inactive_file {inactive * GIB}\n")
    assert host_memory(tmp_path, tmp_path / "cgroups").available == free_gib * GIB
