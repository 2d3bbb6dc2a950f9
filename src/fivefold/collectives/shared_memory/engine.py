"""What makes operations advance: whoever waits, and a thread for those nobody waits for yet.

An operation is a generator that yields whenever it cannot go on, saying what it lacks. Operations of a lane run one
after another in the order they were started; lanes (a group's collectives, its messages between two ranks) are
independent. Whoever waits for one operation advances all of them: ranks may wait for their operations in different
orders and none keeps another from going on. A thread advances what was started asynchronously while the caller
computes; a call that is waited for at once never leaves the caller's thread.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import repeat, starmap
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fivefold.collectives.shared_memory.cores import Cores
from fivefold.collectives.shared_memory.segment import Segment, sleep


@dataclass(slots=True)
class Lack:
    """A word of the segment that has to reach `target` before an operation can go on; rank `rank` writes it."""

    word: int
    target: int
    rank: int


Steps: TypeAlias = Generator[Lack | Work, None, None]
"""An operation: yields what it waits for, a word or a work of gloo, and is resumed when that has come."""

SPINS = 1000  # looks at a word, about a tenth of a microsecond each, before the core is given to others
YIELDS = 50  # where ranks outnumber cores: the core is offered to the others so often before it sleeps
NAP_SECONDS = 0.01  # then it sleeps: until it is woken, but for so long at most
THREAD_NAP_SECONDS = 0.001  # the thread's: its caller may have started more meanwhile
POLL_SECONDS = (0.0001, 0.001)  # where something else than a word is waited for: first, later
LOOK_SECONDS = 0.25  # between two looks at whether the peer lives
GRACE_SECONDS = 0.0005  # the thread leaves alone what its caller may be about to wait for
NO_TIMEOUT = timedelta(0)


class Operation:
    """A collective or message under way, with the methods of torch's Work that its users need.

    `awaited`: its caller waits for it at once. `looked`: and has looked in vain for what it lacks first.
    """

    __slots__ = (
        "awaited",
        "done",
        "engine",
        "error",
        "future",
        "looked",
        "since",
        "source",
        "steps",
        "tensors",
    )

    def __init__(
        self, engine: "Engine", steps: Steps, tensors: list[Tensor], *, awaited: bool = False
    ) -> None:
        self.awaited = awaited
        self.looked = False
        self.engine = engine
        self.steps = steps
        self.tensors = tensors
        self.done = False
        self.error: RuntimeError | None = None
        self.since = 0.0  # when it came to its turn
        self.source = -1  # of a message
        self.future: Any = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self.done:
            self.engine.drive(self, timeout.total_seconds())
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self.engine.advance()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> RuntimeError | None:
        return self.error

    def result(self) -> list[Tensor]:
        return self.tensors

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future with the tensors, as DDP's reducer wants it."""
        with self.engine.lock:
            if self.future is None:
                self.future = torch.futures.Future()
                if self.done:
                    self.engine.settled.append(self)
        self.engine.settle()
        return self.future


