"""What the optional parts of the installation are for, and how they are loaded."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import FrameType

from fivefold.config.errors import BadInput


def require_torch() -> None:
    """Raises BadInput where torch is not installed; imports nothing."""
    if find_spec("torch") is None:
        raise BadInput('this needs torch: pip install "fivefold[train]"')


def load_torch(*modules: str) -> None:
    """Imports torch, or modules that do. A Ctrl-C meanwhile ends this process at once.

    Raises:
        BadInput: torch is not installed.
    """
    require_torch()
    with _ended_by_interrupts():
        for module in modules or ("torch",):
            import_module(module)


@contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """As an exception, an interrupt would pass through C++, which aborts, or be taken by code that tries an import."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(number: int, frame: FrameType | None) -> None:
    print("fivefold: stopped by SIGINT", file=sys.stderr, flush=True)
    os._exit(1)
