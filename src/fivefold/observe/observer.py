"""The observer of a run: one object for the console and all metric sinks, so that the loop does not depend on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from fivefold.config.tree import Config
from fivefold.observe.facts import EndFacts, StartFacts
from fivefold.observe.metrics import MetricsFile, StepMetrics
from fivefold.observe.sinks import Sink, open_sinks

if TYPE_CHECKING:
    from fivefold.observe.console import RunConsole
    from fivefold.observe.memory import MemoryByCategory


class Observer:
    """Passes events to the console and to every sink. Without them (on all ranks but 0) it does nothing.

    with open_observer(...) as observer:
        observer.start(facts)
        ...
        observer.step(metrics)
        observer.finish(facts)
    """

    def __init__(self, console: RunConsole | None = None, sinks: Sequence[Sink] = ()) -> None:
        self._console = console
        self._sinks: list[Sink] = [*sinks, *([console] if console else [])]

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def output_closed(self) -> bool:
        """Whether the reader of the console's output has gone away (a closed pipe): then the run should stop."""
        return self._console is not None and self._console.output_closed

    def start(self, facts: StartFacts) -> None:
        """The run is about to begin."""
        if self._console:
            self._console.start(facts)

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step is done."""
        for sink in self._sinks:
            sink.step(metrics)

    def memory(self, memory: MemoryByCategory) -> None:
        """Memory by category is known."""
        if self._console:
            self._console.memory(memory)

    def evaluation(self, step: int, loss: float) -> None:
        """Held-out loss, in nats per unmasked token, after `step` optimizer steps."""
        for sink in self._sinks:
            sink.evaluation(step, loss)

    def note(self, line: str) -> None:
        """Something a person should read: a checkpoint, a skip, a warning."""
        if self._console:
            self._console.note(line)

    def finish(self, facts: EndFacts) -> None:
        """The run has ended."""
        if self._console:
            self._console.finish(facts)

    def close(self) -> None:
        """Closes everything; the terminal is as it was."""
        for sink in reversed(self._sinks):
            sink.close()


def open_observer(
    config: Config,
    directory: Path,
    *,
    rank: int,
    stream: TextIO,
    start_step: int = 0,
) -> Observer:
    """The observer of a run: on rank 0 metrics.jsonl, the sinks of `log.sinks` and a console; else none.

    Args:
        stream: where pages and lines go: stdout, or stderr when stdout carries JSON.
        start_step: optimizer steps done before this start; later lines in metrics.jsonl are dropped.

    Raises:
        BadInput: a sink's package is missing.
    """
    if rank != 0:
        return Observer()
    from fivefold.observe.console import RunConsole  # only the rank that draws pays for rich

    sinks = open_sinks(config.log.sinks, directory, msgspec.to_builtins(config), start_step)
    return Observer(RunConsole(config, stream), [MetricsFile(directory, start_step), *sinks])
