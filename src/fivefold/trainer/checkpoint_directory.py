"""The directory of a run's checkpoints: what is visible there is complete, whenever a process died.

    RUN/checkpoints/
        step-20/               appears by one rename, after every rank's bytes are durable
        .step-30.partial-ID    a save under way, or one that died
        .step-20.replaced-ID   the old step-20 while a new one takes its place
        .step-10.deleted-ID    being deleted
        .lock                  held by rank 0 of the run that saves here

Assumes a POSIX file system shared by all ranks. An object store has no rename: there `commit` would upload
SHA256SUMS last, under the final name, and its presence would be the commit marker that `complete` looks for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import socket
import time
import uuid
from pathlib import Path

from fivefold.config.errors import RunFailed

MANIFEST, SUMS = "manifest.json", "SHA256SUMS"  # in every checkpoint
WITNESS = ".seen-by-all-"  # + ID: a file by which ranks find out whether they see the same directory
LOCK_SECONDS = 5.0  # how long a new run waits for the one before it, just killed, to let go of the directory

logger = logging.getLogger(__name__)


class CheckpointError(RunFailed):
    """A checkpoint could not be written, or is not what was asked for. One line, the same on every rank."""


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in `directory`, lowest step first."""
    steps = {}
    for path in directory.glob("step-*"):
        if re.fullmatch(r"step-\d+", path.name) and (path / SUMS).is_file():
            steps[step_of(path)] = path
    return [steps[step] for step in sorted(steps)]


def step_of(path: Path) -> int:
    """…/step-20 → 20."""
    return int(path.name.removeprefix("step-"))


def commit(partial: Path, final: Path) -> None:
    """Makes the complete directory `partial` visible as `final`, durably, by one rename."""
    sync(partial)  # the names of its files; their contents are synced already
    replaced = _hidden(final, "replaced")
    # A directory can only be renamed onto an empty one. Should this process die between the two renames,
    # `clean` brings the old checkpoint back.
    if final.exists():
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync(final.parent)
    if replaced.exists():
        delete(replaced)


def prune(newest: Path, keep_last: int, keep_every: int) -> None:
    """Deletes what need not be kept now that `newest` is complete: never `newest` itself.

    A run that went back to an earlier step leaves later checkpoints of the abandoned branch behind. They are
    set aside under another name: resuming must not find them, and nobody asked to delete them.
    """
    earlier = []
    for path in complete(newest.parent):
        if step_of(path) <= step_of(newest):
            earlier.append(path)
        else:
            aside = path.with_name(f"{path.name}.abandoned-{unique()}")
            logger.warning("%s is later than %s, just saved: set aside as %s", path, newest.name, aside.name)
            path.rename(aside)
    for path in earlier[:-keep_last]:
        if not (keep_every and step_of(path) % keep_every == 0):
            delete(path)


def delete(path: Path) -> None:
    """Deletes a checkpoint; at no moment is a half-deleted one visible."""
    doomed = _hidden(path, "deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def clean(directory: Path) -> None:
    """Removes what dead processes left behind. The caller holds the lock: nobody is saving here."""
    for path in directory.glob(".step-*"):
        name, _, why = path.name.removeprefix(".").partition(".")
        if why.startswith("replaced-") and not (directory / name).exists():
            path.rename(directory / name)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.glob(f"{WITNESS}*"):
        path.unlink(missing_ok=True)


def lock(directory: Path) -> int | None:
    """Locks the directory against other runs until the returned descriptor is closed or this process ends.

    A POSIX lock: it belongs to the process, not to forked children, ends with it, and is seen over NFS. None
    if the file system has no locks. Raises CheckpointError if another process keeps holding it.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            owner = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise CheckpointError(
                f"another run ({owner}) saves its checkpoints there; stop it, or set another run.dir"
            ) from None
        except OSError:
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return descriptor


def sync(directory: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unique() -> str:
    """A short name nobody else uses."""
    return uuid.uuid4().hex[:12]


def _hidden(path: Path, why: str) -> Path:
    """A fresh hidden name beside a checkpoint: step-20, or a hidden name of it → .step-20.WHY-ID."""
    name = path.name.removeprefix(".").partition(".")[0]
    return path.with_name(f".{name}.{why}-{unique()}")
