"""Checkpoints that are damaged or do not fit, and saves that fail: one clear error on all ranks, nothing lost."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint_state import CONFIG_TEXT, checkpointer, error_of, local, make_state, wrong
from fivefold.trainer import checkpoint_directory
from fivefold.trainer.checkpoint import Checkpointer, load_tensors
from fivefold.trainer.checkpoint_directory import CheckpointError
from fivefold.trainer.storage import parse_sums
from ranks import Ranks, run_ranks

FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "config.toml", "manifest.json", "SHA256SUMS")
FLIPS = 3  # bits per file


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def good(pair: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint of two ranks."""
    directory = tmp_path_factory.mktemp("good")
    pair.run(save_good, directory)
    return directory / "step-1"


def save_good(rank: int, world_size: int, directory: Path) -> None:
    keeper = checkpointer(directory)
    keeper.save(1, make_state("zero3", salt=7), {"step": 1}, CONFIG_TEXT, asynchronous=True)
    keeper.close()


# ---- damaged files


def load_each(rank: int, world_size: int, paths: list[Path]) -> list[tuple[str, list[str]]]:
    """For each path, the error of loading it, and the tensors that are not as they were."""
    outcomes = []
    for path in paths:
        keeper = checkpointer(path.parent)
        state = make_state("zero3", salt=8)
        error = error_of(keeper.load, path, state)
        outcomes.append((error, wrong(state, salt=8)))
        keeper.close()
    return outcomes


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def damaged(good: Path, directory: Path, flips: int) -> list[tuple[Path, str]]:
    """Copies of a checkpoint, each with one damage, and the name of the damaged file."""
    chance = random.Random(5)
    copies: list[tuple[Path, str]] = []

    def copy(name: str, damage: Callable[[Path], object]) -> None:
        path = directory / str(len(copies)) / good.name
        shutil.copytree(good, path)
        damage(path / name)
        copies.append((path, name))

    for name in FILES:
        size = (good / name).stat().st_size
        for _ in range(flips):
            bit = chance.randrange(8 * size)
            copy(name, functools.partial(flip, bit=bit))
        for length in (0, size - 1, chance.randrange(size)):
            copy(name, functools.partial(os.truncate, length=length))
        copy(name, lambda path: path.write_bytes(path.read_bytes() + b"\n"))
        copy(name, Path.unlink)
    return copies


def check_damage(pair: Ranks, good: Path, directory: Path, flips: int) -> None:
    copies = damaged(good, directory, flips)
    outcomes = pair.run(load_each, [path for path, _ in copies])
    for (path, name), first, second in zip(copies, *outcomes, strict=True):
        error, touched = first
        assert first == second, (path, name)
        assert error, (path, name)
        assert touched == [], (path, name)
        assert "\n" not in error
        # A checksum that is damaged itself cannot be told from a damaged file: then the error names either.
        assert str(path / name) in error or name == "SHA256SUMS", error
        assert str(path) in error
        assert error_of(load_tensors, path)


def test_any_damage_is_refused_by_all_and_touches_nothing(pair: Ranks, good: Path, tmp_path: Path) -> None:
    assert pair.run(load_each, [good])[0][0][0] == ""
    check_damage(pair, good, tmp_path, FLIPS)


@pytest.mark.full
def test_many_more_flipped_bits(pair: Ranks, good: Path, tmp_path: Path) -> None:
    check_damage(pair, good, tmp_path, 100)


def test_every_bit_of_the_checksums_matters(good: Path) -> None:
    """The other files are guarded by this one, and this one by the reader: no bit of it may mean nothing."""
    path = good / "SHA256SUMS"
    sound = path.read_bytes()
    for bit in range(8 * len(sound)):
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            names = parse_sums(path, flipped.decode(errors="replace"))
        except CheckpointError:
            continue
        assert names != parse_sums(path, sound.decode()), f"bit {bit}"


# ---- sound files that do not fit


def misfits() -> dict[str, Callable[[dict[str, Tensor]], object]]:
    """What is changed about the run's state → how; the key is part of the error."""
    return {
        "holds model.table, which this run does not have": lambda s: s.pop("model.table"),
        "does not hold model.new, which this run needs": lambda s: s.update({"model.new": torch.zeros(3)}),
        "holds model.up.count as int64 [4], this run needs int64 [5]": lambda s: s.update(
            {"model.up.count": torch.zeros(5, dtype=torch.int64)}
        ),
        "holds optimizer.table.step as float32 [], this run needs float64 []": lambda s: s.update(
            {"optimizer.table.step": torch.zeros((), dtype=torch.float64)}
        ),
        "model.up.count has no memory": lambda s: s.update(
            {"model.up.count": torch.zeros(4, dtype=torch.int64, device="meta")}
        ),
        "and 1 more": lambda s: [s.pop(name) for name in list(s)[:4]],
    }


