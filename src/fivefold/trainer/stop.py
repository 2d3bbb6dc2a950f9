"""Stopping on request: a signal sets a flag, and the next step ends the run with a checkpoint."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

# SIGUSR1 is what `sbatch --signal=USR1@300` sends before a time limit, and what OpenMPI's mpirun passes on as it
# is; on SIGTERM and SIGINT mpirun leaves its ranks one second.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# One Ctrl-C may reach a rank twice, by its terminal and by its launcher; a person who presses it again
# later means it.
ECHO_SECONDS = 2.0


def heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Those to react to: all but a SIGHUP that this process was started to ignore, by nohup."""
    return [
        number
        for number in signals
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


class StopSignal:
    """After `listen`, SIGTERM, SIGINT, SIGHUP (a terminal that was closed) and SIGUSR1 set a flag instead of ending the
    process; a context manager for the main thread.

    The run tests it once per step (`if stop:`), and the ranks agree on it. A SIGINT more than two seconds after the
    first signal ends the process immediately, without a save, with exit code 130.
    """

    def __init__(self) -> None:
        self.name = ""  # of the first signal received, "" while there was none
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopSignal: Python delivers signals to the main thread only; enter it there")
        return self

    def listen(self) -> None:
        """Installs the handlers. To be called when there is something to save: before that, such as during an hour of
        tokenizing, a signal should end the process immediately."""
        self._before = {number: signal.signal(number, self._note) for number in heeded(SIGNALS)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.name:
            self.name, self._first_at = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._first_at > ECHO_SECONDS:
            sys.stderr.flush()
            os._exit(130)  # no clean-up: a collective in flight would wait for the other ranks
