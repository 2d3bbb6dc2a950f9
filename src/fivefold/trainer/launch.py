"""Starting local ranks, and reporting their failure once, in one line; and `as_rank`, the context in which a rank runs.

Ranks are told their place as torchrun tells it. torch's elastic agent is not used: it starts each rank as a new Python,
and ends ranks that take longer than 30 seconds to save.
"""

import ctypes
import fcntl
import gc
import json
import os
import platform
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import connection, get_context
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from fivefold.config.errors import HAS_DIED, BadInput, RunFailed
from fivefold.trainer.place import RUN_ID, Place, threads_of_rank, usable_cores
from fivefold.trainer.stop import ECHO_SECONDS

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

MOST_RANKS_PER_CORE = 32
"""Learning how 64 ranks work on a laptop is fine; a thousand processes are a mistake."""
_UNLOCKED_SECONDS = 60.0
"""A directory older than this and not locked is left by a launcher that was killed."""
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 30.0
"""When a rank has failed, the others may take so long to end after they were asked to."""
RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# Messages of ranks that failed only because another rank is gone.
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    HAS_DIED,
)
SIGNAL_HINTS = {
    signal.SIGKILL: "usually the kernel, out of memory: see dmesg; a smaller micro-batch or recompute helps",
    signal.SIGBUS: "usually /dev/shm is full: see fivefold doctor",
    signal.SIGABRT: "a library gave up: its message is above",
    signal.SIGSEGV: "a crash in native code: set PYTHONFAULTHANDLER=1 to see where",
}


def start_local(
    arguments: Sequence[str],
    ranks: int,
    failure_file: Path | None = None,
    *,
    imports: Iterable[str] = (),
    saves: bool = True,
) -> int:
    """Starts `ranks` processes of this Python with `arguments` on this host and waits for them.

    If a rank fails, all are ended, and one line on stderr names the first failure. SIGINT, SIGTERM, SIGHUP and SIGUSR1
    ask the ranks to stop; they may take as long as they need to finish the step and save. A second signal, more than
    two seconds later, kills them.

    Args:
        arguments: what follows `python`: ["-m", "fivefold", "train", "run.toml"], or a file and its arguments.
        ranks: how many.
        failure_file: where the traceback of the rank that failed first is written.
        imports: modules that the ranks will import: where they are forks, this process does, once.
        saves: whether ranks that are asked to stop have something to save; else a signal just ends them.

    Returns:
        0 = all ranks succeeded, 1 = one failed or a signal stopped them, 2 = bad input.

    Raises:
        BadInput: more ranks than this machine should start, or can.
    """
    check_count(ranks)
    with (
        _logs() as logs,
        _rank_environment(os.environ, ranks),
        _Relay(saves) as relay,
        socket.create_server(("127.0.0.1", 0), backlog=max(128, ranks)) as listener,
    ):
        failures: dict[int, _Failure] = {}
        with suppress(KeyboardInterrupt):  # of the relay: no rank had started yet
            context = _context()
            if isinstance(context, ForkContext):
                for module in imports:
                    import_module(module)
            with _held_back(RELAYED):
                relay.ranks = _start(context, arguments, ranks, listener, Path(logs))
        if relay.ranks:
            store = _serve(listener)
            failures = _wait(relay.ranks, Path(logs))
            del store
        return _verdict(relay, failures, failure_file)


def check_count(ranks: int) -> None:
    """Refuses more local ranks than this machine should start."""
    most = MOST_RANKS_PER_CORE * usable_cores()
    if ranks > most:
        raise BadInput(
            f"{ranks} local ranks: more than {MOST_RANKS_PER_CORE} for each of this machine's cores; at most "
            f"{most} here, or start the ranks of several machines with torchrun or srun"
        )


@contextmanager
def _logs() -> Iterator[str]:
    """A temporary directory for what the agent writes, locked as long as this process lives. Those of launchers that
    were killed on this host, which no one has locked, are removed.
    """
    prefix = f"fivefold-ranks-{platform.node()}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _UNLOCKED_SECONDS:
                with _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as made, ExitStack() as held:
        with suppress(OSError):  # a file system without locks: there no one else removes it either
            held.enter_context(_locked(Path(made), fcntl.LOCK_EX))
        yield made


