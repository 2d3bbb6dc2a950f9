"""Processes killed while they save: what is visible is complete, and the next start finds it."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_state import checkpointer
from fivefold.trainer import checkpoint_directory
from fivefold.trainer.checkpoint import load_tensors
from fivefold.trainer.checkpoint_directory import CheckpointError
from ranks import run_ranks

MOMENTS = 4  # of the quick sweep; the full one has 20


def state_of(step: int, rows: int) -> dict[str, torch.Tensor]:
    """Every element says which step it belongs to: a mixture of two saves would show."""
    return {f"model.{index}": torch.full((rows, 1000), float(step)) for index in range(4)}


def check_survivors(directory: Path, least: int) -> int:
    """Everything visible is whole; a new start finds the newest and leaves no litter. Returns its step."""
    found = checkpoint_directory.complete(directory)
    for path in found:
        for tensor in load_tensors(path).values():
            assert (tensor == checkpoint_directory.step_of(path)).all(), path
    keeper = checkpointer(directory)
    latest = keeper.latest()
    keeper.close()
    assert latest is not None
    assert not found or latest == found[-1]
    assert [path.name for path in directory.glob(".*")] == [".lock"]
    step = checkpoint_directory.step_of(latest)
    assert step >= least
    for tensor in load_tensors(latest).values():
        assert (tensor == step).all()
    return step


# ---- both ranks, at random moments


def save_until_killed(rank: int, world_size: int, directory: Path, seconds: float) -> None:
    keeper = checkpointer(directory, keep_last=1)
    keeper.save(1, state_of(1, 500), {}, "", asynchronous=True)
    keeper.wait()  # from here on there is always one
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with suppress(CheckpointError):  # the other rank may die a little earlier
        for step in range(2, 10_000):
            keeper.save(step, state_of(step, 500), {}, "", asynchronous=True)
    time.sleep(60)


def kill_at_random(directory: Path, moments: int) -> None:
    chance = random.Random(11)
    for moment in range(moments):
        place = directory / str(moment)
        # A save takes about 50 ms: this falls anywhere in one of the first six.
        run_ranks(save_until_killed, 2, place, chance.uniform(0.0, 0.3), dies={0, 1})
        check_survivors(place, least=1)


def test_both_ranks_killed_at_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path, MOMENTS)


@pytest.mark.full
def test_both_ranks_killed_at_more_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 20)


# ---- one process, before each of the calls that change the disk


def save_and_die(directory: Path, steps: list[int], calls: int) -> None:
    """Saves, and dies before the given call that changes the disk."""
    left = [calls]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **keywords: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return call(*arguments, **keywords)

        return instead

    keeper = checkpointer(directory, keep_last=1)
    for owner, name in ((os, "fsync"), (os, "unlink"), (Path, "rename"), (Path, "mkdir"), (Path, "open")):
        setattr(owner, name, counted(getattr(owner, name)))
    for step in steps:
        keeper.save(step, state_of(step, 1), {}, "", asynchronous=False)
    os._exit(0)


@pytest.mark.parametrize("steps", [[2], [1]], ids=["prunes", "replaces"])
def test_killed_before_any_call_that_changes_the_disk(tmp_path: Path, steps: list[int]) -> None:
    """Unlike a random moment this meets the windows of a microsecond: between two renames, in a deletion."""
    first = tmp_path / "first"
    keeper = checkpointer(first)
    keeper.save(1, state_of(1, 1), {}, "", asynchronous=False)
    keeper.close()
    ended = set()
    for calls in range(100):
        place = tmp_path / str(calls)
        shutil.copytree(first, place)
        process = multiprocessing.get_context("fork").Process(target=save_and_die, args=(place, steps, calls))
        process.start()
        process.join(20)
        ended.add(check_survivors(place, least=1))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    else:
        pytest.fail("never survived")
    assert calls > 15  # it really met the calls
    assert ended == {1, *steps}
