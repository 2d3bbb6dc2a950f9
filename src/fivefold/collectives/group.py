"""A process group for CPU that runs on gloo and records what passes through it.

torch's own ways of watching collectives are blind to some callers or tax every tensor operation; a process
group sees every call of every caller (DDP's reducer, FSDP2, DTensor, functional collectives, pipelining,
checkpoints), with its tensors and its axis. It is also the one place that can say in plain words what broke.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Work

from fivefold.collectives.record import Primitive, Recorder

BACKEND = "fivefold"

_NO_TIMEOUT = timedelta(0)  # torch's way of saying so

Tensors: TypeAlias = Tensor | list[Tensor] | list[list[Tensor]]


class CollectiveError(RuntimeError):
    """A collective failed: one line with this rank, the collective, its number, the axis and the peers."""


def register(recorder: Recorder, timeout: timedelta) -> str:
    """Makes the backend known to torch; returns its name for `dist.init_process_group`.

    Every group made under that name records into `recorder` and gives up on a collective after `timeout`,
    whatever is passed to the group itself: torch gives the groups of a mesh its own default of 30 minutes.

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
            # torch leaves it empty for the group of all ranks
            options.global_ranks_in_group or list(range(options.group_size)),
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return BACKEND


def _recorded(
    primitive: Primitive, counted: int, method: str, *, one_by_one: bool = False, parts: bool = False
) -> Callable[..., Work]:
    """A method of RecordingGroup that counts its argument number `counted` and calls gloo's `method`.

    `parts`: that argument is this rank's part only. `one_by_one`: gloo has no such call for several tensors.
    """

    def collective(group: "RecordingGroup", *args: Any, **kwargs: Any) -> Work:
        size = _bytes(args[counted]) * (len(group.global_ranks) if parts else 1)
        start = getattr(group._gloo, method)
        if one_by_one:
            return group._run(primitive, size, lambda: _each(start, *args, **kwargs))
        return group._run(primitive, size, lambda: start(*args, **kwargs))

    return collective


class RecordingGroup(dist.ProcessGroup):
    """Gloo, recorded: each method counts its call and hands it to gloo unchanged.

    A group of one rank is not counted, since nothing passes between ranks. A coalesced call counts once.
    `axis` is the group's place in the ledger, taken from its description: "mesh_tp" (what DeviceMesh gives) →
    "tp", the default group → "world", all that begins with "checkpoint" → "checkpoint", any other as it is.

    The arguments are torch's; what the count does not need is passed on unseen, so every overload works.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        recorder: Recorder,
        global_ranks: list[int],
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the only constructor a subclass can use
        self.recorder = recorder
        self.global_ranks = global_ranks
        self.number = 0  # of the collective entered last
        self._store = store
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    # torch's method                    (primitive, argument counted, gloo's method)
    allreduce = _recorded("all_reduce", 0, "allreduce")
    allreduce_coalesced = _recorded("all_reduce", 0, "allreduce_coalesced")
    broadcast = _recorded("broadcast", 0, "broadcast")
    reduce = _recorded("reduce", 0, "reduce")
    allgather = _recorded("all_gather", 0, "allgather")
    allgather_coalesced = _recorded("all_gather", 0, "allgather_coalesced")
    all_gather_single = _recorded("all_gather", 0, "_allgather_base")
    all_gather_single_coalesced = _recorded("all_gather", 0, "_allgather_base", one_by_one=True)
    reduce_scatter = _recorded("reduce_scatter", 1, "reduce_scatter")
    reduce_scatter_single = _recorded("reduce_scatter", 1, "_reduce_scatter_base")
    reduce_scatter_single_coalesced = _recorded("reduce_scatter", 1, "_reduce_scatter_base", one_by_one=True)
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
        return self._run("barrier", 0, lambda: self._gloo.barrier(*args, **kwargs))

    # Point to point: these ranks are ranks within the group.

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Work:  # noqa: N803  # torch's keyword
        return self._run("send", _bytes(tensors), lambda: self._gloo.send(tensors, dstRank, tag), dstRank)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Work:  # noqa: N803
        return self._run("recv", _bytes(tensors), lambda: self._gloo.recv(tensors, srcRank, tag), srcRank)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        return self._run("recv", _bytes(tensors), lambda: self._gloo.recv_anysource(tensors, tag))

    # Identity

    @cached_property
    def axis(self) -> str:
        """The group's axis in the ledger. First read in a collective, when torch has set the description."""
        return axis_of(self.group_desc)

    def getBackendName(self) -> str:  # noqa: N802  # torch's virtual methods, called from C++
        return BACKEND  # not "gloo": DDP would look for a gloo group inside

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"the {BACKEND} backend serves cpu only, not {device.type}")
        return self._gloo

    # Gloo cannot abort: it lets go when it is deleted, after the collectives under way. Deleting it here, not
    # when the interpreter ends, is what keeps the end of a process clean.

    def shutdown(self) -> None:
        self._gloo = None

    def abort(self) -> None:
        self._gloo = None

    def set_timeout(self, timeout: timedelta) -> None:
        self._gloo.set_timeout(timeout)

    def failure(
        self, primitive: Primitive, number: int, error: RuntimeError, peer: int | None
    ) -> CollectiveError:
        """The one line for gloo's `error` in that collective; `peer` is the other end of a send or recv."""
        me = self.rank()
        peers = [r for i, r in enumerate(self.global_ranks) if i != me and peer in (None, i)]
        others = (
            f"with rank{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}" if peers else "alone"
        )
        return CollectiveError(
            f"rank {self.global_ranks[me]}: {primitive} number {number} on axis {self.axis} {others} failed: "
            f"{_cause(error)}"
        )

    def _run(
        self, primitive: Primitive, size: int, start: Callable[[], Work], peer: int | None = None
    ) -> Work:
        """Counts a collective of `size` bytes and starts it."""
        self.number = number = self.number + 1
        self.recorder.last = (self.axis, primitive, number)
        if len(self.global_ranks) > 1:
            self.recorder.add(self.axis, primitive, size)
        try:
            work = start()
        except RuntimeError as error:
            raise self.failure(primitive, number, error, peer) from error
        return _RecordedWork(work, self, primitive, number, peer)


class _RecordedWork(Work):
    """Gloo's work, whose wait() raises CollectiveError."""

    def __init__(
        self, work: Work, group: RecordingGroup, primitive: Primitive, number: int, peer: int | None
    ) -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._call = (primitive, number, peer)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        try:
            return self._work.wait(timeout)
        except RuntimeError as error:
            primitive, number, peer = self._call
            raise self._group.failure(primitive, number, error, peer) from error

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
    return sum(map(_bytes, tensors))


def _each(
    start: Callable[..., Work], outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any
) -> Work:
    works = [start(o, i, *args, **kwargs) for o, i in zip(outputs, inputs, strict=True)]
    return works[0] if len(works) == 1 else _AllOf(works)


def _cause(error: RuntimeError) -> str:
    """Gloo's message without the place in its source, its advice and its line breaks."""
    text = re.sub(r"\[[^\[\]]*\.(cc|cpp|h):\d+\]\s*", "", str(error))
    return " ".join(text.partition(". This is typically")[0].split())
