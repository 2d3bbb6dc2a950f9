"""How the processes of local ranks begin, are sent signals, and find the store that their launcher serves.

A rank is a fork of its launcher where that can be, else a new Python.
"""

import atexit
import gc
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.config.errors import BadInput
from fivefold.trainer.place import RUN_ID

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals that a launcher passes on to its ranks."""


def rank_context(imports: Iterable[str]) -> ForkContext | SpawnContext:
    """How ranks start: as forks of this process, where no library of an accelerator may have made something that a fork
    cannot use, and no thread would be missing in it; else each as a new Python.

    With forks torch is imported once. And they have everything at the same addresses, so a core that several of them
    share predicts the branches of one as it learned them from another: collectives of 64 KiB between four ranks on two
    cores take two thirds of the time.

    Args:
        imports: modules that forks will need, which this process imports for them.
    """
    import torch

    if sys.platform == "linux" and torch.accelerator.current_accelerator() is None:
        for module in imports:
            import_module(module)
        if _has_one_thread():
            return get_context("fork")
    return get_context("spawn")


def _has_one_thread() -> bool:
    """Whether a fork of this process would miss no thread. It would wait for a missing one forever: GNU OpenMP's, for
    example, if torch has computed here. OpenBLAS's may be missing: it ends them when its process is forked, as here.
    """
    try:
        child = os.fork()
    except OSError:  # no more processes are allowed: who starts the ranks tells
        return True
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # no /proc
        return False


def start_ranks(
    context: ForkContext | SpawnContext,
    arguments: Sequence[str],
    ranks: int,
    listener: socket.socket,
    logs: Path,
) -> list[BaseProcess]:
    """Starts the ranks, which are to find their store where `listener` listens. If one cannot be started, none is left.

    Raises:
        BadInput: the system allows no more processes.
    """
    forks = isinstance(context, ForkContext)
    gc.freeze()  # what is there now is not to be written to, and so copied, when a rank collects its garbage
    inherited = listener if forks else None
    processes: list[BaseProcess] = []
    try:
        for rank in range(ranks):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(listener.getsockname()[1]),
                "TORCHELASTIC_RUN_ID": f"{RUN_ID}-{os.getpid()}",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_ERROR_FILE": str(error_file(logs, rank)),
            }
            process = context.Process(target=_be, args=(arguments, os.environ | place, inherited))
            process.start()
            processes.append(process)
    except BaseException as error:
        end(processes)
        if isinstance(error, OSError):
            raise BadInput(
                f"{ranks} local ranks: cannot start rank {len(processes)}: {error.strerror}"
            ) from None
        raise
    finally:
        gc.unfreeze()
    return processes


def _be(arguments: Sequence[str], environment: Mapping[str, str], inherited: socket.socket | None) -> None:
    """The life of one rank, in its own process: what `python` with these arguments does."""
    os.setsid()
    for number in RELAYED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RELAYED)
    os.environ.clear()
    os.environ.update(environment)
    if inherited is not None:
        inherited.close()  # else someone would seem to listen when the launcher is gone
        _set_threads(os.environ["OMP_NUM_THREADS"])
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        if inherited is not None:
            atexit._run_exitfuncs()  # the end of a fork by multiprocessing runs none before Python 3.13


def _set_threads(text: str) -> None:
    """As libraries do that find it in OMP_NUM_THREADS when they are loaded."""
    import torch

    if text.isdigit() and int(text) > 0:
        torch.set_num_threads(int(text))


def serve(listener: socket.socket) -> "TCPStore":
    """The store of the ranks, as long as it is held. Begun after the ranks were forked, since it has a thread.

    Raises:
        BadInput: the system allows no more threads.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    try:
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except RuntimeError as error:
        raise BadInput(f"local ranks: cannot serve the store by which they meet: {error}") from None


def error_file(logs: Path, rank: int) -> Path:
    """Where a rank records why it failed."""
    return logs / f"{rank}.json"


def send(processes: Iterable[BaseProcess], number: signal.Signals) -> None:
    """Sends a signal to ranks and what they have started."""
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            for to in (os.killpg, os.kill):  # a rank that has only begun has no group of its own
                with suppress(ProcessLookupError):
                    to(process.pid, number)


def end(processes: Sequence[BaseProcess]) -> None:
    """Kills ranks and what they have started, and waits until they are gone."""
    send(processes, signal.SIGKILL)
    for process in processes:
        process.join()


def end_children(process: BaseProcess) -> None:
    """Kills what a rank that is gone has started and left behind."""
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the id of a group that has members is not given anew


@contextmanager
def held_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """These signals arrive only when the block has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
