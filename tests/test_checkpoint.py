"""Checkpoints that go well: from every layout into every other, in the background, pruned, cleaned up."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint_state import (
    CONFIG_TEXT,
    LAYOUTS,
    checkpointer,
    error_of,
    local,
    make_state,
    part,
    value,
    wrong,
)
from fivefold.trainer import checkpoint_directory
from fivefold.trainer.checkpoint import load_tensors
from fivefold.trainer.storage import CheckpointWriter
from ranks import Ranks

COUNTERS = {"step": 3, "samples": 96, "tokens": 12345678901234, "loss_scale": 65536.0}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


# ---- layouts


def save_one(rank: int, world_size: int, layout: str, directory: Path) -> None:
    keeper = checkpointer(directory)
    keeper.save(3, make_state(layout, salt=7), COUNTERS, CONFIG_TEXT, asynchronous=True)
    keeper.close()


def load_all(rank: int, world_size: int, layout: str, directories: list[Path]) -> list[Any]:
    outcomes = []
    for directory in directories:
        keeper = checkpointer(directory)
        path = keeper.latest()
        assert path is not None
        state = make_state(layout, salt=8)
        outcomes.append((keeper.load(path, state), wrong(state, salt=7)))
        keeper.close()
    return outcomes


def test_every_layout_loads_what_every_layout_saved_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    directories = [tmp_path / "alone", *(tmp_path / layout for layout in LAYOUTS)]
    save_one(0, 1, "zero0", tmp_path / "alone")
    for layout, count in LAYOUTS.items():
        ranks.run(save_one, layout, tmp_path / layout, world_size=count)
    good: Any = [(COUNTERS, [])] * len(directories)
    assert load_all(0, 1, "zero0", directories) == good
    for layout, count in LAYOUTS.items():
        assert ranks.run(load_all, layout, directories, world_size=count) == [good] * count, layout


def test_one_process_reads_the_model_alone(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_one, "zero3", tmp_path, world_size=2)
    tensors = load_tensors(tmp_path / "step-3")
    expected = {name: like for name, like in make_state("zero0", 0).items() if name.startswith("model.")}
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, value(name, tensor, salt=7)), name
    assert (tmp_path / "step-3" / "config.toml").read_text() == CONFIG_TEXT


def test_others_can_read_it(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_one, "zero3", tmp_path, world_size=2)
    path = tmp_path / "step-3"
    if shutil.which("sha256sum"):
        subprocess.run(
            ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True
        )
    dcp_to_torch_save(path, tmp_path / "torch.pt")
    state = torch.load(tmp_path / "torch.pt")
    assert wrong(state, salt=7) == []
    assert state.keys() == make_state("zero0", 0).keys()


# ---- stages: ranks that hold different names


def stages(rank: int, world_size: int, directory: Path) -> tuple[list[str], str]:
    keeper = checkpointer(directory)
    whole = make_state("zero0", salt=7)
    names = sorted(whole)
    mine = {name: whole[name] for name in (names[:9] if rank == 0 else names[9:])}
    keeper.save(3, mine, COUNTERS, CONFIG_TEXT, asynchronous=True)
    path = keeper.latest()
    assert path is not None
    for tensor in mine.values():
        tensor.data.zero_()
    keeper.load(path, mine)
    if rank == 1:
        mine.pop(names[-1])  # now nobody asks for it
    missing = error_of(keeper.load, path, mine)
    keeper.close()
    return wrong(mine, salt=7), missing


def test_pipeline_stages_hold_different_names(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.run(stages, tmp_path, world_size=2)
    missing = f"{tmp_path}/step-3 holds optimizer.up.weight.step, which this run does not have"
    assert outcomes == [([], missing)] * 2


# ---- in the background


def mutate_at_once(rank: int, world_size: int, layout: str, directory: Path) -> tuple[list[bool], list[str]]:
    """Holds the background thread back until the trainer has overwritten everything."""
    keeper = checkpointer(directory)
    gate = threading.Event()
    plan = CheckpointWriter.prepare_local_plan
    CheckpointWriter.prepare_local_plan = lambda *a: (gate.wait(10), plan(*a))[1]  # type: ignore[method-assign]
    polls = [keeper.poll()]
    for salt in (7, 9):  # the second save re-uses the first one's memory
        state, counters = make_state(layout, salt), {"salts": [salt]}
        keeper.save(salt, state, counters, CONFIG_TEXT, asynchronous=True)
        polls.append(keeper.poll())
        for tensor in state.values():
            local(tensor).fill_(-1)
        counters["salts"].append(-1)
        gate.set()
        keeper.wait()
        polls.append(keeper.poll())
        gate.clear()
    CheckpointWriter.prepare_local_plan = plan  # type: ignore[method-assign]
    bad = []
    for salt in (7, 9):
        state = make_state(layout, salt=8)
        assert keeper.load(directory / f"step-{salt}", state) == {"salts": [salt]}
        bad += wrong(state, salt)
    keeper.close()
    return polls, bad


@pytest.mark.parametrize("layout", ["zero0", "zero3"])
def test_training_may_overwrite_the_state_as_soon_as_save_returns(
    ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    assert (
        ranks.run(mutate_at_once, layout, tmp_path, world_size=2)
        == [([True, False, True, False, True], [])] * 2
    )


def back_to_back(rank: int, world_size: int, directory: Path) -> tuple[list[str], Path | None]:
    keeper = checkpointer(directory, keep_last=5)
    for salt in (1, 2, 3):
        keeper.save(salt, make_state("zero3", salt), {"step": salt}, CONFIG_TEXT, asynchronous=True)
        dist.all_reduce(torch.ones(8))  # training's own collectives go on meanwhile
    latest = keeper.latest()
    bad = []
    for salt in (1, 2, 3):
        state = make_state("zero3", salt=8)
        assert keeper.load(directory / f"step-{salt}", state) == {"step": salt}
        bad += wrong(state, salt)
    keeper.close()
    return bad, latest


def test_saves_back_to_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(back_to_back, tmp_path, world_size=2) == [([], tmp_path / "step-3")] * 2


# ---- what is kept


def save_alone(directory: Path, *steps: int, **options: int) -> None:
    keeper = checkpointer(directory, **options)
    for step in steps:
        keeper.save(step, make_state("zero0", step), {"step": step}, CONFIG_TEXT, asynchronous=True)
    keeper.close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 1}, [7]),
        ({"keep_last": 3}, [5, 6, 7]),
        ({"keep_last": 2, "keep_every": 3}, [3, 6, 7]),
        ({"keep_last": 9}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_pruning(tmp_path: Path, options: dict[str, int], kept: list[int]) -> None:
    save_alone(tmp_path, *range(1, 8), **options)
    assert names(tmp_path) == [f"step-{step}" for step in kept]


def test_pruning_never_takes_the_checkpoint_just_saved(tmp_path: Path) -> None:
    """A run went back from step 30 to 10: its step 11 is the newest, and what `latest` must find."""
    save_alone(tmp_path, 10, 20, 30, keep_last=3)
    save_alone(tmp_path, 11, keep_last=1)
    assert checkpoint_directory.complete(tmp_path) == [tmp_path / "step-11"]
    aside = [name.split("-abandoned")[0] for name in names(tmp_path) if "abandoned" in name]
    assert [name.partition(".")[0] for name in aside] == ["step-20", "step-30"]


def test_a_checkpoint_that_cannot_be_deleted_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    save_alone(tmp_path, 1, 2, keep_last=1)
    assert checkpoint_directory.complete(tmp_path) == [tmp_path / "step-2"]
    assert "could not be removed" in caplog.text


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, 2)
    keeper = checkpointer(tmp_path)
    keeper.save(2, make_state("zero0", 99), {"step": 2}, CONFIG_TEXT, asynchronous=False)
    keeper.close()
    assert names(tmp_path) == ["step-1", "step-2"]
    for name, tensor in load_tensors(tmp_path / "step-2").items():
        assert torch.equal(tensor, part(value(name, tensor, 99), tensor))


# ---- starting


def test_a_start_cleans_up_after_dead_saves(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, 2)
    for litter in (".step-3.partial-x-1", ".step-1.deleted-x", ".step-2.replaced-x"):
        shutil.copytree(tmp_path / "step-1", tmp_path / litter)
    (tmp_path / "step-2").rename(tmp_path / ".step-2.replaced-y")  # died between the two renames
    shutil.rmtree(tmp_path / ".step-2.replaced-x")
    (tmp_path / ".seen-by-all-x").touch()
    (tmp_path / "notes.txt").touch()
    keeper = checkpointer(tmp_path)
    assert keeper.latest() == tmp_path / "step-2"
    keeper.close()
    assert names(tmp_path) == ["notes.txt", "step-1", "step-2"]


def test_what_is_not_a_complete_checkpoint_is_not_listed(tmp_path: Path) -> None:
    save_alone(tmp_path, 9, 10)
    (tmp_path / "step-11").mkdir()
    (tmp_path / "step-x").mkdir()
    by_number = [tmp_path / "step-9", tmp_path / "step-10"]
    assert checkpoint_directory.complete(tmp_path) == by_number
    assert checkpoint_directory.complete(tmp_path / "absent") == []


def open_own(rank: int, world_size: int, directories: list[Path]) -> str:
    return error_of(checkpointer, directories[rank])


def test_a_directory_that_is_not_shared_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(open_own, [tmp_path / "0", tmp_path / "1"], world_size=2)
    assert "is not seen by ranks 1 (" in first
    assert "set run.dir to a shared one" in first
    assert second.startswith("checkpoints need one directory that all ranks share")


def test_a_directory_that_cannot_be_made_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = ranks.run(open_own, [tmp_path / "file" / "checkpoints"] * 2, world_size=2)
    assert errors[0] == errors[1]
    assert "Not a directory" in errors[0]


def open_in_haste(rank: int, world_size: int, directory: Path) -> str:
    checkpoint_directory.LOCK_SECONDS, normal = 0.1, checkpoint_directory.LOCK_SECONDS
    error = error_of(checkpointer, directory)
    checkpoint_directory.LOCK_SECONDS = normal
    return error


def test_two_runs_do_not_save_to_one_directory(ranks: Ranks, tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    errors = ranks.run(open_in_haste, tmp_path, world_size=2)
    assert errors[0] == errors[1]
    assert "another run (process " in errors[0]
    keeper.close()
    assert ranks.run(open_in_haste, tmp_path, world_size=2) == ["", ""]
