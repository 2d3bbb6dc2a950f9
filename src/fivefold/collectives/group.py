"""A process group for CPUs that runs on gloo or shared memory and records every collective.

torch's own ways of observing collectives miss some callers or slow down every tensor operation. A process group sees
every call of every caller (DDP's reducer, FSDP2, DTensor, functional collectives, pipelining, checkpoints), with its
tensors and its axis. It can also name rank, axis and collective when one fails.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Work

from fivefold.collectives.record import Primitive, Progress, Recorder
from fivefold.collectives.shared_memory.engine import Operation
from fivefold.collectives.shared_memory.transport import SharedGroup, SharedMemory
from fivefold.collectives.work import ENDED, RecordedWork, failure, one_by_one, outside_modes

BACKEND = "fivefold"

Tensors: TypeAlias = Tensor | list[Tensor] | list[list[Tensor]]
_NO_KEYWORDS: Mapping[str, Any] = {}


def register(recorder: Recorder, timeout: timedelta, shared: SharedMemory | None = None) -> str:
    """Makes the backend known to torch; returns its name for `dist.init_process_group`.

    With `shared`, ranks of one host communicate through shared memory, otherwise all through gloo.

    Every group made under that name records into `recorder` and has `timeout`, whatever timeout is passed for the
    group: torch would give the groups of a mesh its default of 30 minutes.

    Registering again (a second run in one process) replaces the registration: groups made from then on record
    into the new recorder, groups that exist keep theirs.
    """

    def create(options: Any, _: object) -> RecordingGroup:
        # `options` is torch's _DistributedBackendOptions, which has no public name.
        return RecordingGroup(
            options.store,
            options.group_rank,
            options.group_size,
            timeout,
            recorder,
            shared,
            # torch leaves it empty for the group of all ranks
            options.global_ranks_in_group or list(range(options.group_size)),
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return BACKEND


def _recorded(
    primitive: Primitive, counted: int, method: str, *, each: bool = False, parts: bool = False
) -> Callable[..., Work]:
    """A method of RecordingGroup that counts its argument number `counted` and calls gloo's `method`.

    `parts`: that argument is this rank's part only. `each`: gloo has no such call for several tensors.
    """

    def collective(group: "RecordingGroup", *args: Any, **kwargs: Any) -> Work:
        size = _bytes(args[counted])
        if parts:
            size *= len(group.global_ranks)
        start = getattr(group._transport, method)
        if each:
            start = partial(one_by_one, start)
        return group._run(primitive, size, start, args, kwargs)

    return collective


class RecordingGroup(dist.ProcessGroup):
    """Each method counts its call and passes it to the transport (gloo or shared memory) unchanged.

    Groups of one rank are not counted. A coalesced call counts once. `axis`, under which the group is recorded, comes
    from its description: "mesh_tp" (as DeviceMesh sets it) → "tp", the default group → "world", everything that
    begins with "checkpoint" → "checkpoint", others unchanged.

    Arguments that are not needed for counting are passed on as they are, so every overload works.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        recorder: Recorder,
        shared: SharedMemory | None,
        global_ranks: list[int],
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only constructor a subclass can use
        self.recorder = recorder
        self.global_ranks = global_ranks
        self.progress = Progress(rank, global_ranks)
        recorder.groups.append(self.progress)
        self._store = store
        self._transport: Any
        if shared is None or size == 1:
            self._transport = dist.ProcessGroupGloo(store, rank, size, timeout)
        else:
            self._transport = shared.connect(store, rank, global_ranks, timeout)

    # torch's method                    (primitive, argument counted, gloo's method)
    allreduce = _recorded("all_reduce", 0, "allreduce")
    allreduce_coalesced = _recorded("all_reduce", 0, "allreduce_coalesced")
    broadcast = _recorded("broadcast", 0, "broadcast")
    reduce = _recorded("reduce", 0, "reduce")
    allgather = _recorded("all_gather", 0, "allgather")
    allgather_coalesced = _recorded("all_gather", 0, "allgather_coalesced")
    all_gather_single = _recorded("all_gather", 0, "_allgather_base")
    all_gather_single_coalesced = _recorded("all_gather", 0, "_allgather_base", each=True)
    reduce_scatter = _recorded("reduce_scatter", 1, "reduce_scatter")
    reduce_scatter_single = _recorded("reduce_scatter", 1, "_reduce_scatter_base")
    reduce_scatter_single_coalesced = _recorded("reduce_scatter", 1, "_reduce_scatter_base", each=True)
    alltoall = _recorded("all_to_all", 1, "alltoall")
    all_to_all_single = _recorded("all_to_all", 1, "alltoall_base")
    gather = _recorded("gather", 1, "gather", parts=True)  # only the root has outputs,
    scatter = _recorded("scatter", 0, "scatter", parts=True)  # or inputs; all ranks count the same
    # the names before torch 2.13
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        return self._run("barrier", 0, self._transport.barrier, args, kwargs)

    # Point to point: these ranks are ranks within the group.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803  # torch's keyword
        return self._run("send", _bytes(tensors), self._transport.send, (tensors, dstRank, tag), peer=dstRank)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:  # noqa: N803
        return self._run("recv", _bytes(tensors), self._transport.recv, (tensors, srcRank, tag), peer=srcRank)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self._run("recv", _bytes(tensors), self._transport.recv_anysource, (tensors, tag))

    # Identity

    @property
    def axis(self) -> str:
        """The group's axis in the ledger."""
        return self.progress.axis

    def getBackendName(self) -> str:  # noqa: N802  # torch's virtual methods, called from C++
        return BACKEND  # not "gloo": DDP would look for a gloo group inside

    def getGroupName(self) -> str:  # noqa: N802
        return self.progress.name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.progress.name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description
        self.progress.axis = axis_of(description)

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"the {BACKEND} backend serves cpu only, not {device.type}")
        return self._transport

    # Gloo cannot abort: it ends when it is deleted, after the collectives in progress. Deleting it here rather than
    # when the interpreter exits keeps the exit of a process clean.

    def shutdown(self) -> None:
        if isinstance(self._transport, SharedGroup):
            self._transport.close()
        self._transport = None
        if self.progress in self.recorder.groups:
            self.recorder.groups.remove(self.progress)

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        self._transport.set_timeout(timeout)

    def _run(
        self,
        primitive: Primitive,
        size: int,
        start: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] = _NO_KEYWORDS,
        peer: int | None = None,
    ) -> Work:
        """Counts a call of `size` bytes and starts it."""
        progress = self.progress
        call = progress.enter(primitive, peer)
        if len(self.global_ranks) > 1:
            self.recorder.add(progress.axis, primitive, size)
        try:
            work = outside_modes(start)(*args, **kwargs)
            if isinstance(work, Operation) and work.awaited:  # here, with less ado than through a handle
                progress.waiting_since, progress.waiting = call.since, call
                try:
                    outside_modes(work.wait)()
                finally:
                    progress.waiting = None
                work = None
        except RuntimeError as error:
            raise failure(progress, call, error) from error
        self.recorder.expose(progress.axis, call.since)
        return ENDED if work is None else RecordedWork(work, progress, call, self.recorder)


def axis_of(description: str) -> str:
    """The axis of the group so described (see RecordingGroup)."""
    if description == "default_pg":
        return "world"
    if description.startswith("checkpoint"):
        return "checkpoint"
    return description.removeprefix("mesh_")


def _bytes(tensors: Tensors) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    if len(tensors) == 1:
        return _bytes(tensors[0])
    return sum(map(_bytes, tensors))
