"""Ranks: real processes with real process groups, on one machine, that call functions together.

    def sums(rank: int, world_size: int, scale: float) -> float:  # a module-level function
        tensor = torch.full((3,), scale * (rank + 1))
        dist.all_reduce(tensor)
        return tensor[0].item()

    assert run_ranks(sums, 2, 10.0) == [30.0, 30.0]

The first ranks of a process take one to two seconds to start (torch is imported; on Linux once for all ranks, elsewhere
by each); a run on started ranks costs 20 ms more than the function itself. So a file with many small checks starts them
once:

    @pytest.fixture(scope="module")
    def pair() -> Iterator[Ranks]:
        with Ranks(2) as ranks:
            yield ranks

    def test_sums(pair: Ranks) -> None:
        assert pair.run(sums, 10.0) == [30.0, 30.0]

Every run gets a fresh default group, destroyed afterwards. The rendezvous store lives in the parent, so no
port is guessed and no rank can take it away. Each rank has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT in its environment.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

GRACE_SECONDS = 2.0  # how long the other ranks may still report after one has failed
END_SECONDS = 60.0  # a process that is done takes half a second to end, and some tens on a crowded machine


class RankError(AssertionError):
    """A rank raised, died or did not finish. The message: every rank's traceback, the first failure first."""


class Ranks:
    """`world_size` processes that run functions together; a context manager, usable as a pytest fixture.

    `backend` names the default group made before each run; None makes none: the function then calls
    `dist.init_process_group(...)` itself (the environment is ready for `env://`).
    """

    def __init__(self, world_size: int, *, backend: str | None = "gloo") -> None:
        self.world_size = world_size
        self._store: TCPStore | None = None  # of the current run
        self._died: frozenset[int] = frozenset()
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []  # SpawnProcess
        context = _context()
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, backend, dict(os.environ)), daemon=True
            )
            process.start()
            theirs.close()  # so that the death of the child reads as end of file here
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:  # Ctrl-C, say: nobody waits for what ranks still compute
            self._kill()

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 60.0,
        patience: float | None = None,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """Calls `fn(rank, world_size, *args)` on every rank and returns the results in rank order.

        `fn` is a module-level function; arguments and results are pickled (tensors too). With a `world_size`
        below that of the object only so many take part. `timeout` is seconds for the whole run, `patience` those
        that the last rank may take longer than the first. Ranks in
        `dies` are meant to die on the way: their result is None. After a failure, or with `dies`, the
        processes are gone and this object cannot run again. Raises RankError.
        """
        if not self._processes:
            raise RankError("these ranks have ended (an earlier run failed or killed one); start new ones")
        # A store per run: on a used one a rank would find the addresses of the run before.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world_size = world_size or self.world_size
        call = pickle.dumps((self._store.port, world_size, fn, args, timeout))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(call)
        self._died = frozenset(dies)
        results, failures = self._collect(world_size, timeout, patience)
        if failures:
            self._kill()
            raise RankError("\n".join(failures))
        for rank in results:  # all have finished: now each may take its group down without hurting another
            self._pipes[rank].send_bytes(b"end of run")
        if dies:
            self.close()
        return [results.get(rank) for rank in range(world_size)]

    def close(self) -> None:
        """Ends the processes; raises RankError if one does not end by itself with exit code 0."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        expected = self._died
        self._kill()
        bad = {rank: code for rank, code in enumerate(codes) if code != 0 and rank not in expected}
        if bad:
            raise RankError(f"ranks ended badly (exit codes by rank, None = had to be killed): {bad}")

    def _collect(
        self, world_size: int, timeout: float, patience: float | None
    ) -> tuple[dict[int, Any], list[str]]:
        """Waits for every rank's answer: results by rank, and the failures in the order they came."""
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                when = f"after {timeout:g} s"
                if failures:
                    when = f"{GRACE_SECONDS:g} s after that failure"
                elif results and patience is not None:
                    when = (
                        f"{patience:g} s after ranks {sorted(results)} had, or {timeout:g} s in all: they are slower, "
                        "or wait for a collective that those did not enter"
                    )
                failures.append(self._still_running(sorted(waiting.values()), when))
                break
            for pipe in ready:
                assert isinstance(pipe, connection.Connection)
                rank = waiting.pop(pipe)
                failure = self._receive(pipe, rank, results)
                if failure:
                    failures.append(failure)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                elif patience is not None:
                    deadline = min(deadline, time.monotonic() + patience)
        return results, failures

    def _receive(self, pipe: connection.Connection, rank: int, results: dict[int, Any]) -> str | None:
        """Reads one rank's answer into `results`; returns what went wrong, if anything did."""
        try:
            good, answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            if rank in self._died:
                return None
            self._processes[rank].join(5.0)
            return f"rank {rank} died with exit code {self._processes[rank].exitcode}"
        if not good:
            return f"rank {rank} raised\n{answer}"
        results[rank] = answer
        return None

    def _still_running(self, ranks: list[int], when: str) -> str:
        """Asks the ranks for their stacks (on their stderr, which pytest shows) and says who they are."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)  # let them write
        return f"ranks {ranks} had not finished {when}; their stacks are on stderr"

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 60.0,
    patience: float | None = None,
    dies: Collection[int] = (),
) -> list[Any]:
    """Starts `world_size` ranks, runs `fn(rank, world_size, *args)` on each, ends them; results by rank.

    See `Ranks` for `backend`, `Ranks.run` for `timeout`, `patience` and `dies`. Raises RankError, also when a process
    does not end with exit code 0.
    """
    ranks = Ranks(world_size, backend=backend)
    try:
        results = ranks.run(fn, *args, timeout=timeout, patience=patience, dies=dies)
    except BaseException:
        ranks._kill()
        raise
    ranks.close()
    return results


def _context() -> SpawnContext | ForkServerContext:
    """How ranks start: on Linux as forks of a process that has imported torch and does nothing else."""
    if sys.platform != "linux":
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _serve(pipe: connection.Connection, rank: int, backend: str | None, environment: dict[str, str]) -> None:
    """The life of one rank: calls come in over the pipe until it closes. `environment` is the parent's now."""
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Ctrl-C is the parent's to report; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the parent's: rank 0 shall not open one
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no look-up of the host's name
    while True:
        try:
            port, world_size, fn, args, timeout = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        try:
            if backend is not None:
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
            answer = pickle.dumps((True, fn(rank, world_size, *args)))
        except BaseException:  # CheckpointException, for one, is no Exception
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
            pipe.recv_bytes()  # until every rank has finished
        except (EOFError, OSError):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
