"""The memory that the ranks of a group on one host share, and the words in it through which they meet.

The file has no name at any time: the first rank opens an unnamed one, the others open it through
/proc/PID/fd. So nothing is left behind however the ranks end, SIGKILL included.

Each word has one writer, and those that are waited for only grow. That is all the synchronisation there is: on x86-64
a processor's stores become visible in their order, so who sees a word sees what was written before it.
"""

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from fivefold.collectives.shared_memory.copying import LINE_BYTES
from fivefold.collectives.shared_memory.peers import Peer
from fivefold.config.errors import HAS_DIED

PAGE_BYTES = mmap.PAGESIZE
ALONE_SECONDS = 0.001
SLOTS = 2  # of each rank, in turn
_LINE = LINE_BYTES // 8
_RANK_LINES = 2
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 2**31 - 1  # x86-64
_FUTEX_WAITV, _FUTEX_32_BITS, _MOST_WAITERS = 449, 2, 128  # since Linux 5.16: on several words at once


class SharedMemoryError(RuntimeError):
    """The memory that a group needs cannot be had."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


_futex_waitv = ctypes.CDLL(None, use_errno=True).syscall
_futex_waitv.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
    ctypes.c_int,
]
_futex_waitv.restype = ctypes.c_long
_futex = ctypes.CDLL(None, use_errno=True).syscall
_futex.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
_futex.restype = ctypes.c_long


class Segment:
    """The shared memory of `size` ranks, as rank `rank` of them sees it. Ranks here count within the segment.

    words[posted(r)]      the step that rank r has entered last; it has read all it needs of those before
    words[note(r, s)]     what rank r is doing in step s
    words[state(r)]       0, or why rank r takes no part any more (LEFT, FAILED)
    words[written(a, b)]  bytes of messages that a has put into its ring to b
    words[taken(a, b)]    bytes of them that b has taken out

    Then SLOTS slots of `slot_bytes` for each rank, and a ring of `ring_bytes` for each pair. They cost memory only once
    `reserve` has been called for them.
    """

    LEFT, FAILED = 1, 2

    def __init__(self, fd: int, peers: list[Peer], rank: int, slot_bytes: int, ring_bytes: int) -> None:
        self.peers = peers
        self.rank, self.size = rank, (size := len(peers))
        self.slot_bytes, self.ring_bytes = slot_bytes, ring_bytes
        self._asleep = size * _RANK_LINES * LINE_BYTES
        self._pairs = self._asleep + _round_up(size, LINE_BYTES)
        self._slots = _round_up(self._pairs + size * size * 2 * LINE_BYTES, PAGE_BYTES)
        self._rings = self._slots + size * SLOTS * slot_bytes
        self._fd = fd
        _truncate(fd, self._rings + size * size * ring_bytes)
        self.reserve(0, self._slots)
        memory = mmap.mmap(fd, self._rings + size * size * ring_bytes)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        self._memory = memory
        self.words = memoryview(memory)[: self._slots].cast("Q")
        sleepers = slice(self._asleep, self._asleep + size)
        self._sleepers = memoryview(memory)[sleepers]
        self._nobody = bytes(size)
        self._fence = threading.Lock()
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @classmethod
    def shared(
        cls, store: Store, peers: list[Peer], rank: int, directory: Path, slot_bytes: int, ring_bytes: int
    ) -> "Segment":
        """The segment of these ranks. Collective over them; `store` is theirs alone.

        Raises:
            SharedMemoryError: what is missing, and what to do.
        """
        if rank == 0:
            try:
                fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                segment = cls(fd, peers, rank, slot_bytes, ring_bytes)
            except (OSError, SharedMemoryError) as error:
                store.set("segment", f"!{_reason(error, directory)}")
                raise SharedMemoryError(_reason(error, directory)) from None
            store.set("segment", f"/proc/{os.getpid()}/fd/{fd}")
            return segment
        path = store.get("segment").decode()
        if path.startswith("!"):
            raise SharedMemoryError(f"rank {peers[0].rank}: {path[1:]}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot open the memory of rank {peers[0].rank} ({path}: {error.strerror}); "
                'parallel.backend = "gloo" does without'
            ) from None
        return cls(fd, peers, rank, slot_bytes, ring_bytes)

    def posted(self, rank: int) -> int:
        return rank * _RANK_LINES * _LINE

    def note(self, rank: int, step: int) -> int:
        return rank * _RANK_LINES * _LINE + 1 + (step & 1)

    def state(self, rank: int) -> int:
        return (rank * _RANK_LINES + 1) * _LINE

    def written(self, sender: int, receiver: int) -> int:
        return self._pairs // 8 + (sender * self.size + receiver) * 2 * _LINE

    def taken(self, sender: int, receiver: int) -> int:
        return self.written(sender, receiver) + _LINE

    def slot(self, rank: int, step: int) -> int:
        """Where a rank's slot in that step begins, in bytes from the start of the segment."""
        return self._slots + (SLOTS * rank + step % SLOTS) * self.slot_bytes

    def ring(self, sender: int, receiver: int) -> int:
        """Where the pair's ring begins, in bytes from the start of the segment."""
        return self._rings + (sender * self.size + receiver) * self.ring_bytes

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """The memory there as a tensor; kept, since making one takes longer than adding a few thousand numbers."""
        key = (offset, numel, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 256:
                self._views.clear()
            view = self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)
            self._views[key] = view
        return view

    def pack(self, form: struct.Struct, offset: int, *numbers: int) -> None:
        """Puts numbers there."""
        form.pack_into(self._memory, offset, *numbers)

    def unpack(self, form: struct.Struct, offset: int) -> tuple[Any, ...]:
        """The numbers there."""
        return form.unpack_from(self._memory, offset)

    def reserve(self, offset: int, size: int) -> None:
        """Makes sure that this part of the file has memory behind it: else touching it would be a bus error.

        Raises:
            SharedMemoryError: the file system is full.
        """
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            disk = os.fstatvfs(self._fd)
            raise SharedMemoryError(
                f"{error.strerror}: shared memory needs {size} bytes more, and {disk.f_bavail * disk.f_frsize} "
                f"of {disk.f_blocks * disk.f_frsize} are free; give it more (docker run --shm-size=8g) or set "
                'parallel.backend = "gloo"'
            ) from None

    def set(self, word: int, value: int) -> None:
        """Writes a word of this rank's and wakes who sleeps for it."""
        self.words[word] = value
        with self._fence:  # an atomic operation: the word is out before it is seen who sleeps
            asleep = self._sleepers != self._nobody
        if asleep:
            _futex(_FUTEX, self.address + 8 * word, _FUTEX_WAKE, _ALL, None)

    def asleep(self, threads: int) -> None:
        """Tells the others that one more (or, -1, one less) thread of this rank sleeps, and is to be woken."""
        with self._fence:
            self._sleepers[self.rank] += threads

    def examine(self, rank: int, word: int, target: int) -> str:
        """Why that rank will not bring the word to `target`, if it will not: a clause that begins with the rank."""
        peer = self.peers[rank]
        dead = peer.condition() == "dead"
        state = self.words[self.state(rank)]
        if self.words[word] >= target:  # its last deed
            return ""
        if dead:
            return f"rank {peer.rank} (process {peer.pid}) {HAS_DIED}"
        if state == self.LEFT:
            return f"rank {peer.rank} has left the group"
        if state == self.FAILED:
            return f"rank {peer.rank} has given the group up after an error"
        return ""

    def close(self, state: int = LEFT) -> None:
        """Tells the others that this rank takes no part any more. The memory stays as long as someone uses it."""
        if self.words[self.state(self.rank)] == 0:
            self.set(self.state(self.rank), state)
        if self._fd >= 0 and state == self.LEFT:
            os.close(self._fd)
            self._fd = -1


