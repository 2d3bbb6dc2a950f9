"""One rank's session: its rank, device, default process group and traffic recorder."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from fivefold.collectives.dispatch import DispatchRecorder
from fivefold.collectives.group import register
from fivefold.collectives.hang_watch import HangWatch
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.segment import SharedMemoryError
from fivefold.collectives.shared_memory.transport import SharedMemory
from fivefold.config.errors import BadInput
from fivefold.trainer import machine
from fivefold.trainer.agreement import Agreement
from fivefold.trainer.place import Place, open_store

T = TypeVar("T")
POLL_SECONDS = 0.05
HANG_SECONDS = 8.0
"""A wait this long is explained on stderr: which ranks have not entered the collective, and where they are."""


@dataclass(frozen=True, slots=True)
class Session:
    """What a rank has for the duration of the run."""

    rank: int
    world_size: int
    ranks_per_host: int
    device: torch.device
    recorder: Recorder
    agreement: Agreement
    store: Store
    backend: str
    wrapped: bool

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0

    def profiled(self) -> AbstractContextManager[object]:
        """Records the traffic of one step where the process group itself does not (NCCL)."""
        return nullcontext() if self.wrapped else DispatchRecorder(self.recorder)

    def from_main(self, make: Callable[[], T]) -> T:
        """Calls `make` on rank 0 and returns its result on every rank. Collective.

        The other ranks wait as long as it takes, unless rank 0 dies: tokenizing a corpus takes longer than any timeout
        of a collective.

        Raises:
            BadInput: on every rank, if `make` raised it on rank 0.
        """
        if self.world_size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = make()
            except BadInput as error:
                box[1] = str(error)
            self._announce()
        else:
            self._await_main()
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise BadInput(box[1])
        return box[0]  # type: ignore[no-any-return]

    def _announce(self) -> None:
        self.store.set(f"from_main/{self.store.add('announced', 1)}", "")

    def _await_main(self) -> None:
        count = self.store.add(f"awaited/{self.rank}", 1)
        while not self.store.check([f"from_main/{count}"]):
            time.sleep(POLL_SECONDS)


def torch_backend(backend: str, device: torch.device, recorder: Recorder, timeout: timedelta) -> str:
    """The backend name to pass to `dist.init_process_group` for a `parallel.backend`.

    Raises:
        BadInput: the backend is not available on this machine.
    """
    if backend == "shm":
        if device.type != "cpu" or not machine.shares_memory():
            raise BadInput("parallel.backend = shm: for CPUs, on Linux and x86-64; set default")
        return register(recorder, timeout, SharedMemory())
    if not dist.is_backend_available(backend):
        raise BadInput(f"parallel.backend = {backend}: not in this torch; set gloo or default")
    return register(recorder, timeout) if backend == "gloo" else backend


@contextmanager
def open_session(place: Place | None, backend: str, timeout_seconds: float) -> Iterator[Session]:
    """Initialises the default process group, and destroys it if the body ends without an error.

    Args:
        place: this process's rank in its job; None for a run of one process.
        backend: `parallel.backend`.
        timeout_seconds: a collective that takes longer is an error.
    """
    rank, world_size = (place.rank, place.world_size) if place else (0, 1)
    per_host = place.local_world_size if place else 1
    device = machine.device(place.local_rank if place else 0)
    recorder = Recorder()
    timeout = timedelta(seconds=timeout_seconds)
    if backend == "default":
        backend = machine.default_backend(device)
    name = torch_backend(backend, device, recorder, timeout)
    store = open_store(place, timeout_seconds) if place else HashStore()
    try:
        dist.init_process_group(name, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except SharedMemoryError as error:
        raise BadInput(str(error)) from None
    wrapped = name != backend
    with HangWatch(recorder, store, rank, seconds=HANG_SECONDS):
        agreement = Agreement(device)
        yield Session(rank, world_size, per_host, device, recorder, agreement, store, backend, wrapped)
    dist.barrier()  # a rank that leaves early breaks the connections of the others
    dist.destroy_process_group()