class Lane:
    """Operations that run in the order they were started."""

    def __init__(
        self, engine: "Engine", segment: Segment | None, check: Callable[[Lack | None, float], None]
    ) -> None:
        self.segment = segment
        self.check = check
        self.lack: Lack | Work | None = None
        self.broken: RuntimeError | None = None
        self._engine = engine
        self._queue: deque[Operation] = deque()

    def start(self, operation: Operation) -> Operation:
        """Puts an operation into the lane, and takes it as far as it gets without waiting."""
        engine = self._engine
        with engine.lock:
            if self.broken is not None:
                engine.finish(operation, self.broken)
            else:
                self._enqueue(operation)
                if len(self._queue) == 1:
                    self.advance()
        engine.settle()
        if not operation.awaited and not operation.done:
            engine.wake()
        return operation

    def run(self, steps: Steps, tensors: list[Tensor]) -> Operation | None:
        """Carries out the steps for a caller that waits for them; the operation still to be waited for, if any.

        Nothing else being under way, this is done with less ado, as long as what they lack comes soon.
        """
        engine = self._engine
        with engine.lock:
            if not engine.active and self.broken is None:
                try:
                    for lack in steps:
                        if not self._comes_soon(lack):
                            break
                    else:
                        return None
                except RuntimeError as error:
                    self.fail(error)
                    raise
                except BaseException as error:
                    raise self._failed(error) from error
                operation = Operation(engine, steps, tensors, awaited=True)
                operation.looked = True
                self._enqueue(operation)
                self.lack = lack
                return operation
        return self.start(Operation(engine, steps, tensors, awaited=True))

    def _comes_soon(self, lack: Lack | Work) -> bool:
        if not isinstance(lack, Lack):
            return False
        assert self.segment is not None
        return self._engine.comes_soon(self.segment, lack.word, lack.target)

    def _enqueue(self, operation: Operation) -> None:
        self._queue.append(operation)
        if len(self._queue) == 1:
            operation.since = time.monotonic()
            self._engine.active.append(self)

    def advance(self) -> bool:
        """Goes on as far as possible; whether anything moved. With the engine's lock held."""
        moved = False
        while self._queue:
            lack = self.lack
            if lack is not None:
                if isinstance(lack, Lack):
                    assert self.segment is not None
                    if self.segment.words[lack.word] < lack.target:
                        return moved
                elif not lack.is_completed():
                    return moved
            moved = True
            operation = self._queue[0]
            try:
                self.lack = next(operation.steps)
            except StopIteration:
                self._end()
            except BaseException as error:
                self._failed(error)
        return moved

    def _failed(self, error: BaseException) -> RuntimeError:
        """Ends the lane, whose steps have raised that error; the error to be raised."""
        kind = type(error).__name__
        failure = error if isinstance(error, RuntimeError) else RuntimeError(f"{kind}: {error}")
        self.fail(failure)
        if not isinstance(error, Exception):
            raise error
        return failure

    def _end(self) -> None:
        self.lack = None
        self._engine.finish(self._queue.popleft(), None)
        if self._queue:
            self._queue[0].since = time.monotonic()
        else:
            self._engine.active.remove(self)

    def fail(self, error: RuntimeError) -> None:
        """Ends all operations with that error, and those to come."""
        self.broken = error
        self.lack = None
        if self.segment is not None:
            self.segment.close(Segment.FAILED)
        if self._queue:
            self._engine.active.remove(self)
        for operation in self._queue:
            operation.steps.close()
            self._engine.finish(operation, error)
        self._queue.clear()

    def look(self, now: float) -> None:
        """Ends the operations if one lasts too long, or its peer is gone. With the engine's lock held."""
        if not self._queue:
            return
        lack = self.lack if isinstance(self.lack, Lack) else None
        try:
            self.check(lack, now - self._queue[0].since)
        except RuntimeError as error:
            self.fail(error)


