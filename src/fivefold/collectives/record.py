"""The measured ledger: how often each collective ran, and how many bytes it carried.

Bytes follow the design's ledger conventions: all_reduce, broadcast and reduce = the tensor; all_gather = the
output; reduce_scatter and all_to_all = the input (own part and padding included); gather and scatter = the
parts of all ranks together; send and recv = the message.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward", "gradient", "optimizer", "step"]
Primitive = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]

# In backward, a reduction over one of these axes is one of gradients, also if torch's DDP or FSDP2 starts it, which do
# not set a phase. Everything else (gathered parameters) stays "backward", unless the caller sets another phase.
_GRADIENT_AXES = frozenset({"dp_replicate", "dp_shard", "dp_shard_cp", "embedding"})
_REDUCTIONS = frozenset({"reduce_scatter", "all_reduce"})
_MESSAGES = frozenset({"send", "recv"})


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """One line of the measured ledger: `bytes_per_rank` is the sum over the `count` calls this rank made."""

    axis: str
    primitive: str
    phase: str
    count: int
    bytes_per_rank: int


@dataclass(slots=True, eq=False)
class Call:
    """One call in a group. `number` counts the group's collectives from 1, and separately its messages (send and
    recv), so that a collective has the same number on every rank. `peer` is the other end of a message, as a rank
    within the group, if known. `since` is a time on this process's monotonic clock, in seconds.
    """

    primitive: Primitive
    number: int
    peer: int | None
    since: float


class Progress:
    """This rank's progress in one group: the call entered last, and the call it is waiting in, if any."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank = rank  # within the group
        self.ranks = ranks  # global, in the group's order
        self.name = ""  # torch's, the same on every rank
        self.axis = ""
        self.collectives = 0
        self.messages = 0
        self.entered: Call | None = None
        self.waiting: Call | None = None
        self.waiting_since = 0.0

    def enter(self, primitive: Primitive, peer: int | None) -> Call:
        """Records that this rank enters a call."""
        if primitive in _MESSAGES:
            self.messages = number = self.messages + 1
        else:
            self.collectives = number = self.collectives + 1
        self.entered = call = Call(primitive, number, peer, time.monotonic())
        return call


class Timeline:
    """The time intervals in which a collective of each axis was running on this rank."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, float, float]] = []

    def add(self, axis: str, start: float, stop: float) -> None:
        """Adds an interval, from any thread; times are on the monotonic clock."""
        self._spans.append((axis, start, stop))

    def seconds_by_axis(self) -> dict[str, float]:
        """Seconds in which at least one call of an axis was running."""
        found: dict[str, float] = {}
        ends: dict[str, float] = {}
        for axis, start, stop in sorted(self._spans, key=lambda span: span[1]):
            end = max(start, ends.get(axis, start))
            found[axis] = found.get(axis, 0.0) + max(0.0, stop - end)
            ends[axis] = max(end, stop)
        return found


class Recorder:
    """Counts the collectives of one rank.

    `current_phase` is a plain attribute, not thread-local: on a GPU backward runs in another thread. The axes in
    `excluded` are never counted. Counted or not, every call is noted in `groups` (the existing groups), which tell what
    a rank was doing when something failed.

    The time that a call blocks its caller is *exposed*: compute does not hide it. If `timeline` is set, the intervals
    in which calls are running are added to it.
    """

    def __init__(self, excluded: Collection[str] = ("checkpoint",)) -> None:
        self.excluded = frozenset(excluded)
        self.current_phase: Phase = "step"
        self.groups: list[Progress] = []
        self.timeline: Timeline | None = None
        self._pauses = 0
        self._exposed: defaultdict[str, float] = defaultdict(float)
        self._cells: dict[tuple[str, str, str], list[int]] = {}  # (axis, primitive, phase) → [count, bytes]

    def add(self, axis: str, primitive: Primitive, size: int) -> None:
        """Counts one call of `size` bytes."""
        if self._pauses or axis in self.excluded:
            return
        phase: Phase = self.current_phase
        if phase == "backward" and primitive in _REDUCTIONS and axis in _GRADIENT_AXES:
            phase = "gradient"
        key = (axis, primitive, phase)
        cell = self._cells.get(key)
        if cell is None:
            self._cells[key] = cell = [0, 0]
        cell[0] += 1
        cell[1] += size

    def expose(self, axis: str, start: float) -> None:
        """Counts the time from `start` (on the monotonic clock) until now as exposed."""
        if self._pauses or axis in self.excluded:
            return
        now = time.monotonic()
        self._exposed[axis] += now - start
        if self.timeline is not None:
            self.timeline.add(axis, start, now)

    @property
    def is_timed(self) -> bool:
        """Whether it matters when a call ends."""
        return self.timeline is not None and not self._pauses

    def exposed_by_axis(self) -> dict[str, float]:
        """Exposed seconds since the last `clear`, by axis: waiting for data in transit and for slower ranks."""
        return dict(self._exposed)

    @property
    def exposed_seconds(self) -> float:
        """Of all axes."""
        return sum(self._exposed.values())

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """The phase inside the block; the one around it returns afterwards."""
        outer = self.current_phase
        self.current_phase = phase
        try:
            yield
        finally:
            self.current_phase = outer

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside the block: set-up, checkpoint and evaluation are no part of the ledger."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def rows(self) -> list[Row]:
        """What was counted since the last `clear`, sorted by axis, primitive, phase."""
        return sorted(Row(*key, count, size) for key, (count, size) in self._cells.items())

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes per rank since the last `clear`, all primitives and phases of an axis together."""
        found: dict[str, int] = {}
        for row in self.rows():
            found[row.axis] = found.get(row.axis, 0) + row.bytes_per_rank
        return found

    def clear(self) -> None:
        """Forgets the counts and the exposed time (not `last`)."""
        self._cells.clear()
        self._exposed.clear()
