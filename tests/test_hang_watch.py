"""A hang is explained while it lasts (cases F): every survivor says who has not come to which collective."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.hang_watch import HangWatch
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.transport import SharedMemory
from fivefold.collectives.work import CollectiveError
from ranks import Ranks, run_ranks


@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.full), "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, backend=None) as ranks:
        yield ranks


def hang(rank: int, n: int, transport: str, kind: str) -> list[str]:
    """Rank 1 does not come to the second all_reduce over tp, in a way of its own; what each rank reports."""
    recorder, reports = Recorder(), list[str]()
    shared = SharedMemory() if transport == "shm" else None
    dist.init_process_group(register(recorder, timedelta(seconds=3), shared))
    store: Any = dist.distributed_c10d._get_default_store()
    tp, cp = (dist.new_group(group_desc=f"mesh_{axis}") for axis in ("tp", "cp"))
    processes: list[Any] = [None] * n
    dist.all_gather_object(processes, os.getpid())
    x = torch.ones(2)

    def report(text: str) -> None:
        reports.append(text)
        if kind == "freezes" and rank == 0:
            os.kill(processes[1], signal.SIGKILL)

    def name(rank: int) -> str:
        return f"rank {rank} (tp {rank})"

    with HangWatch(recorder, store, rank, seconds=1.0, name=name, report=report), suppress(CollectiveError):
        dist.all_reduce(x, group=tp)
        if rank == 1 and kind == "sleeps":
            time.sleep(2.5)
        if rank == 1 and kind == "hurries":
            time.sleep(0.2)
        if rank == 1 and kind == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 1 and kind == "skips":
            dist.all_reduce(x, group=cp)
        if rank == 1 and kind == "differs":
            dist.barrier(tp)
        if rank == 1 and kind == "sends":
            dist.recv(x, group_src=0, group=cp)
        dist.all_reduce(x, group=tp)
    return reports


def check(results: list[list[str]], rank: int, *parts: str) -> None:
    """That `rank` reported once, on one line, with these parts (numbers of lines and seconds apart)."""
    (report,) = results[rank]
    assert "\n" not in report
    report = re.sub(r"\d+ s\b", "N s", re.sub(r"\.py:\d+", ".py:N", report))
    for part in parts:
        assert part in report, report


def test_a_rank_that_sleeps_is_named(ranks: Ranks, transport: str) -> None:
    results = ranks.run(hang, transport, "sleeps")
    assert results[1] == []
    for rank in (0, 2):
        check(
            results,
            rank,
            f"rank {rank} (tp {rank}) has waited N s in all_reduce number 2 on axis tp, "
            "in test_hang_watch.py:N (hang): rank 1 (tp 1) has not entered it: it entered last "
            "all_reduce number 1 on axis tp, N s ago, and is in test_hang_watch.py:N (hang)",
        )
        assert f"rank {2 - rank}" not in results[rank][0]


def test_a_rank_in_another_collective_is_named(ranks: Ranks, transport: str) -> None:
    results = ranks.run(hang, transport, "skips")
    here = "rank 1 (tp 1) has not entered it: it entered last all_reduce number 1 on axis cp"
    check(results, 0, "in all_reduce number 2 on axis tp", here)
    check(results, 2, "in all_reduce number 2 on axis tp", here)
    there = "has not entered it: it entered last all_reduce number 2 on axis tp"
    check(results, 1, "in all_reduce number 1 on axis cp", f"rank 0 (tp 0) {there}", f"rank 2 (tp 2) {there}")


def test_a_rank_with_another_collective_in_the_same_group_is_named(ranks: Ranks) -> None:
    """By the watch over gloo; over shared memory the call itself fails (test_shared_memory)."""
    results = ranks.run(hang, "gloo", "differs")
    check(results, 0, "in all_reduce number 2 on axis tp", "rank 1 (tp 1) has entered barrier in its place")
    check(results, 1, "in barrier number 2 on axis tp", "rank 2 (tp 2) has entered all_reduce in its place")


def test_the_other_end_of_a_message_is_named(ranks: Ranks, transport: str) -> None:
    results = ranks.run(hang, transport, "sends")
    check(
        results, 1, "in recv number 1 on axis cp", "rank 0 (tp 0) has not met it: it entered last all_reduce"
    )
    assert "rank 2" not in results[1][0]


def test_a_short_wait_is_not_reported(ranks: Ranks, transport: str) -> None:
    assert ranks.run(hang, transport, "hurries") == [[], [], []]


def test_a_frozen_rank_is_named(transport: str) -> None:
    results = run_ranks(hang, 3, transport, "freezes", backend=None, dies={1})
    check(results, 0, "in all_reduce number 2 on axis tp", "rank 1 (tp 1) does not answer (dead, or frozen)")