class Engine:
    """The operations under way in this process."""

    def __init__(self, cores: Cores) -> None:
        self.lock = threading.Lock()
        self.active: list[Lane] = []
        self.settled: list[Operation] = []  # whose futures are to be told
        self._cores = cores
        self._groups = 0
        self._drivers = 0
        self._wake = threading.Semaphore(0)
        self._awake = False
        self._thread: threading.Thread | None = None
        self._closed = False

    def advance(self) -> bool:
        """Takes every lane as far as it gets; whether anything moved."""
        with self.lock:
            moved = False
            for lane in tuple(self.active):
                moved |= lane.advance()
        if self.settled:
            self.settle()
        return moved

    def drive(self, operation: Operation, timeout: float) -> None:
        """Advances everything until that operation has ended."""
        now = time.monotonic()
        operation.since = max(operation.since, now)  # the time allowed is counted while somebody waits
        deadline = now + timeout if timeout > 0 else float("inf")
        pause = None
        looked = operation.looked
        self._drivers += 1
        try:
            while not operation.done:
                if self.advance():
                    pause, looked = None, False
                elif pause is not None:
                    pause.rest()
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"Timed out waiting {timeout * 1000:.0f}ms")
                elif looked or not self._spin():
                    self._cores.spread()
                    pause = _Pause(self, NAP_SECONDS)
        finally:
            self._drivers -= 1

    def comes_soon(self, segment: Segment, word: int, target: int) -> bool:
        """Looks at that word again and again for a while; whether it has reached the target."""
        words = segment.words
        return any(words[word] >= target for _ in self._looks(1))

    def _spin(self) -> bool:
        """Looks again and again at the words that are lacked; whether one has come."""
        waits, polled = self.lacked()
        if polled or not waits:
            return False
        if len(waits) == 1:
            return self.comes_soon(*waits[0])
        return any(
            segment.words[word] >= target for _ in self._looks(len(waits)) for segment, word, target in waits
        )

    def _looks(self, words: int) -> Iterable[int | None]:
        """As many as one look at so many words is worth, offering the core in between where ranks outnumber cores."""
        return starmap(os.sched_yield, repeat((), YIELDS)) if self._cores.crowded else range(SPINS // words)

    def lacked(self) -> tuple[list[tuple[Segment, int, int]], bool]:
        """The words that operations lack, and whether any waits for something else."""
        waits, polled = [], False
        for lane in tuple(self.active):
            lack = lane.lack
            if isinstance(lack, Lack):
                assert lane.segment is not None
                waits.append((lane.segment, lack.word, lack.target))
            else:
                polled |= lack is not None
        return waits, polled

    def finish(self, operation: Operation, error: RuntimeError | None) -> None:
        """With the lock held."""
        operation.error = error
        operation.done = True
        if operation.future is not None:
            self.settled.append(operation)

    def settle(self) -> None:
        """Tells the futures, without the lock: their callbacks may start operations."""
        while self.settled:
            try:
                operation = self.settled.pop()
            except IndexError:  # another thread has
                return
            if operation.error is None:
                operation.future.set_result(operation.tensors)
            else:
                operation.future.set_exception(operation.error)

    def wake(self) -> None:
        """Has the thread look after the operations that nobody waits for."""
        if self._awake:
            return
        self._awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shared-memory", daemon=True)
            self._thread.start()
        self._wake.release()

    def join(self) -> None:
        """One more group."""
        self._groups += 1

    def leave(self) -> None:
        """One less; with the last one the thread ends."""
        self.settle()
        self._groups -= 1
        if self._groups == 0 and self._thread is not None:
            self._closed = True
            self._wake.release()
            self._thread.join()
            self._thread, self._closed, self._awake = None, False, False

    def _serve(self) -> None:
        while True:
            self._wake.acquire()
            if self._closed:
                return
            time.sleep(GRACE_SECONDS)
            pause = _Pause(self, THREAD_NAP_SECONDS)  # the core is its caller's
            while self.active and not self._closed:
                if self._drivers:  # somebody waits, and so does this thread's work
                    time.sleep(GRACE_SECONDS)
                elif self.advance():
                    pause = _Pause(self, THREAD_NAP_SECONDS)
                else:
                    pause.rest()
            self._awake = False
            if self.active and not self._closed:  # started between the last look and here
                self.wake()


class _Pause:
    """What to do while nothing moves: sleep, and see whether the peers live."""

    __slots__ = ("_engine", "_looked", "_nap_seconds", "_since")

    def __init__(self, engine: Engine, nap_seconds: float) -> None:
        self._engine = engine
        self._nap_seconds = nap_seconds
        self._since = self._looked = time.monotonic()

    def rest(self) -> None:
        now = time.monotonic()
        waited = now - self._since
        if now - self._looked > min(LOOK_SECONDS, max(waited, NAP_SECONDS) / 2):
            self._looked = now
            with self._engine.lock:
                for lane in tuple(self._engine.active):
                    lane.look(now)
            self._engine.settle()
        self._sleep(POLL_SECONDS[waited > LOOK_SECONDS])

    def _sleep(self, poll_seconds: float) -> None:
        waits, polled = self._engine.lacked()
        if waits:
            sleep(waits, poll_seconds if polled else self._nap_seconds)
        elif polled:
            time.sleep(poll_seconds)
