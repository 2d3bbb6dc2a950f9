"""Ranks that wait for each other do not stay on one core while another has none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import median
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.cores import Cores, core_of
from fivefold.collectives.shared_memory.transport import SharedMemory
from ranks import Ranks

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
STAY = "import os, sys, time; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True); time.sleep(100)"


@pytest.fixture
def process_on() -> Iterator[Callable[[int], int]]:
    """Starts a process that stays on a core."""
    processes = []

    def start(core: int) -> int:
        process = subprocess.Popen([sys.executable, "-c", STAY, str(core)], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    allowed = os.sched_getaffinity(0)
    yield start
    os.sched_setaffinity(0, allowed)
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("others", "moves"), [([0], True), ([1], False), ([0, 1], False), ([0, 0, 1], True), ([], False)]
)
def test_a_rank_leaves_a_core_with_two_more(
    process_on: Callable[[int], int], others: list[int], moves: bool
) -> None:
    """`others`: each other rank is on the core where this one is, 0, or on the other, 1."""
    two = sorted(os.sched_getaffinity(0))[:2]
    cores = Cores([process_on(two[other]) for other in others])
    os.sched_setaffinity(0, {two[0]})
    before = core_of("thread-self")
    assert before == two[0]
    assert not cores.spread()  # it is bound to this one
    os.sched_setaffinity(0, two)
    cores = Cores(cores.others)
    assert cores.spread() == moves
    assert os.sched_getaffinity(0) == set(two)


def test_an_interrupted_rank_keeps_its_cores(process_on: Callable[[int], int]) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    cores = Cores([process_on(two[0])] * 2)
    os.sched_setaffinity(0, {two[0]})
    os.sched_setaffinity(0, two)
    bind = os.sched_setaffinity

    def interrupted(process: int, cores: set[int]) -> None:
        bind(process, cores)
        if cores == {two[1]}:
            raise KeyboardInterrupt

    with mock.patch.object(os, "sched_setaffinity", interrupted), pytest.raises(KeyboardInterrupt):
        cores.spread()
    assert os.sched_getaffinity(0) == set(two)


def test_a_rank_that_is_bound_while_it_moves_stays_so(process_on: Callable[[int], int]) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    cores = Cores([process_on(two[0])] * 2)
    os.sched_setaffinity(0, {two[0]})
    os.sched_setaffinity(0, two)
    bind = os.sched_setaffinity

    def bound(process: int, cores: set[int]) -> None:
        bind(process, cores)
        if cores == {two[1]}:
            bind(process, {two[0]})  # as taskset would, from outside

    with mock.patch.object(os, "sched_setaffinity", bound):
        cores.spread()
    assert os.sched_getaffinity(0) == {two[0]}


def test_ranks_that_are_each_bound_to_a_core_do_not_crowd(process_on: Callable[[int], int]) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    here, there = process_on(two[0]), process_on(two[1])
    os.sched_setaffinity(0, {two[0]})
    assert not Cores([there]).crowded
    assert Cores([here]).crowded
    assert Cores([here, there]).crowded


def test_looking_around_takes_little_time(process_on: Callable[[int], int]) -> None:
    two = sorted(os.sched_getaffinity(0))[:2]
    cores = Cores([process_on(two[0])] * 1000)
    os.sched_setaffinity(0, {two[0]})
    os.sched_setaffinity(0, two)
    assert cores.spread()
    os.sched_setaffinity(0, {two[0]})
    os.sched_setaffinity(0, two)
    assert not cores.spread()  # a look at a thousand processes has been long: the next is far off


def check_apart(rank: int, n: int) -> list[list[int]]:
    """Where this rank is after each of a few calls, each time they have been put on one core; below 0 once it has left.

    Where other processes keep the other core busy, Linux may move it back.
    """
    shared = SharedMemory()
    dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared))
    assert shared._engine is not None
    cores = shared._engine._cores
    moves = [False]
    look = cores.spread
    cores.spread = lambda: moves.append(look()) or moves[-1]  # type: ignore[method-assign]
    numbers = torch.ones(1 << 18)
    allowed = os.sched_getaffinity(0)
    found = []
    for _ in range(15):
        os.sched_setaffinity(0, {min(allowed)})
        dist.barrier()
        os.sched_setaffinity(0, allowed)
        found.append([])
        moves.clear()
        for _ in range(40):
            dist.all_reduce(numbers)
            found[-1].append(-1 - rank if any(moves) else core_of("thread-self"))
    return found


def test_ranks_on_one_core_part() -> None:
    """At once; Linux by itself would part them after some 30 calls."""
    with Ranks(2, backend=None) as ranks:
        tries = zip(*ranks.run(check_apart), strict=True)
    together = [sum(a == b for a, b in zip(*cores, strict=True)) for cores in tries]
    assert median(together) < 20