def sleep(waits: Sequence[tuple[Segment, int, int]], seconds: float) -> None:
    """Sleeps until one of the words (segment, word, target) reaches its target, or changes, or for so long at most.

    Before Linux 5.16 a process can sleep for one word only: then no longer than ALONE_SECONDS.
    """
    waits = waits[:_MOST_WAITERS]
    segments = {id(segment): segment for segment, _, _ in waits}.values()
    for segment in segments:
        segment.asleep(1)
    try:
        values = [segment.words[word] for segment, word, _ in waits]
        for value, (_, _, target) in zip(values, waits, strict=True):
            if value >= target:
                return
        addresses = [segment.address + 8 * word for segment, word, _ in waits]
        if len(waits) == 1 or not _sleep_for_any(values, addresses, seconds):
            seconds = seconds if len(waits) == 1 else min(seconds, ALONE_SECONDS)
            wait = _Timespec(int(seconds), int(seconds % 1 * 1e9))
            _futex(_FUTEX, addresses[0], _FUTEX_WAIT, values[0] & 0xFFFFFFFF, ctypes.byref(wait))
    finally:
        for segment in segments:
            segment.asleep(-1)


def _sleep_for_any(values: list[int], addresses: list[int], seconds: float) -> bool:
    """Sleeps until one of the words has another value; False where the system cannot."""
    waiters = (_Waiter * len(values))()
    for waiter, value, address in zip(waiters, values, addresses, strict=True):
        waiter.value, waiter.address, waiter.flags = value & 0xFFFFFFFF, address, _FUTEX_32_BITS
    end = time.clock_gettime(time.CLOCK_MONOTONIC) + seconds
    until = _Timespec(int(end), int(end % 1 * 1e9))
    done = _futex_waitv(
        _FUTEX_WAITV, ctypes.byref(waiters), len(waiters), 0, ctypes.byref(until), time.CLOCK_MONOTONIC
    )
    return done >= 0 or ctypes.get_errno() in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)


def _truncate(fd: int, size: int) -> None:
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)


def _reason(error: Exception, directory: Path) -> str:
    return f"no shared memory in {directory}: {error.strerror if isinstance(error, OSError) else error}"


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
