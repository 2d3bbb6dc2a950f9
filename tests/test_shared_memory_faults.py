"""Collectives through shared memory when ranks die, freeze or leave, or when there is no memory to share."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.transport import SHARED_MEMORY, SharedMemory
from fivefold.collectives.work import CollectiveError
from ranks import Ranks, run_ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, backend=None) as ranks:
        yield ranks


def join(timeout: float = 20.0, directory: Path = SHARED_MEMORY, slot_bytes: int = 1 << 16) -> None:
    shared = SharedMemory(directory=directory, slot_bytes=slot_bytes)
    dist.init_process_group(register(Recorder(), timedelta(seconds=timeout), shared))


def failure_of(call: Callable[[], Any]) -> tuple[str, float]:
    """The message of the error that the call ends with, and the seconds it took."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value), time.monotonic() - start


def check_killed(rank: int, n: int, where: str) -> tuple[str, float]:
    join()
    processes: list[Any] = [None] * n
    dist.all_gather_object(processes, os.getpid())
    big = torch.ones(5_000_000)
    work = dist.irecv(torch.empty(5_000_000), 1) if where == "message" and rank == 0 else None
    if rank == 1:
        if where == "message":  # 20 MB do not fit into a ring: the message breaks off
            dist.isend(big, 0)
        if where == "collective":
            dist.all_reduce(big, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    call = work.wait if work else lambda: dist.all_reduce(big)
    future = dist.all_reduce(big, async_op=True).get_future() if where == "future" else None
    message, seconds = failure_of(future.wait if future else call)
    assert f"rank 1 (process {processes[1]}) has died" in message or (
        # the other survivor may have seen it first
        n > 2 and "has given the group up after an error" in message
    )
    return message, seconds


@pytest.mark.parametrize("where", ["collective", "message", "future"])
def test_a_killed_rank_is_named_within_seconds(where: str) -> None:
    results = run_ranks(check_killed, 2, where, backend=None, dies={1})
    assert results[0][1] < 5.0


def check_stopped(rank: int, n: int) -> str:
    join(timeout=1.0)
    processes: list[Any] = [None] * n
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        message, _ = failure_of(dist.barrier)
    finally:
        os.kill(processes[1], signal.SIGCONT)
    return message


def test_a_frozen_rank_is_named_when_time_is_up(ranks: Ranks) -> None:
    message = ranks.run(check_stopped, world_size=2)[0]
    assert (
        "barrier number 3 on axis world with rank 1 failed: Timed out waiting 1000ms for rank 1, which is stopped"
        in message
    )


def check_left(rank: int, n: int) -> str:
    join()
    x = torch.ones(3)
    dist.all_reduce(x)
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(2.0)  # alive, but gone
        return ""
    return failure_of(lambda: dist.all_reduce(x))[0]


def test_a_rank_that_left_is_named(ranks: Ranks) -> None:
    for message in ranks.run(check_left)[::2]:
        assert "rank 1 has left the group" in message or "has given the group up" in message


def check_broken(rank: int, n: int) -> list[str]:
    """One rank's error ends the others' wait, and what was started before and comes after."""
    join()
    x = torch.ones(3)
    if rank == 1:
        with suppress(CollectiveError):
            dist.broadcast(torch.ones(4), 1)
            dist.all_gather([torch.empty(3)] * n, x)
        return []
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(x, async_op=True)
    calls = [first.wait, second.wait, lambda: dist.all_reduce(x)]
    return [failure_of(call)[0] for call in calls]


def test_an_error_ends_every_wait(ranks: Ranks) -> None:
    for messages in ranks.run(check_broken)[::2]:
        assert len(messages) == 3


def check_idle(rank: int, n: int, entered: str) -> float:
    join()
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        Path(entered).touch()
    before = time.process_time()
    dist.barrier()
    assert Path(entered).exists()  # nobody leaves a barrier before all are in it
    return time.process_time() - before


def test_waiting_leaves_the_processor_to_others(ranks: Ranks, tmp_path: Path) -> None:
    seconds = ranks.run(check_idle, str(tmp_path / "entered"))
    assert seconds[0] < 0.3
    assert seconds[2] < 0.3


def check_nothing_left(rank: int, n: int, directory: str) -> None:
    join(directory=Path(directory))
    big = torch.ones(1_000_000)  # 4 MB: four times what there is, passed through slots
    dist.all_reduce(big)
    assert bool((big == n).all())
    assert os.listdir(directory) == []
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with 1 MiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_nothing_is_left_after_sigkill(small_disk: Path) -> None:
    run_ranks(check_nothing_left, 2, str(small_disk), backend=None, dies={0, 1})
    assert os.listdir(small_disk) == []
    disk = os.statvfs(small_disk)
    assert disk.f_bfree == disk.f_blocks


def test_a_full_disk_is_told(small_disk: Path) -> None:
    with Ranks(2, backend=None) as ranks:
        errors = ranks.run(check_full_slots, str(small_disk))
        messages = ranks.run(check_full_ring, str(small_disk))
    for found, size in ((errors, 2 << 20), (messages, 4 << 20)):
        for error in found:
            assert (
                f"failed: No space left on device: shared memory needs {size} bytes more" in error
                or "has given the group up" in error
            )
        assert any("docker run --shm-size=8g" in error for error in found)


def check_full_slots(rank: int, n: int, directory: str) -> str:
    join(directory=Path(directory), slot_bytes=1 << 20)
    return failure_of(lambda: dist.all_reduce(torch.ones(1)))[0]


def check_full_ring(rank: int, n: int, directory: str) -> str:
    join(directory=Path(directory))
    x = torch.ones(1)
    return failure_of(lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0))[0]


def check_no_file(rank: int, n: int) -> str:
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        return failure_of(join)[0]
    finally:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def test_every_rank_hears_that_there_is_no_memory(ranks: Ranks) -> None:
    errors = ranks.run(check_no_file, world_size=2)
    assert errors[0] == "no shared memory in /dev/shm: File too large"
    assert errors[1] == "rank 0: no shared memory in /dev/shm: File too large"
