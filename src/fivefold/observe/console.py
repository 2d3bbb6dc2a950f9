"""What a person sees: a start page, one live line, an end page; plain lines where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from fivefold.config.tree import Config
from fivefold.observe.facts import EndFacts, StartFacts
from fivefold.observe.live import LiveLine, RunProgress, plain_line
from fivefold.observe.metrics import StepMetrics
from fivefold.observe.pages import against, end_page, memory_page, printable, start_page

if TYPE_CHECKING:
    from fivefold.observe.memory import MemoryByCategory

REFRESH_SECONDS = 0.1  # the live line is drawn no more often; a drawing costs about a millisecond


class Output(Console):
    """A console that falls silent when its reader goes away, as `| head` does; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())  # else what is still buffered fails once more at exit
        os.close(silence)
        print("fivefold: nobody reads the output any more: the run saves and stops", file=sys.stderr)


class RunConsole:
    """Rank 0's view of a run. A sink that also has pages and notes.

    On a terminal it draws one live line and every note above it. Elsewhere (a file, a pipe, `TERM=dumb`) it
    writes a plain line every `log.every` steps, and nothing it writes holds a control character.
    """

    def __init__(self, config: Config, stream: TextIO) -> None:
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a bar that an old code page lacks must not end a run
        self._console = Output(
            file=stream,
            force_terminal=terminal,
            force_jupyter=False,
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._every = config.log.every
        self._progress = RunProgress(config.run.steps)
        self._live = self._live_line() if terminal else None
        self._first_step: int | None = None
        self._drawn = 0.0
        self._entropy: float | None = None

    @property
    def output_closed(self) -> bool:
        """Whether the reader of the output has gone away."""
        return self._console.quiet

    def start(self, facts: StartFacts) -> None:
        """Prints the start page; the live line appears below it."""
        self._entropy = facts.unigram_entropy
        self._console.print(start_page(facts))
        if self._live:
            self._live.start(refresh=True)

    def step(self, metrics: StepMetrics) -> None:
        self._progress.add(metrics)
        if self._live:
            self._draw(last=metrics.step == self._progress.total_steps)
        elif self._due(metrics.step):
            self._print(Text(plain_line(self._progress)))

    def memory(self, memory: MemoryByCategory) -> None:
        """Prints memory by category, once it is known."""
        self._print(memory_page(memory))

    def evaluation(self, step: int, loss: float) -> None:
        gap = f", {against(loss, self._entropy)}" if self._entropy else ""
        self.note(f"step {step}: evaluation loss {loss:.3f}{gap}")

    def note(self, line: str) -> None:
        """Prints one line above the live one."""
        self._print(Text(printable(line)))

    def finish(self, facts: EndFacts) -> None:
        """Ends the live line and prints the end page."""
        self.close()
        self._console.print(end_page(facts))

    def close(self) -> None:
        """Leaves the terminal as it was; may be called twice."""
        if self._live:
            self._live.stop()
            self._live = None

    def _live_line(self) -> Live:
        """The line, and prints of others above it; but what is piped away stays out of the terminal."""
        return Live(
            LiveLine(self._progress),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def _draw(self, last: bool) -> None:
        now = time.monotonic()
        if self._live and (last or now - self._drawn >= REFRESH_SECONDS):
            self._drawn = now
            self._live.refresh()

    def _due(self, step: int) -> bool:
        if self._first_step is None:
            self._first_step = step
        return step in (self._first_step, self._progress.total_steps) or step % self._every == 0

    def _print(self, what: RenderableType) -> None:
        """A line is never broken: the terminal wraps it, a log keeps it whole."""
        self._console.print(what, soft_wrap=isinstance(what, Text))
