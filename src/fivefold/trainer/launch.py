"""Starting local ranks, and reporting their failure once, in one line; and `as_rank`, the context in which a rank runs.

Ranks are told their place as torchrun tells it. torch's elastic agent is not used: it starts each rank as a new Python,
and ends ranks that take longer than 30 seconds to save.
"""

import ctypes
import fcntl
import json
import os
import platform
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
from itertools import takewhile
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Self

from fivefold.config.errors import HAS_DIED, BadInput, RunFailed
from fivefold.trainer.place import Place, threads_of_rank, usable_cores
from fivefold.trainer.rank_processes import (
    RELAYED,
    end,
    end_children,
    error_file,
    held_back,
    rank_context,
    send,
    serve,
    start_ranks,
)
from fivefold.trainer.stop import ECHO_SECONDS, heeded

MOST_RANKS_PER_CORE = 32
"""Learning how 64 ranks work on a laptop is fine; a thousand processes are a mistake."""
_UNLOCKED_SECONDS = 60.0
"""A directory older than this and not locked is left by a launcher that was killed."""
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 30.0
"""When a rank has failed, the others may take so long to end after they were asked to. And when one has ended well and
others go on for longer, a line says so."""
_NAMED = 8  # ranks in a line
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
        _Relay(saves, logs) as relay,
        socket.create_server(("127.0.0.1", 0), backlog=max(128, ranks)) as listener,
    ):
        try:
            context = rank_context(imports)
            with held_back(RELAYED):
                relay.ranks = start_ranks(context, arguments, ranks, listener, logs)
            store = serve(listener)
            ends = _wait(relay.ranks, logs)
            del store
        finally:
            end(relay.ranks)
        return _verdict(relay, ends, failure_file)


def check_count(ranks: int) -> None:
    """Refuses more local ranks than this machine should start."""
    most = MOST_RANKS_PER_CORE * usable_cores()
    if ranks > most:
        raise BadInput(
            f"{ranks} local ranks: more than {MOST_RANKS_PER_CORE} for each of this machine's cores; at most "
            f"{most} here, or start the ranks of several machines with torchrun or srun"
        )


@contextmanager
def _logs() -> Iterator[Path]:
    """A temporary directory for what ranks that fail write, locked as long as this process or a rank lives. Those of
    launchers that were killed on this host, which no one has locked, are removed.

    Raises:
        BadInput: there is no place for it.
    """
    prefix = f"fivefold-ranks-{platform.node()}-"
    try:
        directory = Path(tempfile.gettempdir())
        # No TemporaryDirectory: a rank that ends, being a fork, would remove it.
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
    except OSError as error:
        raise BadInput(
            f"no temporary directory for what ranks report: {error.strerror}; set TMPDIR to a place that can be "
            "written"
        ) from None
    for left in directory.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _UNLOCKED_SECONDS:
                with _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as held:
        held.callback(shutil.rmtree, made, ignore_errors=True)
        with suppress(OSError):  # a file system without locks: there no one else removes it either
            held.enter_context(_locked(made, fcntl.LOCK_EX))
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
class _End:
    """How a rank ended: its exit code, or minus the number of the signal, and what it recorded, if anything."""

    exit_code: int
    message: str = ""
    trace: str = ""

    @property
    def is_secondary(self) -> bool:
        """Whether it ended because another one failed, or by a SIGTERM before its signal handler was installed."""
        told_to_end = self.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return told_to_end or _is_consequence(self.message)


def _wait(processes: Sequence[BaseProcess], logs: Path) -> dict[int, _End]:
    """Waits for the ranks to end, and ends all when one fails; how they ended by rank, in the order they did."""
    ends: dict[int, _End] = {}
    running = dict(enumerate(processes))
    deadline = remind_at = float("inf")
    while running:
        connection.wait([process.sentinel for process in running.values()], _LOOK_SECONDS)
        now = time.monotonic()
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                ends[rank] = _end(process.exitcode, error_file(logs, rank))
                remind_at = min(remind_at, now + _GRACE_SECONDS)
                if process.exitcode != 0:
                    end_children(process)
                    if deadline == float("inf"):
                        deadline = now + _GRACE_SECONDS
                        send(running.values(), signal.SIGTERM)
        if now > deadline:
            send(running.values(), signal.SIGKILL)
        elif now > remind_at and deadline == float("inf") and running:
            remind_at = float("inf")
            _say(f"{_names(ends)} ended with exit code 0, and {_names(running)} has not; Ctrl-C ends it")
    return ends


def _names(ranks: Iterable[int]) -> str:
    """ "rank 0, 2"; of many the first."""
    listed = sorted(ranks)
    return f"rank {', '.join(map(str, listed[:_NAMED]))}{', …' * (len(listed) > _NAMED)}"


def _end(exit_code: int, recorded_in: Path) -> _End:
    try:
        recorded = json.loads(recorded_in.read_text())["message"]
    except (OSError, ValueError):
        return _End(exit_code)
    return _End(exit_code, " ".join(recorded["message"].split()), recorded["extraInfo"]["py_callstack"])


def _verdict(relay: "_Relay", ends: Mapping[int, _End], failure_file: Path | None) -> int:
    """Reports how the ranks ended, unless they succeeded; returns the exit code."""
    failures = {rank: found for rank, found in ends.items() if found.exit_code != 0}
    if relay.killed:
        _say("killed; what was not saved yet is lost" if relay.saves else "killed")
        return 1
    if relay.name and not failures:
        _say(f"stopped by {relay.name}")
        return 1
    if relay.name and next(iter(failures.values())).is_secondary:
        _say(f"stopped by {relay.name}{' before the ranks could save' if relay.saves else ''}")
        return 1
    return _report(failures, _early(ends), failure_file) if failures else 0


class _Relay:
    """Context manager that forwards a signal to the ranks as SIGTERM (a request to stop), and a second one as
    SIGKILL. While there are no ranks, a signal ends this process."""

    def __init__(self, saves: bool, logs: Path) -> None:
        self.saves = saves
        self._logs = logs
        self.ranks: Sequence[BaseProcess] = ()
        self.name = ""  # of the first signal
        self.killed = False
        self._first_at = 0.0

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._pass_on) for number in heeded(RELAYED)}
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
            # An exception would pass through what is being imported: C++ aborts, and some code takes it and goes on.
            _say(f"stopped by {self.name}")
            shutil.rmtree(self._logs, ignore_errors=True)
            os._exit(1)
        if self.killed:
            send(self.ranks, signal.SIGKILL)
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
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more, perhaps
                stream.flush()
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


def _early(ends: Mapping[int, _End]) -> str:
    """Ranks that left the others before any failed, if nothing else explains why they did: "rank 1 ended …; "."""
    left = list(takewhile(lambda rank: ends[rank].exit_code == 0, ends))
    explained = any(found.exit_code != 0 and not found.is_secondary for found in ends.values())
    return f"{_names(left)} ended early, with exit code 0; " if left and not explained else ""


def _report(failures: Mapping[int, _End], early: str, failure_file: Path | None) -> int:
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
        _say(f"{early}rank {rank} failed: {failure.message}{where}")
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
    environment["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS") or str(
        max(1, usable_cores() // ranks)
    )
    # Else gloo looks up the host's name, which fails in many containers.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    try:
        yield
    finally:
        environment.clear()
        environment.update(before)
