"""How far the preparation of data has come, before the run's console is there."""

import sys
from typing import TextIO


class PreparationProgress:
    """Called with (what is being done, part done in [0, 1]): one line kept up to date on a terminal, one line per
    kind of work elsewhere."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._doing = ""

    def __call__(self, doing: str, part: float) -> None:
        if self._terminal:
            filled = round(part * 30)
            end = "\n" if part >= 1 else ""
            self._stream.write(f"\r\x1b[K{doing:<24} {'━' * filled}{'╌' * (30 - filled)} {part:4.0%}{end}")
        elif doing != self._doing:
            self._stream.write(f"{doing} …\n")
        self._doing = doing
        self._stream.flush()
