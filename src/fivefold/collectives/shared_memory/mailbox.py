"""Messages between two ranks of a segment: a ring of bytes for each pair and direction.

A message is a header (tag, bytes), then its data, both padded to a cache line. The sender is done when its data
are in the ring, however late the receiver comes; what does not fit follows as room is made. Messages of one tag
keep their order; one that is not wanted yet is taken out of the way when one behind it is.
"""

import struct
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from fivefold.collectives.shared_memory.copying import LINE_BYTES, copy
from fivefold.collectives.shared_memory.engine import Engine, Lack, Lane, Operation, Steps
from fivefold.collectives.shared_memory.segment import Segment

_HEADER = struct.Struct("qq")  # tag, bytes
PIECE_BYTES = 1 << 18  # told to the other side as it goes, so that both copy at the same time


class _Ring:
    """One end of a ring: how many bytes have passed, and where the next ones go."""

    def __init__(self, segment: Segment, sender: int, receiver: int) -> None:
        self.segment = segment
        self.sender, self.receiver = sender, receiver
        self.written, self.taken = segment.written(sender, receiver), segment.taken(sender, receiver)
        self.offset = segment.ring(sender, receiver)
        self.passed = 0

    def room(self, left: int) -> tuple[int, int]:
        """Where the next piece of `left` bytes is, and its size, the same at both ends."""
        start = self.passed % self.segment.ring_bytes
        size = min(left, PIECE_BYTES, self.segment.ring_bytes // 4, self.segment.ring_bytes - start)
        return self.segment.address + self.offset + start, size

    def here(self) -> int:
        """The current place, in bytes from the start of the segment."""
        return self.offset + self.passed % self.segment.ring_bytes


class Outbox:
    """What goes from this rank to another."""

    def __init__(self, segment: Segment, receiver: int) -> None:
        self._ring = _Ring(segment, segment.rank, receiver)

    def send(self, tensor: Tensor, tag: int) -> Steps:
        ring, segment = self._ring, self._ring.segment
        if not ring.passed:
            segment.reserve(ring.offset, segment.ring_bytes)
        yield from self._wait_for(LINE_BYTES)
        address, left = tensor.data_ptr(), tensor.nbytes
        segment.pack(_HEADER, ring.here(), tag, left)
        ring.passed += LINE_BYTES
        if not left:
            segment.set(ring.written, ring.passed)
        while left:
            place, size = ring.room(left)
            yield from self._wait_for(_padded(size))
            copy(place, address, size)
            address, left = address + size, left - size
            ring.passed += _padded(size)
            segment.set(ring.written, ring.passed)

    def _wait_for(self, size: int) -> Steps:
        ring, segment = self._ring, self._ring.segment
        target = ring.passed + size - segment.ring_bytes
        if target > 0 and segment.words[ring.taken] < target:
            yield Lack(ring.taken, target, ring.receiver)


class _Wanted:
    """A message that is waited for, in one inbox or (from any rank) in several."""

    def __init__(self, operation: Operation, tensor: Tensor, tag: int, boxes: "list[Inbox]") -> None:
        self.operation, self.tensor, self.tag, self.boxes = operation, tensor, tag, boxes


class Inbox(Lane):
    """What comes from another rank to this one. `ranks` are the segment's as the group numbers them."""

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        sender: int,
        ranks: list[int],
        check: Callable[[Lack | None, float], None],
    ) -> None:
        super().__init__(engine, segment, check)
        index = ranks.index(sender)
        self._source = sender
        self._ring = _Ring(segment, index, segment.rank)
        self._wanted: list[_Wanted] = []
        self._early: dict[int, deque[Tensor]] = {}  # tag → messages taken out of the way
        self._pump = self._receive()
        self._midway = False  # within a message,
        self._current: _Wanted | None = None  # of which this is who waits for it, if it is wanted now
        self._name = segment.peers[index].rank

    def advance(self) -> bool:
        moved = False
        while self._wanted or self._midway:
            lack = self.lack
            if isinstance(lack, Lack) and self._ring.segment.words[lack.word] < lack.target:
                return moved
            moved = True
            try:
                self.lack = next(self._pump)
            except Exception as error:
                self.fail(RuntimeError(f"{type(error).__name__}: {error}"))
        if self in self._engine.active:
            self._engine.active.remove(self)
        return True

    def want(self, wanted: _Wanted) -> None:
        """Looks out for that message. With the engine's lock held."""
        if self.broken is not None:
            _end(wanted, self.broken)
        elif early := self._early.get(wanted.tag):
            self._deliver(wanted, early.popleft())
        else:
            self._wanted.append(wanted)
            if self not in self._engine.active:
                self._engine.active.append(self)

    def drop(self, wanted: _Wanted) -> None:
        """Another inbox has it."""
        if wanted in self._wanted:
            self._wanted.remove(wanted)

    def fail(self, error: RuntimeError) -> None:
        self.broken = error
        if self in self._engine.active:
            self._engine.active.remove(self)
        for wanted in [*self._wanted, *([self._current] if self._current else [])]:
            _end(wanted, error)
        self._wanted.clear()
        self._current, self._midway = None, False

    def look(self, now: float) -> None:
        waiting = [*self._wanted, *([self._current] if self._current else [])]
        since = min((wanted.operation.since for wanted in waiting), default=now)
        try:
            self.check(self.lack if isinstance(self.lack, Lack) else None, now - since)
        except RuntimeError as error:
            self.fail(error)

    def _receive(self) -> Steps:
        """Takes one message after another, for ever."""
        ring = self._ring
        while True:
            yield from self._wait_for(LINE_BYTES)
            tag, size = ring.segment.unpack(_HEADER, ring.here())
            ring.passed += LINE_BYTES
            self._midway, self._current = True, self._claim(tag)
            wanted = self._current
            if wanted is not None and wanted.tensor.nbytes == size:
                yield from self._take(wanted.tensor.data_ptr(), size)
                _end(wanted, None, self._source)
            else:
                message = torch.empty(size, dtype=torch.uint8)
                yield from self._take(message.data_ptr(), size)
                wanted = wanted or self._claim(tag)  # it may have become wanted meanwhile
                if wanted is not None:
                    self._deliver(wanted, message)
                else:
                    self._early.setdefault(tag, deque()).append(message)
            self._midway, self._current = False, None

    def _claim(self, tag: int) -> _Wanted | None:
        """The first that waits for such a message; from now on it waits for nothing else."""
        wanted = next((wanted for wanted in self._wanted if wanted.tag == tag), None)
        if wanted is not None:
            for box in wanted.boxes:
                box.drop(wanted)
        return wanted

    def _deliver(self, wanted: _Wanted, message: Tensor) -> None:
        """Hands over a message that was kept."""
        size, error = wanted.tensor.nbytes, None
        if message.nbytes == size:
            copy(wanted.tensor.data_ptr(), message.data_ptr(), size)
        else:
            error = RuntimeError(f"rank {self._name} has sent {message.nbytes} bytes, {size} are expected")
        _end(wanted, error, self._source)

    def _take(self, address: int, left: int) -> Steps:
        ring, segment = self._ring, self._ring.segment
        if not left:
            segment.set(ring.taken, ring.passed)
        while left:
            place, size = ring.room(left)
            yield from self._wait_for(_padded(size))
            copy(address, place, size)
            address, left = address + size, left - size
            ring.passed += _padded(size)
            segment.set(ring.taken, ring.passed)

    def _wait_for(self, size: int) -> Steps:
        ring = self._ring
        target = ring.passed + size
        # Also when it is there already: `advance` decides after each look whether another message is wanted.
        yield Lack(ring.written, target, ring.sender)


def receive(
    engine: Engine, boxes: list[Inbox], tensor: Tensor, tag: int, *, background: bool = True
) -> Operation:
    """Receives into `tensor` the next message with that tag in one of the boxes."""
    operation = Operation(engine, _nothing(), [tensor])
    operation.since = time.monotonic()
    wanted = _Wanted(operation, tensor, tag, boxes)
    with engine.lock:
        for box in boxes:
            if not operation.done:
                box.want(wanted)
        for box in boxes:
            if operation.done:
                box.drop(wanted)
            else:
                box.advance()
    engine.settle()
    if background and not operation.done:
        engine.wake()
    return operation


def _nothing() -> Steps:
    yield from ()


def _end(wanted: _Wanted, error: RuntimeError | None, sender: int = -1) -> None:
    wanted.operation.source = sender
    for box in wanted.boxes:
        box.drop(wanted)
    wanted.operation.engine.finish(wanted.operation, error)


def _padded(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES
