"""Explains a hang while it lasts: which rank has not entered which collective, and where it is instead.

If a rank never enters a collective, all others just wait until the timeout. Each rank knows its progress in each of
its groups (`Recorder.groups`), and a background thread lets the ranks compare. That costs one look-up in the store
per period, and sees waits in Python only, not those inside DDP's C++ reducer.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from fivefold.collectives.record import Call, Progress, Recorder

_KEY = "fivefold/hang"
_INTERNAL = (os.path.dirname(torch.__file__), os.path.dirname(__file__))  # frames not shown to the user


class HangWatch:
    """When a rank has waited for `seconds`, calls `report(text)` on every waiting rank; a context manager.

    Every rank enters it with the same `seconds` and a common `store`. `name(rank)` is a rank's name in reports, for
    example its coordinates. A wait is reported once and may still end normally. `report` runs in the background thread.
    """

    def __init__(
        self,
        recorder: Recorder,
        store: Store,
        rank: int,
        *,
        seconds: float,
        name: Callable[[int], str] = "rank {}".format,
        report: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._recorder = recorder
        self._store = store
        self._rank = rank
        self._seconds = seconds
        self._name = name
        self._report = report
        self._period = min(1.0, seconds / 4)
        self._round = 0  # of alarms: each is answered by all ranks once
        self._reported: set[Call] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            try:
                if self._waits(self._seconds):
                    self._store.set(f"{_KEY}/{self._round}/alarm", "")
                elif not self._store.check([f"{_KEY}/{self._round}/alarm"]):
                    continue
                self._compare()
            except RuntimeError:  # the store is gone, and the run with it
                return
            self._round += 1

    def _waits(self, seconds: float) -> list[tuple[Progress, Call]]:
        """Calls in which this rank has waited for at least `seconds`, not reported yet."""
        now = time.monotonic()
        waiting = [(group, group.waiting) for group in list(self._recorder.groups)]
        return [
            (group, call)
            for group, call in waiting
            if call and call not in self._reported and now - group.waiting_since >= seconds
        ]

    def _compare(self) -> None:
        """Publishes this rank's state; if it is waiting, reads the others' states and reports."""
        key = f"{_KEY}/{self._round}/rank"
        self._store.set(f"{key}/{self._rank}", json.dumps(self._state()))
        # A rank that began to wait a little later reports now too, not in an alarm of its own.
        waits = self._waits(self._seconds / 2)
        if not waits:
            return
        self._reported.update(call for _, call in waits)
        wanted = {rank for group, _ in waits for rank in group.ranks} - {self._rank}
        states: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + 3 * self._period
        while wanted - states.keys() and time.monotonic() < deadline and not self._ended.wait(0.05):
            for rank in wanted - states.keys():
                if self._store.check([f"{key}/{rank}"]):  # get() alone would block, and training with it
                    states[rank] = json.loads(self._store.get(f"{key}/{rank}"))
        self._report("\n".join(self._line(group, call, states) for group, call in waits))

    def _state(self) -> dict[str, Any]:
        """This rank's state, as the others read it."""
        groups = list(self._recorder.groups)
        calls = [(group.axis, group.entered) for group in groups if group.entered]
        axis, last = max(calls, key=lambda pair: pair[1].since, default=("", None))
        return {
            "groups": {group.name: (group.collectives, *_entered(group)) for group in groups},
            "last": f"{_label(last, axis)}, {time.monotonic() - last.since:.0f} s ago" if last else "nothing",
            "place": _place(),
        }

    def _line(self, group: Progress, call: Call, states: dict[int, dict[str, Any]]) -> str:
        """One wait, and its cause."""
        waited = time.monotonic() - group.waiting_since
        head = (
            f"{self._name(self._rank)} has waited {waited:.0f} s in {_label(call, group.axis)}, {_place()}: "
        )
        others = [rank for i, rank in enumerate(group.ranks) if i != group.rank and call.peer in (None, i)]
        missing = [text for rank in others if (text := self._missing(group, call, rank, states.get(rank)))]
        return head + ("; ".join(missing) or "all have entered it: a slow network, or shapes that differ")

    def _missing(self, group: Progress, call: Call, rank: int, state: dict[str, Any] | None) -> str:
        """Why `rank` keeps the others waiting; empty if it does not."""
        if state is None:
            return f"{self._name(rank)} does not answer (dead, or frozen)"
        where = f"it entered last {state['last']}, and is {state['place']}"
        if call.primitive in ("send", "recv"):  # both ends number their messages separately
            return f"{self._name(rank)} has not met it: {where}"
        collectives, *entered = state["groups"].get(group.name, (0,))
        if collectives < call.number:
            return f"{self._name(rank)} has not entered it: {where}"
        if entered[1:] == [call.number] and entered[0] != call.primitive:
            return f"{self._name(rank)} has entered {entered[0]} in its place: {where}"
        return ""


def _entered(group: Progress) -> tuple[str, int] | tuple[()]:
    """The primitive and the number of the call entered last."""
    call = group.entered
    return (call.primitive, call.number) if call else ()


def _label(call: Call, axis: str) -> str:
    return f"{call.primitive} number {call.number} on axis {axis}"


def _place() -> str:
    """Where the main thread is, in code that is neither torch's nor this package's: "in loop.py:88 (step)"."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    if frame is None:
        return "ending"
    return f"in {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} ({frame.f_code.co_name})"
