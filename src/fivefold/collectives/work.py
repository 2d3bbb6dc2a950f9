"""Recorded work handles, whose errors name rank, collective and axis."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import _disable_current_modes

from fivefold.collectives.record import Call, Progress, Recorder, Timeline

P = ParamSpec("P")
T = TypeVar("T")
_NO_TIMEOUT = timedelta(0)  # torch's value for "no timeout"


class CollectiveError(RuntimeError):
    """A collective failed: one line with this rank, the collective, its number, the axis and the peers."""


def failure(progress: Progress, call: Call, error: RuntimeError) -> CollectiveError:
    """The one-line error for a transport's `error` in a call."""
    me = progress.rank
    peers = [rank for i, rank in enumerate(progress.ranks) if i != me and call.peer in (None, i)]
    others = f"with rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}" if peers else "alone"
    return CollectiveError(
        f"rank {progress.ranks[me]}: {call.primitive} number {call.number} on axis {progress.axis} {others} "
        f"failed: {_cause(error)}"
    )


def outside_modes(call: Callable[P, T]) -> Callable[P, T]:
    """The call without the caller's dispatch modes (such as selective recomputation's), which must not see the tensor
    operations of a transport."""
    return partial(_without_modes, call) if _len_torch_dispatch_stack() else call


def _without_modes(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    with _disable_current_modes():
        return call(*args, **kwargs)


class RecordedWork(Work):
    """A work whose wait() raises CollectiveError and counts as exposed time."""

    def __init__(self, work: Work, progress: Progress, call: Call, recorder: Recorder) -> None:
        super().__init__()
        self._work = work
        self._progress = progress
        self._call = call
        self._recorder = recorder
        if recorder.timeline is not None and recorder.is_timed and call.primitive != "recv":
            _tell_end(work, recorder.timeline, progress.axis, call.since)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        progress = self._progress
        progress.waiting_since = time.monotonic()
        progress.waiting = self._call
        try:
            return outside_modes(self._work.wait)(timeout)
        except RuntimeError as error:
            raise failure(progress, self._call, error) from error
        finally:
            progress.waiting = None
            self._recorder.expose(progress.axis, progress.waiting_since)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def synchronize(self) -> None:
        self._work.synchronize()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> Any:
        # Its error is gloo's own: renaming it takes a callback from gloo's thread for every collective.
        return self._work.get_future()


class _Ended(Work):
    """A call that has been waited for."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed


ENDED = _Ended()


def _tell_end(work: Work, timeline: Timeline, axis: str, since: float) -> None:
    """Adds a work's interval to the timeline when it ends, even if nobody waits for it. Gloo's messages have no
    future: of these only the waiting is seen."""
    with suppress(RuntimeError):
        work.get_future().add_done_callback(lambda _: timeline.add(axis, since, time.monotonic()))


class _AllOf(Work):
    """Several works as one."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])


def one_by_one(
    start: Callable[..., Work | None], outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any
) -> Work | None:
    """Applies `start` to each pair, for collectives that gloo does not offer for lists."""
    works = [start(o, i, *args, **kwargs) for o, i in zip(outputs, inputs, strict=True)]
    return works[0] if len(works) == 1 else _AllOf([work for work in works if work is not None])


def _cause(error: RuntimeError) -> str:
    """Gloo's message without the place in its source, its advice and its line breaks."""
    text = re.sub(r"\[[^\[\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error))
    return " ".join(text.partition(". This is typically")[0].split())
