"""One step in one line: the live line of a terminal, which fits any width, and the plain line of a log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fivefold.observe.clock import PLACES, Place
from fivefold.observe.metrics import StepMetrics
from fivefold.render.units import (
    bytes_text,
    clock_text,
    duration_text,
    loss_text,
    lr_text,
    percent_text,
    rate_text,
)

WINDOW_STEPS = 20

_BAR_COLUMNS = (24, 16, 10, 6)
_SLACK_COLUMNS = 4  # left free where possible, so that a number one digit longer does not resize the bar
# When columns are short, places of time are given up from the highest number; exposed communication is the
# one that a layout can change.
_SHARE_RANK: dict[Place, int] = {"communication": 8, "compute": 10, "data": 11, "checkpoint": 12, "other": 13}
_EXPOSED_RANK = 9


@dataclass(slots=True)
class RunProgress:
    """Where a run is. Speeds are totals over the last steps, never means of each step's mean."""

    total_steps: int
    recent: deque[StepMetrics] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    skipped: int = 0

    def add(self, metrics: StepMetrics) -> None:
        self.recent.append(metrics)
        self.skipped += metrics.skipped

    @property
    def last(self) -> StepMetrics:
        return self.recent[-1]

    @property
    def seconds(self) -> float:
        """Wall seconds of the steps in the window."""
        return max(sum(metrics.step_seconds for metrics in self.recent), 1e-9)

    @property
    def tokens_per_second(self) -> float:
        return sum(metrics.step_tokens for metrics in self.recent) / self.seconds

    @property
    def mfu(self) -> float | None:
        """The window's FLOPs over what the peak allows in its seconds: every step's MFU weighed by time."""
        if self.last.mfu is None:
            return None
        return sum((metrics.mfu or 0.0) * metrics.step_seconds for metrics in self.recent) / self.seconds

    @property
    def seconds_left(self) -> float:
        return (self.total_steps - self.last.step) * self.seconds / len(self.recent)

    def shares(self) -> dict[Place, float]:
        """The part of the window's seconds spent in each place."""
        return {
            place: sum(metrics.seconds.get(place, 0.0) for metrics in self.recent) / self.seconds
            for place in PLACES
        }

    def exposed(self) -> dict[str, float]:
        """The part of the window's seconds spent waiting in communication of each axis, the largest first."""
        seconds: dict[str, float] = {}
        for metrics in self.recent:
            for axis, part in metrics.exposed_seconds.items():
                seconds[axis] = seconds.get(axis, 0.0) + part
        return {
            axis: part / self.seconds for axis, part in sorted(seconds.items(), key=lambda item: -item[1])
        }


def plain_line(progress: RunProgress) -> str:
    """For a log file: every number with its name and unit, no control characters."""
    last = progress.last
    parts = [
        f"step {last.step}/{progress.total_steps}",
        f"loss {loss_text(last.loss)}",
        f"grad_norm {loss_text(last.grad_norm)}",
        f"lr {lr_text(last.lr)}",
        rate_text(progress.tokens_per_second, "tokens"),
    ]
    if progress.mfu is not None:
        parts.append(f"MFU {percent_text(progress.mfu)}")
    parts.append(f"memory {bytes_text(last.memory_bytes)}")
    if last.loss_scale is not None:
        parts.append(f"loss scale {last.loss_scale:g}")
    if progress.skipped:
        parts.append(f"{progress.skipped} skipped")
    parts.append(", ".join(_shares(progress).values()))
    if exposed := _exposed(progress):
        parts.append(exposed)
    parts.append(f"{duration_text(progress.seconds_left)} left")
    return "  ".join(parts)


class LiveLine:
    """The line that stays: a bar and as many numbers as the terminal is wide, the most wanted first."""

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.text(options.max_width)

    def text(self, width: int) -> Text:
        """One line of at most `width` columns."""
        if not self.progress.recent:
            return Text("first step …", "dim", no_wrap=True, overflow="crop")
        fields = self._fields()
        kept: set[int] = set()
        used = _BAR_COLUMNS[-1]
        for index in sorted(range(len(fields)), key=lambda index: fields[index][0]):
            used += 2 + fields[index][1].cell_len
            if used > width:
                break
            kept.add(index)
        shown = [text for index, (_, text) in enumerate(fields) if index in kept]
        left = width - sum(2 + text.cell_len for text in shown) - _SLACK_COLUMNS
        bar = self._bar(next((columns for columns in _BAR_COLUMNS if columns <= left), _BAR_COLUMNS[-1]))
        return Text("  ", no_wrap=True, overflow="crop").join([bar, *shown])

    def _fields(self) -> list[tuple[int, Text]]:
        """(how soon it is given up: higher first, text), in the order shown."""
        progress, last = self.progress, self.progress.last
        fields = [
            (0, Text(f"{last.step:>{len(str(progress.total_steps))}}/{progress.total_steps}", "bold")),
            (2, Text(f"{clock_text(progress.seconds_left)} left", "dim")),
            (1, _named("loss", loss_text(last.loss))),
            (4, _named("grad", loss_text(last.grad_norm))),
            (5, _named("lr", lr_text(last.lr))),
            (3, Text(rate_text(progress.tokens_per_second, "tokens"))),
        ]
        if progress.mfu is not None:
            fields.append((6, _named("MFU", f"{progress.mfu:.0%}")))
        fields.append((7, Text(bytes_text(last.memory_bytes))))
        if progress.skipped:
            fields.append((2, Text(f"{progress.skipped} skipped", "yellow")))
        fields += [(_SHARE_RANK[place], Text(share, "dim")) for place, share in _shares(progress).items()]
        if exposed := _exposed(progress):
            fields.append((_EXPOSED_RANK, Text(exposed, "dim")))
        return fields

    def _bar(self, columns: int) -> Text:
        done = min(round(columns * self.progress.last.step / self.progress.total_steps), columns)
        return Text.assemble(("━" * done, "cyan"), ("─" * (columns - done), "dim"))


def _named(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value)


def _exposed(progress: RunProgress) -> str:
    """Communication that compute does not hide, by axis; "" where there is none to speak of."""
    named = [f"{axis} {share:.0%}" for axis, share in progress.exposed().items() if share >= 0.005]
    return f"exposed: {', '.join(named)}" if named else ""


def _shares(progress: RunProgress) -> dict[Place, str]:
    """Where time goes, without the places that take less than half a percent."""
    names = {"communication": "comm"}
    return {
        place: f"{names.get(place, place)} {share:.0%}"
        for place, share in progress.shares().items()
        if share >= 0.005
    }