@contextmanager
def _locked(directory: Path, operation: int) -> Iterator[None]:
    """Holds the directory's lock.

    Raises:
        OSError: another process has it, or it is no directory.
    """
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, operation)
        yield
    finally:
        os.close(opened)


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a rank ended: its exit code, or minus the number of the signal, and what it recorded, if anything."""

    exit_code: int
    message: str = ""
    trace: str = ""

    @property
    def is_secondary(self) -> bool:
        """Whether it ended because another one failed, or by a SIGTERM before its signal handler was installed."""
        told_to_end = self.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return told_to_end or _is_consequence(self.message)


def _context() -> ForkContext | SpawnContext:
    """How ranks start: as forks of this process, where no library of an accelerator may have made something that a fork
    cannot use; else each as a new Python.

    With forks torch is imported once. And they have everything at the same addresses, so a core that several of them
    share predicts the branches of one as it learned them from another: collectives of 64 KiB between four ranks on two
    cores take two thirds of the time.
    """
    import torch

    forks = sys.platform == "linux" and torch.accelerator.current_accelerator() is None
    return get_context("fork") if forks else get_context("spawn")


def _start(
    context: ForkContext | SpawnContext,
    arguments: Sequence[str],
    ranks: int,
    listener: socket.socket,
    logs: Path,
) -> list[BaseProcess]:
    """Starts the ranks, which are to find their store where `listener` listens.

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
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_ERROR_FILE": str(_error_file(logs, rank)),
            }
            process = context.Process(target=_be, args=(arguments, os.environ | place, inherited))
            process.start()
            processes.append(process)
    except OSError as error:
        _signal(processes, signal.SIGKILL)
        raise BadInput(f"{ranks} local ranks: cannot start rank {len(processes)}: {error.strerror}") from None
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
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def _set_threads(text: str) -> None:
    """As libraries do that find it in OMP_NUM_THREADS when they are loaded."""
    import torch

    if text.isdigit() and int(text) > 0:
        torch.set_num_threads(int(text))


def _serve(listener: socket.socket) -> "TCPStore":
    """The store of the ranks, as long as it is held. Begun after the ranks were forked, since it has a thread."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _wait(processes: Sequence[BaseProcess], logs: Path) -> dict[int, _Failure]:
    """Waits for the ranks to end, and ends all when one fails; the failures by rank, in the order they came."""
    failures: dict[int, _Failure] = {}
    running = dict(enumerate(processes))
    deadline = float("inf")
    while running:
        connection.wait([process.sentinel for process in running.values()], _LOOK_SECONDS)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                if process.exitcode != 0:
                    failures[rank] = _failure(process.exitcode, _error_file(logs, rank))
        if failures and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE_SECONDS
            _signal(running.values(), signal.SIGTERM)
        if time.monotonic() > deadline:
            _signal(running.values(), signal.SIGKILL)
    return failures


def _failure(exit_code: int, error_file: Path) -> _Failure:
    try:
        recorded = json.loads(error_file.read_text())["message"]
    except (OSError, ValueError):
        return _Failure(exit_code)
    return _Failure(exit_code, " ".join(recorded["message"].split()), recorded["extraInfo"]["py_callstack"])


def _error_file(logs: Path, rank: int) -> Path:
    return logs / f"{rank}.json"


def _signal(processes: Iterable[BaseProcess], number: signal.Signals) -> None:
    """Sends a signal to ranks and what they have started."""
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            for send in (os.killpg, os.kill):  # a rank that has only begun has no group of its own
                with suppress(ProcessLookupError):
                    send(process.pid, number)


def _verdict(relay: "_Relay", failures: Mapping[int, _Failure], failure_file: Path | None) -> int:
    """Reports how the ranks ended, unless they succeeded; returns the exit code."""
    if relay.killed:
        _say("killed; what was not saved yet is lost" if relay.saves else "killed")
        return 1
    if relay.name and not failures:
        _say(f"stopped by {relay.name}")
        return 1
    if relay.name and next(iter(failures.values())).is_secondary:
        _say(f"stopped by {relay.name}{' before the ranks could save' if relay.saves else ''}")
        return 1
    return _report(failures, failure_file) if failures else 0


@contextmanager
def _held_back(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """These signals arrive only when the block has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


class _Relay:
    """Context manager that forwards a signal to the ranks as SIGTERM (a request to stop), and a second one as
    SIGKILL."""

    def __init__(self, saves: bool) -> None:
        self.saves = saves
        self.ranks: Sequence[BaseProcess] = ()
        self.name = ""  # of the first signal
        self.killed = False
        self._first_at = 0.0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._pass_on) for number in RELAYED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.name and now - self._first_at < ECHO_SECONDS:
            return
        self.killed = bool(self.name)
        if not self.name:
            self.name, self._first_at = signal.Signals(number).name, now
        if not self.ranks:
            raise KeyboardInterrupt
        if self.killed:
            _signal(self.ranks, signal.SIGKILL)
            return
        if self.saves:
            _say(f"{self.name}: the ranks finish their step and save; a second one kills them")
        for process in self.ranks:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGTERM)  # not its children: a rank may need them to save


