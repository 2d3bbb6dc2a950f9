"""Starting local ranks with torch's elastic agent, and reporting their failure once, in one line; and `as_rank`, the
context in which a rank runs.

Ranks are started as commands, not as functions: a function entry point that ends gracefully after a signal never exits
(it waits for its parent, which waits for it).
"""

import ctypes
import fcntl
import json
import logging
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from fivefold.config.errors import HAS_DIED, BadInput, RunFailed
from fivefold.trainer.place import RUN_ID, Place, threads_of_rank, usable_cores
from fivefold.trainer.stop import ECHO_SECONDS

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MOST_RANKS_PER_CORE = 32
"""Learning how 64 ranks work on a laptop is fine; a thousand processes are a mistake."""
_UNLOCKED_SECONDS = 60.0
"""A directory older than this and not locked is left by a launcher that was killed."""
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
    arguments: Sequence[str], ranks: int, failure_file: Path | None = None, *, saves: bool = True
) -> int:
    """Starts `ranks` processes of this Python with `arguments` on this host and waits for them.

    If a rank fails, all are ended, and one line on stderr names the first failure. SIGINT, SIGTERM, SIGHUP and SIGUSR1
    ask the ranks to stop; they may take as long as they need to finish the step and save. A second signal, more than
    two seconds later, kills them.

    Args:
        arguments: what follows `python`, e.g. ["-m", "fivefold", "train", "run.toml"].
        ranks: how many.
        failure_file: where the traceback of the rank that failed first is written.
        saves: whether ranks that are asked to stop have something to save; else a signal just ends them.

    Returns:
        0 = all ranks succeeded, 1 = one failed or a signal stopped them, 2 = bad input.

    Raises:
        BadInput: more ranks than this machine should start.
    """
    check_count(ranks)
    with ExitStack() as stack:
        logs = stack.enter_context(_logs())
        stack.enter_context(_rank_environment(os.environ, ranks))
        stack.enter_context(_silence("torch.distributed.elastic"))
        relay = stack.enter_context(_Relay(saves))
        try:
            relay.agent = _agent(arguments, ranks, logs)
            failures = relay.agent.run().failures
        except KeyboardInterrupt:  # of the relay: no rank had started yet
            failures = {}
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


def _verdict(relay: "_Relay", failures: "Mapping[int, ProcessFailure]", failure_file: Path | None) -> int:
    """Reports how the ranks ended, unless they succeeded; returns the exit code."""
    if relay.killed:
        _say("killed; what was not saved yet is lost" if relay.saves else "killed")
        return 1
    if relay.name and not failures:
        _say(f"stopped by {relay.name}")
        return 1
    if relay.name and _is_secondary(next(iter(failures.values()))):
        _say(f"stopped by {relay.name}{' before the ranks could save' if relay.saves else ''}")
        return 1
    return _report(failures, failure_file) if failures else 0


def _agent(arguments: Sequence[str], ranks: int, logs: str) -> "LocalElasticAgent":
    """torch's elastic agent for one host, with a store at a port that the kernel chose.

    `elastic_launch` does the same but hides the ranks' process ids, so it can only end them within a fixed time, and a
    save may take longer. Its c10d rendezvous costs 0.1 s more.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    # Multi-tenant: the rendezvous' own store of this address, in this process, is this very server.
    store = TCPStore("127.0.0.1", 0, 1, True, multi_tenant=True, wait_for_workers=False)
    rendezvous = StaticTCPRendezvous("127.0.0.1", store.port, 0, 1, f"{RUN_ID}-{os.getpid()}", 60)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=(*_safe_path(), *arguments),
        max_restarts=0,
        monitor_interval=0.1,
        master_addr="127.0.0.1",
        master_port=store.port,
        local_addr="127.0.0.1",  # else the agent looks up the host's name: seconds where DNS is broken
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=logs))


def _safe_path() -> list[str]:
    """`python -m` puts the working directory first on the path, where a user's random.py would shadow Python's.
    The ranks get it only if this process has it.
    """
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


class _Relay:
    """Context manager that forwards a signal to the ranks as SIGTERM (a request to stop), and a second one as SIGKILL.
    The agent's own handler would kill them after 30 seconds.
    """

    def __init__(self, saves: bool) -> None:
        self.saves = saves
        self.agent: LocalElasticAgent | None = None
        self.name = ""  # of the first signal
        self.killed = False
        self._first_at = 0.0

    def __enter__(self) -> Self:
        # For the signals named here the agent would install handlers of its own when it starts the ranks.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
        self._before = {number: signal.signal(number, self._pass_on) for number in RELAYED}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.name and now - self._first_at < ECHO_SECONDS:
            return
        workers = self.agent.get_worker_group().workers if self.agent else []
        pids = [worker.id for worker in workers if worker.id is not None]
        self.killed = bool(self.name)
        if not self.name:
            self.name, self._first_at = signal.Signals(number).name, now
        if not pids:
            raise KeyboardInterrupt
        if not self.killed and self.saves:
            _say(f"{self.name}: the ranks finish their step and save; a second one kills them")
        for pid in pids:
            with suppress(ProcessLookupError):  # ended already
                if self.killed:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGTERM)  # not its children: a rank may need them to save


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


def _report(failures: "Mapping[int, ProcessFailure]", failure_file: Path | None) -> int:
    """One line about the rank that failed first, and its traceback in a file."""
    # Failures are in the order in which the agent saw the ranks end. Its time stamps (whole seconds) are too coarse to
    # separate the cause from its consequences, which are recognised by their messages.
    rank, failure = min(failures.items(), key=lambda item: _is_secondary(item[1]))
    message = _message(failure)
    if message and failure.exitcode == 2:
        _say(message)
        return 2
    if message:
        where = ""
        if failure_file is not None:
            with suppress(OSError):  # perhaps a full disk is what the rank failed of
                failure_file.parent.mkdir(parents=True, exist_ok=True)
                failure_file.write_text(failure.error_file_data["message"]["extraInfo"]["py_callstack"])
                where = f" (traceback: {failure_file})"
        _say(f"rank {rank} failed: {message}{where}")
    elif failure.exitcode < 0:
        number = signal.Signals(-failure.exitcode)
        _say(f"rank {rank} was killed by {number.name}: {SIGNAL_HINTS.get(number, 'not by fivefold')}")
    else:
        _say(
            f"rank {rank} ended with exit code {failure.exitcode} and recorded no reason; see its output above"
        )
    return 1


def _message(failure: "ProcessFailure") -> str:
    """The error that the rank recorded, in one line; "" if none."""
    recorded = failure.error_file_data["message"]
    return " ".join(recorded["message"].split()) if isinstance(recorded, dict) else ""


def _is_secondary(failure: "ProcessFailure") -> bool:
    """Whether the rank ended because another one failed, or by a SIGTERM before its signal handler was installed."""
    told_to_end = failure.exitcode == -signal.SIGTERM or failure.exitcode == 128 + signal.SIGTERM
    return told_to_end or _is_consequence(_message(failure))


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


@contextmanager
def _silence(name: str) -> Iterator[None]:
    """Silences a logger and its children: torch logs up to 27 lines for one failure."""
    logger = logging.getLogger(name)
    before, quiet = logger.propagate, logging.NullHandler()
    logger.propagate = False
    logger.addHandler(quiet)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(quiet)
