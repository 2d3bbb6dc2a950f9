"""Checkpoints of a run: saved while training goes on, complete or invisible, loaded into any layout.

Built on torch.distributed.checkpoint, which writes each rank's shards and reshards on loading. Added here: an
atomic commit, checksums, a check before any tensor is written to that nothing is damaged, missing, unexpected or of
another shape, and errors that are the same on every rank. The files: storage.py; the directory:
checkpoint_directory.py.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import shutil
import socket
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader

from fivefold.config.tree import Checkpoint
from fivefold.parallel.local import Piece
from fivefold.trainer import checkpoint_directory
from fivefold.trainer.checkpoint_directory import CheckpointError
from fivefold.trainer.snapshot import HostMemory, LoadPlanner, SavePlanner, local
from fivefold.trainer.storage import CheckpointWriter, Stored

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads the checkpoints in one directory. One per run; every rank of the default group has one.

    All methods but `poll` are collective, and so is construction: every rank calls them, in the same order.
    They use a gloo group of their own, so a save in the background never meets training's collectives.
    Without an initialised default group, one process works alone.
    """

    def __init__(
        self, directory: Path, options: Checkpoint, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        """Checks that all ranks see the same `directory` (made if missing), and cleans up after dead saves.

        `timeout` is how long ranks wait for each other, so for the slowest writer: it is far longer than any
        save. A rank that dies is noticed at once. Raises CheckpointError.
        """
        self._directory = directory
        self._options = options
        self._group: dist.ProcessGroup | None = None
        self._rank, self._world_size = 0, 1
        if dist.is_initialized():
            self._group = dist.new_group(timeout=timeout, backend="gloo", group_desc="checkpoint")
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._lock: int | None = None
        self._session = self._meet()
        self._saves = 0
        self._memory = HostMemory()
        self._pending: concurrent.futures.Future[None] | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor | Piece],
        counters: dict[str, Any],
        config_text: str,
        *,
        asynchronous: bool,
    ) -> None:
        """Saves `state` as step-`step`. Replaces a checkpoint of the same step.

        `state` maps global names to pieces, DTensors or plain tensors. Plain ones are replicas: ranks that hold
        the same name hold the same value (pipeline stages hold different names). `counters` is small and
        JSON-able. Asynchronous: returns once the tensors are copied, and `wait` tells how it went; otherwise
        returns when the checkpoint is durable and visible. Waits for an earlier save first and raises its
        CheckpointError: then nothing new has been started, and this save may be tried again.
        """
        self.wait()
        self._saves += 1
        final = self._directory / f"step-{step}"
        # Ranks agree on this name without talking: session and count are the same everywhere.
        partial = self._directory / f".step-{step}.partial-{self._session}-{self._saves}"
        planner = SavePlanner()
        try:
            planner.locals = {name: local(tensor) for name, tensor in state.items()}
            if asynchronous:
                planner.locals = self._memory.copy(planner.locals)
        except (RuntimeError, MemoryError) as error:  # e.g. no memory left: the others must hear of it
            planner.error = error
        writer = CheckpointWriter(partial, final, step, counters, config_text)
        self._pending = _in_background(self._write, dict(state), writer, planner, partial, final)
        if not asynchronous:
            self.wait()

    def poll(self) -> bool:
        """Whether no save is under way on this rank. Local, cheap, never raises.

        Ranks see the end of a save at different moments. To act on it, agree first (let the answer ride on a
        collective the step makes anyway), then call `wait` on all ranks.
        """
        return self._pending is None or self._pending.done()

    def wait(self) -> None:
        """Waits for the save under way, if any; raises CheckpointError, alike on every rank, if it failed.

        After a failed save the earlier checkpoints are as they were, and training may go on and save again.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks; waits for a save under way."""
        self._settle()
        return self._broadcast(next(reversed(checkpoint_directory.complete(self._directory)), None))

    def load(
        self,
        path: Path,
        state: Mapping[str, Tensor | Piece],
        accept: Callable[[dict[str, Any]], None] = lambda counters: None,
        leave: Callable[[list[str]], Collection[str]] = lambda unasked: (),
    ) -> dict[str, Any]:
        """Fills the tensors of `state` in place from the checkpoint `path`; returns the counters saved there.

        Any layout may load what any layout saved. First every file's checksum is verified (each rank takes a
        part), then names, shapes and dtypes are compared: anything damaged, missing, unasked for or different
        raises CheckpointError on every rank, and no tensor has been touched. Neither has one when `accept`, which
        sees the counters first, raises. `leave` sees the stored names that no rank asks for, and says which of them
        may stay where they are.
        """
        self._settle()
        problems: list[str] = []
        stored = None
        try:
            stored = Stored.read(path)
            problems = stored.damage(stored.share(self._rank, self._world_size))
        except CheckpointError as error:
            problems = [str(error)]
        if problems:
            problems[-1] += f"; move {path} away to go on from the checkpoint before it"
        self._agree(problems, stored.fingerprint if stored else "")
        assert stored is not None  # else some rank, this one, had a problem
        accept(stored.counters)
        unasked = self._unasked(stored, state)
        left = leave(unasked)
        self._agree(stored.differences(state, [name for name in unasked if name not in left]))
        try:
            with self._quietly():
                state_dict_loader.load(
                    dict(state),
                    storage_reader=FileSystemReader(path),
                    process_group=self._group,
                    planner=LoadPlanner(),
                )
        except CheckpointException as error:
            raise CheckpointError(f"{path} could not be loaded: {_causes(error)}") from None
        return stored.counters

    def shapes(self, path: Path) -> Mapping[str, tuple[Sequence[int], torch.dtype]]:
        """Shapes and types of the tensors that a checkpoint holds; empty where `load` will say what is wrong."""
        try:
            return Stored.read(path).tensors
        except CheckpointError:
            return {}

    def close(self) -> None:
        """Ends the last save, lets the ranks meet, frees group and lock. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                # Without a barrier a rank may take its end of a connection down while another still reads.
                dist.barrier(self._group)
                dist.destroy_process_group(self._group)
                self._group = None
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _meet(self) -> str:
        """Rank 0 opens the directory and leaves a file there that the others must see; returns its ID."""
        session, error = self._broadcast(self._open() if self._rank == 0 else ("", ""))
        witness = self._directory / f"{checkpoint_directory.WITNESS}{session}"
        seen = self._gather((os.path.exists(witness), socket.gethostname()))
        if self._rank == 0:
            with contextlib.suppress(OSError):
                witness.unlink()
        blind = [f"{rank} ({host})" for rank, (sees, host) in enumerate(seen) if not sees]
        if blind and not error:
            error = (
                f"checkpoints need one directory that all ranks share: what rank 0 writes to "
                f"{self._directory} is not seen by ranks {', '.join(blind)}; set run.dir to a shared one"
            )
        if error:
            raise CheckpointError(error)
        return session

    def _open(self) -> tuple[str, str]:
        """Makes, locks and cleans the directory: the ID of the file left there, and what went wrong."""
        session = checkpoint_directory.unique()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = checkpoint_directory.lock(self._directory)
            if self._lock is not None:  # else another run might be saving there: better litter than loss
                checkpoint_directory.clean(self._directory)
            (self._directory / f"{checkpoint_directory.WITNESS}{session}").touch()
        except (OSError, CheckpointError) as error:
            return session, f"cannot keep checkpoints in {self._directory}: {error}"
        return session, ""

    def _broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        said = [value]
        if self._group is not None:
            dist.broadcast_object_list(said, src=0, group=self._group)
        return said[0]

    def _gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        said = [value] * self._world_size
        if self._group is not None:
            dist.all_gather_object(said, value, self._group)
        return said

    def _quietly(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._group else _single_process_is_fine()

    def _settle(self) -> None:
        """Waits until the thread leaves the group alone; the save's outcome stays to be told by `wait`."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])

    def _agree(self, problems: list[str], fingerprint: str = "") -> None:
        """Raises the same CheckpointError on every rank if any rank has a problem."""
        said = self._gather((problems, fingerprint))
        everything = list(dict.fromkeys(line for lines, _ in said for line in lines))
        if not everything and len({seen for _, seen in said}) > 1:
            everything = ["ranks read different checkpoints under the same name: is the directory shared?"]
        if everything:
            shown = everything[:3] + ([f"and {len(everything) - 3} more"] if len(everything) > 3 else [])
            raise CheckpointError("; ".join(shown))

    def _write(
        self,
        state: Mapping[str, Tensor | Piece],
        writer: CheckpointWriter,
        planner: SavePlanner,
        partial: Path,
        final: Path,
    ) -> None:
        """The save itself, in the background thread; rank 0 then prunes."""
        try:
            with self._quietly():
                state_dict_saver.save(
                    state, storage_writer=writer, planner=planner, process_group=self._group
                )
        except CheckpointException as error:
            # torch raises this after hearing from all ranks, so nobody writes there any more.
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"{final} was not saved: {_causes(error)}") from None
        except Exception as error:  # a rank is gone; what it left is cleaned up at the next start
            raise CheckpointError(f"{final} was not saved: {_line(error)}") from error
        if self._rank == 0:
            try:
                checkpoint_directory.prune(final, self._options.keep_last, self._options.keep_every)
            except OSError as error:
                logger.warning("an old checkpoint could not be removed: %s", error)

    def _unasked(self, stored: Stored, state: Mapping[str, Tensor | Piece]) -> list[str]:
        """The stored names that no rank asks for (each pipeline stage asks for others)."""
        names = sorted(stored.tensors)
        asked = torch.tensor([name in state for name in names], dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group)
        return [name for name, is_asked in zip(names, asked.tolist(), strict=True) if not is_asked]