@contextmanager
def as_rank(place: Place | None, *, debug: bool = False) -> Iterator[None]:
    """Context for everything a rank does: it uses its share of the cores, ends with its launcher, and reports its own
    failure once.

    An exception ends the process with exit code 2 for BadInput, else 1. For an elastic launcher it is recorded in the
    error file, so that the launcher prints it once (for bad input its line, with `debug` its traceback); under srun and
    mpirun the rank prints one line. Without a launcher nothing is caught.
    """
    if place is None:
        yield
        return
    _follow_launcher(place)
    _share_cores(place)
    try:
        yield
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # CheckpointException, for example, is not an Exception
        _record(place, error, debug)
        sys.stdout.flush()
        sys.stderr.flush()
        # A regular exit would take process groups down while collectives are in flight, which aborts or hangs.
        os._exit(2 if isinstance(error, BadInput) else 1)


def _follow_launcher(place: Place) -> None:
    """Asks Linux to send SIGTERM when the launcher dies: otherwise its ranks would go on training unattended. A
    launcher that died while this rank was starting is noticed by its process id."""
    if place.launcher in ("fivefold", "torchrun", "accelerate") and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if place.launcher_process and place.launcher_process != os.getppid():
            _say(f"rank {place.rank}: its launcher (process {place.launcher_process}) has ended")
            os._exit(1)


def _share_cores(place: Place) -> None:
    """Limits threads under srun and mpirun, where each rank has one per core: on two cores three times slower."""
    threads = threads_of_rank(os.environ, place)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _record(place: Place, error: BaseException, debug: bool) -> None:
    """The error file that torch's elastic agent reads; see its ErrorHandler for the format."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    message = _told(error)
    # What torchrun prints last of all it prints: where in our code an input was refused is of no use there.
    trace = message if isinstance(error, BadInput) and not debug else traceback.format_exc()
    # torchrun names the earliest as the cause, in whole seconds: what followed from it shall not look as early.
    extra = {"py_callstack": trace, "timestamp": str(int(time.time()) + _is_consequence(message))}
    with suppress(OSError):  # the disk is full, perhaps, or the launcher killed and its directory gone
        if path is not None:
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
            return
    if not _is_consequence(message) or HAS_DIED in message:  # a killed rank says nothing itself
        _say(f"rank {place.rank}: {' '.join(message.split())}")


def _told(error: BaseException) -> str:
    """An error as a line, with what was noted about it on the way: the step, say."""
    if isinstance(error, BadInput | RunFailed):
        return str(error)
    return ", ".join(
        [f"{type(error).__name__}: {error}".removesuffix(": "), *getattr(error, "__notes__", ())]
    )


def _report(failures: Mapping[int, _Failure], failure_file: Path | None) -> int:
    """One line about the rank that failed first, and its traceback in a file."""
    # In the order in which the ranks were seen to end, which need not be that of cause and consequence: these are
    # recognised by their messages.
    rank, failure = min(failures.items(), key=lambda item: item[1].is_secondary)
    if failure.message and failure.exit_code == 2:
        _say(failure.message)
        return 2
    if failure.message:
        where = ""
        if failure_file is not None:
            with suppress(OSError):  # perhaps a full disk is what the rank failed of
                failure_file.parent.mkdir(parents=True, exist_ok=True)
                failure_file.write_text(failure.trace)
                where = f" (traceback: {failure_file})"
        _say(f"rank {rank} failed: {failure.message}{where}")
    elif failure.exit_code < 0:
        number = signal.Signals(-failure.exit_code)
        _say(f"rank {rank} was killed by {number.name}: {SIGNAL_HINTS.get(number, 'not by fivefold')}")
    else:
        _say(
            f"rank {rank} ended with exit code {failure.exit_code} and recorded no reason; see its output above"
        )
    return 1


def _is_consequence(message: str) -> bool:
    return any(sign in message for sign in CONSEQUENCES)


def _say(line: str) -> None:
    print(f"fivefold: {line}", file=sys.stderr, flush=True)


@contextmanager
def _rank_environment(environment: MutableMapping[str, str], ranks: int) -> Iterator[None]:
    """Environment variables for ranks on one host, unless the user has set them."""
    before = dict(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    # Else gloo looks up the host's name, which fails in many containers.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    try:
        yield
    finally:
        environment.clear()
        environment.update(before)