def load_misfits(
    rank: int, world_size: int, path: Path, only_rank: int | None
) -> list[tuple[str, list[str]]]:
    outcomes = []
    keeper = checkpointer(path.parent)
    for change in misfits().values():
        state = make_state("zero3", salt=8)
        before = {name: local(tensor).clone() for name, tensor in state.items() if not tensor.is_meta}
        if only_rank in (None, rank):
            change(state)
        error = error_of(keeper.load, path, state)
        kept = [name for name in state.keys() & before.keys() if not state[name].is_meta]
        same = [name for name in kept if local(state[name]).shape == before[name].shape]
        touched = [
            name
            for name in same
            if local(state[name]).any() and not torch.equal(local(state[name]), before[name])
        ]
        outcomes.append((error, touched))
    keeper.close()
    return outcomes


@pytest.mark.parametrize("only_rank", [None, 1])
def test_what_does_not_fit_is_refused_by_all(pair: Ranks, good: Path, only_rank: int | None) -> None:
    outcomes = pair.run(load_misfits, good, only_rank)
    assert [error for error, _ in outcomes[0]] == [error for error, _ in outcomes[1]]
    for (error, touched), (_, touched_too), expected in zip(*outcomes, misfits(), strict=True):
        if only_rank is not None and ("does not have" in expected or "more" in expected):
            assert error == ""  # the other rank asks for it, as with pipeline stages
            continue
        assert expected in error
        assert touched == touched_too == []


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.trainer.storage.FORMAT", 2)
    save_alone(tmp_path, 1)
    monkeypatch.undo()
    assert "checkpoint format 2, this version of Fivefold reads 1" in error_of(
        load_tensors, tmp_path / "step-1"
    )


# ---- saves that fail


def save_alone(directory: Path, step: int, state: dict[str, Tensor] | None = None) -> None:
    keeper = checkpointer(directory)
    keeper.save(step, state or make_state("zero0", step), {"step": step}, CONFIG_TEXT, asynchronous=True)
    keeper.close()


def outcome(
    keeper: Checkpointer, directory: Path, failing: Callable[[], Any], cure: Callable[[], Any]
) -> Any:
    """Saves soundly, then with a fault, then soundly again: the fault's error, and what was on the disk."""
    state = make_state("zero3", salt=7)
    state["model.big"] = torch.zeros(1 << 18)  # 1 MiB, so that a fault finds something to hit
    keeper.save(1, state, {"step": 1}, CONFIG_TEXT, asynchronous=False)
    failing()
    started = time.monotonic()
    error = error_of(keeper.save, 2, state, {"step": 2}, CONFIG_TEXT, asynchronous=False)
    seconds = time.monotonic() - started
    cure()
    after_fault = keeper.latest()  # a meeting of the ranks: rank 0 has cleaned up
    left = sorted(path.name for path in directory.iterdir() if path.name != ".lock")
    good = keeper.load(directory / "step-1", state)
    keeper.save(3, state, {"step": 3}, CONFIG_TEXT, asynchronous=True)
    keeper.wait()
    latest = keeper.latest()
    keeper.close()
    assert after_fault is not None
    assert latest is not None
    return error, seconds < 5, after_fault.name, left, good, latest.name


def check_outcomes(outcomes: list[Any], directory: Path, cause: str) -> None:
    expected = (True, "step-1", ["step-1"], {"step": 1}, "step-3")
    for error, *rest in outcomes:
        assert tuple(rest) == expected
        assert error.startswith(f"{directory / 'step-2'} was not saved: {cause}"), error
        assert "\n" not in error
    assert len({error for error, *_ in outcomes}) == 1


def limit_file_size(rank: int, world_size: int, directory: Path, victim: int) -> Any:
    """The kernel refuses to make any file of this rank larger, as with a quota or a full disk."""
    normal = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        if rank == victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, normal[1]))

    return outcome(checkpointer(directory), directory, lambda: limit(1000), lambda: limit(normal[0]))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_any_more(pair: Ranks, tmp_path: Path, victim: int) -> None:
    outcomes = pair.run(limit_file_size, tmp_path, victim)
    check_outcomes(
        outcomes, tmp_path, f"rank {victim}: [Errno 27] File too large: '{tmp_path}/.step-2.partial-"
    )


def lose_rights(rank: int, world_size: int, directory: Path, victim: int) -> Any:
    """This rank may no longer make files here."""

    def become(user: int) -> None:
        if rank == victim:
            os.seteuid(user)

    directory.chmod(0o755)
    for parent in directory.parents:
        if parent.stat().st_uid == os.getuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    return outcome(checkpointer(directory), directory, lambda: become(65534), lambda: become(os.getuid()))


@pytest.mark.skipif(os.getuid() != 0, reason="changes its effective user")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_may_not_write(pair: Ranks, tmp_path: Path, victim: int) -> None:
    outcomes = pair.run(lose_rights, tmp_path, victim)
    check_outcomes(
        outcomes, tmp_path, f"rank {victim}: [Errno 13] Permission denied: '{tmp_path}/.step-2.partial-"
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    libc = ctypes.CDLL(None, use_errno=True)
    path = tmp_path / "disk"
    path.mkdir()
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, b"size=3m") != 0:
        pytest.skip(f"no file system of our own: {os.strerror(ctypes.get_errno())}")
    yield path
    libc.umount(bytes(path))