def load_tensors(path: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """The full tensors whose names start with `prefix`, names unchanged, in host memory.

    For one process, with or without torch.distributed. Checksums are verified. Raises CheckpointError.
    """
    stored = Stored.read(path)
    problems = stored.damage(stored.sizes)
    if problems:
        raise CheckpointError("; ".join(problems))
    tensors = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in stored.tensors.items()
        if name.startswith(prefix)
    }
    with _single_process_is_fine():
        state_dict_loader.load(
            tensors,
            storage_reader=FileSystemReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    return tensors


def _in_background(call: Callable[..., None], *arguments: object) -> concurrent.futures.Future[None]:
    """Runs a call in a daemon thread: one that is not waited for when the process ends.

    A rank that fails must end, so that the others notice; joining a thread that waits for the others, as an
    executor does, would keep it alive until their timeout.
    """
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            call(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _single_process_is_fine() -> warnings.catch_warnings[None]:
    """torch warns when it saves or loads in one process; that is what was meant."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _causes(error: CheckpointException) -> str:
    """The failures of a CheckpointException in one line; ranks with the same failure are named together."""
    ranks = defaultdict(list)
    for rank, (cause, _) in sorted(error.failures.items()):
        ranks[_line(cause)].append(str(rank))
    return "; ".join(f"rank {', '.join(who)}: {what}" for what, who in ranks.items())


def _line(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {text}"
