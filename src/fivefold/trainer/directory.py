"""The run directory: chosen so that no earlier run is touched, and what every run puts there."""

import os
from itertools import count
from pathlib import Path

from fivefold.config.errors import BadInput
from fivefold.config.load import dump
from fivefold.config.tree import Config, Run

CONFIG, CHECKPOINTS, TOKENIZER, METRICS = "config.toml", "checkpoints", "tokenizer.json", "metrics.jsonl"


def choose_directory(run: Run, resume: bool) -> Path:
    """Where the run lives. Touches nothing.

    A directory that holds a run is only used to resume it. Where `run.dir` is not given, a new run takes
    runs/NAME, or the first of runs/NAME-2, runs/NAME-3, … that is free.

    Raises:
        BadInput: nothing to resume there, or a run is there already.
    """
    if resume:
        path = Path(run.dir or Path("runs") / run.name)
        if not (path / CONFIG).is_file():
            raise BadInput(f"{path}: no run to resume there (no {CONFIG})")
        return path
    if run.dir:
        path = Path(run.dir)
        if path.exists() and not path.is_dir():
            raise BadInput(f"run.dir = {path}: exists and is not a directory")
        if _holds_run(path):
            raise BadInput(
                f"run.dir = {path}: holds a run already; go on with it by `fivefold train {path} --resume`, "
                "or give another run.dir"
            )
        return path
    names = (run.name if number == 1 else f"{run.name}-{number}" for number in count(1))
    return next(path for path in (Path("runs") / name for name in names) if not _holds_run(path))


def write_config(directory: Path, config: Config) -> None:
    """RUN/config.toml, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f".{CONFIG}.new"
    new.write_text(dump(config), encoding="utf-8")
    os.replace(new, directory / CONFIG)


def _holds_run(path: Path) -> bool:
    return (path / CONFIG).exists() or (path / CHECKPOINTS).exists()