def fill_disk(rank: int, world_size: int, directory: Path) -> Any:
    ballast = directory / "ballast"

    def fill() -> None:
        if rank == 0:
            ballast.write_bytes(bytes(1_200_000))

    def empty() -> None:
        if rank == 0:
            ballast.unlink()

    return outcome(checkpointer(directory), directory, fill, empty)


def test_a_full_disk(pair: Ranks, small_disk: Path) -> None:
    outcomes = pair.run(fill_disk, small_disk)
    assert "[Errno 28] No space left on device" in outcomes[0][0]
    check_outcomes(outcomes, small_disk, "rank ")


def differ(rank: int, world_size: int, directory: Path) -> list[str]:
    keeper = checkpointer(directory)
    shapes = error_of(keeper.save, 1, {"model.a": torch.zeros(3 + rank)}, {}, "", asynchronous=False)
    one = {"model.a": torch.zeros(3)}
    counters = error_of(keeper.save, 1, one, {"bad": object()}, "", asynchronous=False)
    keeper.save(1, one, {}, "", asynchronous=False)
    keeper.close()
    return [shapes, counters]


def test_a_state_that_makes_no_sense_is_refused(pair: Ranks, tmp_path: Path) -> None:
    outcomes = pair.run(differ, tmp_path)
    assert outcomes[0] == outcomes[1]
    shapes, counters = outcomes[0]
    assert "rank 0: model.a is float32 [3] on rank 0 and float32 [4] on rank 1" in shapes
    assert "rank 0: TypeError: Object of type object is not JSON serializable" in counters
    assert checkpoint_directory.complete(tmp_path) == [tmp_path / "step-1"]


def no_memory(rank: int, world_size: int, directory: Path) -> str:
    keeper = checkpointer(directory)
    if rank == 1:

        def refuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            raise MemoryError("cannot allocate 12 bytes")

        keeper._memory.copy = refuse  # type: ignore[method-assign]
    keeper.save(1, {"model.a": torch.zeros(3)}, {}, "", asynchronous=True)
    error = error_of(keeper.wait)
    keeper.close()
    return error


def test_a_snapshot_that_fails_on_one_rank_is_heard_of_by_all(pair: Ranks, tmp_path: Path) -> None:
    expected = f"{tmp_path}/step-1 was not saved: rank 1: MemoryError: cannot allocate 12 bytes"
    assert pair.run(no_memory, tmp_path) == [expected] * 2


def late_error(rank: int, world_size: int, directory: Path) -> list[str]:
    """The error of a save in the background is told once, by the next save or wait."""
    keeper = checkpointer(directory)
    state = {"model.a": torch.zeros(3)}
    keeper.save(1, state, {"bad": object()}, "", asynchronous=True)
    assert keeper.latest() is None  # waits, and leaves the error to be told
    told = [error_of(keeper.save, 2, state, {}, "", asynchronous=True) for _ in range(2)]
    keeper.close()
    return [error.partition(" was")[0] for error in told] + [
        path.name for path in checkpoint_directory.complete(directory)
    ]


def test_the_error_of_a_background_save_is_told_by_the_next(pair: Ranks, tmp_path: Path) -> None:
    assert pair.run(late_error, tmp_path) == [[f"{tmp_path}/step-1", "", "step-2"]] * 2


# ---- ranks that die


def die_while_saving(rank: int, world_size: int, directory: Path) -> tuple[str, bool]:
    keeper = checkpointer(directory)
    state = make_state("zero3", salt=7)
    keeper.save(1, state, {"step": 1}, CONFIG_TEXT, asynchronous=False)
    keeper.save(2, state, {"step": 2}, CONFIG_TEXT, asynchronous=True) if rank == 0 else os._exit(3)
    started = time.monotonic()
    return error_of(keeper.wait), time.monotonic() - started < 5


def test_a_rank_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    (error, soon), _ = run_ranks(die_while_saving, 2, tmp_path, dies={1})
    assert error.startswith(f"{tmp_path}/step-2 was not saved: ")
    assert soon
    keeper = checkpointer(tmp_path)
    assert keeper.latest() == tmp_path / "step-1"
    keeper.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-1"]


FAIL_WHILE_A_SAVE_WAITS = """
import sys, threading
from pathlib import Path
import torch
from checkpoint_state import checkpointer
from fivefold.trainer.storage import CheckpointWriter
CheckpointWriter.prepare_local_plan = lambda *_: threading.Event().wait()
checkpointer(Path(sys.argv[1])).save(1, {"model.a": torch.zeros(3)}, {}, "", asynchronous=True)
sys.exit("failed")
"""


def test_a_rank_that_fails_while_its_save_waits_for_others_still_ends(tmp_path: Path) -> None:
    """Or they would hear of it only after their time limit."""
    command = [sys.executable, "-c", FAIL_WHILE_A_SAVE_WAITS, str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parent, timeout=60, stderr=subprocess.PIPE, text=True)
    assert ended.returncode != 0
    assert ended.stderr.startswith("failed")
