"""The run directory: its choice, so that no earlier run is overwritten, and the files that every run has in it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from fivefold.config.errors import BadInput
from fivefold.config.huggingface import CONFIG_JSON
from fivefold.config.load import dump
from fivefold.config.tree import Config, Run
from fivefold.trainer import checkpoint_directory

CONFIG, CHECKPOINTS, TOKENIZER = "config.toml", "checkpoints", "tokenizer.json"
RUNS = Path("runs")


def choose_directory(run: Run, resume: bool) -> Path:
    """The directory of the run. Creates nothing.

    A directory that holds a run is only used to resume it, and one that holds a checkpoint for nothing. Where
    `run.dir` is not given, a new run takes runs/NAME, or the first of runs/NAME-2, runs/NAME-3, … that is free.

    Raises:
        BadInput: nothing to resume there, a run or a checkpoint is there already, or no directory can be made there.
    """
    _check_no_checkpoint(run, resume)
    if resume:
        path = _given(run) or RUNS / run.name
        if not os.path.isfile(path / CONFIG):
            raise BadInput(
                f"{path}: no run to resume there (no {CONFIG}); give the directory of one, or leave out --resume"
            )
        return path
    path = _given(run) or next(path for path in _numbered(RUNS / run.name) if not _holds_run(path))
    _check_place(path)
    if _holds_run(path):
        raise _taken(path)
    return path


def check_run(path: Path) -> None:
    """Refuses a path that is neither a run directory nor a checkpoint in one.

    Raises:
        BadInput: in one line.
    """
    directory = path.parent.parent if path.parent.name == CHECKPOINTS else path
    if not os.path.isfile(directory / CONFIG):
        if os.path.isfile(path / CONFIG_JSON):
            raise BadInput(f"{path}: a Hugging Face model; make it a run first: fivefold convert {path} RUN")
        raise BadInput(f"{path}: not a run directory (no {CONFIG}); give the directory that train printed")


def find_checkpoint(run: Path) -> tuple[Path, Path]:
    """The run directory and the checkpoint that a path means: the newest one of a run, or one in it.

    Raises:
        BadInput: no run, or no checkpoint in it.
    """
    if run.parent.name == CHECKPOINTS and run.is_dir():
        return run.parent.parent, run
    check_run(run)
    found = checkpoint_directory.complete(run / CHECKPOINTS)
    if not found:
        raise BadInput(f"{run}: no complete checkpoint yet; wait for one, or train on with --resume")
    return run, found[-1]


def write_run(directory: Path, config: Config, tokenizer: Path, *, resume: bool) -> None:
    """RUN/config.toml, whole or not at all, and RUN/tokenizer.json.

    Of several new runs that chose the same directory at once, one gets it.

    Raises:
        BadInput: it cannot be written there, or another run was faster.
    """
    new_config, new_tokenizer = (directory / f".{name}.new-{os.getpid()}" for name in (CONFIG, TOKENIZER))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        new_config.write_text(dump(config), encoding="utf-8")
        shutil.copyfile(tokenizer, new_tokenizer)
        if resume:
            os.replace(new_config, directory / CONFIG)
        else:
            os.link(new_config, directory / CONFIG)  # unlike a rename, refused where there is one
        os.replace(new_tokenizer, directory / TOKENIZER)
    except FileExistsError:
        raise _taken(directory) from None
    except OSError as error:
        raise BadInput(f"run.dir = {directory}: cannot write {CONFIG} there: {error.strerror}") from error
    finally:
        for leftover in (new_config, new_tokenizer):
            with suppress(OSError):
                leftover.unlink()


def _check_no_checkpoint(run: Run, resume: bool) -> None:
    """A checkpoint holds a config, too: taken for a run, it would be overwritten."""
    path = _given(run)
    if path is None or not os.path.isfile(path / checkpoint_directory.MANIFEST):
        return
    held_by = path.absolute().parent.parent
    if resume:
        raise BadInput(
            f"{path}: a checkpoint; resume its run, {held_by}, which goes on from the newest (move later ones away to "
            "go on from this one)"
        )
    raise BadInput(f"run.dir = {path}: a checkpoint; give another run.dir, or resume its run, {held_by}")


def _taken(path: Path) -> BadInput:
    return BadInput(
        f"run.dir = {path}: holds a run already; go on with it by `fivefold train {path} --resume`, "
        "or give another run.dir"
    )


def _given(run: Run) -> Path | None:
    return Path(os.path.expanduser(run.dir)) if run.dir else None


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def _check_place(path: Path) -> None:
    """Refuses a path at which no directory can be made: below a file, or where nothing may be written."""
    there = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not os.path.isdir(there):
        raise BadInput(f"run.dir = {path}: {there} is not a directory; give another run.dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"run.dir = {path}: {there} may not be written to; give another run.dir")


def _holds_run(path: Path) -> bool:
    return os.path.exists(path / CONFIG) or os.path.exists(path / CHECKPOINTS)
