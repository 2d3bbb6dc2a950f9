"""Shared memory under gloo's interface: what a process group calls."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Work

from fivefold.collectives.shared_memory.cores import Cores
from fivefold.collectives.shared_memory.engine import Engine, Lack, Lane, Operation, Steps
from fivefold.collectives.shared_memory.exchange import Exchange
from fivefold.collectives.shared_memory.hosts import Hosts
from fivefold.collectives.shared_memory.mailbox import Inbox, Outbox, receive
from fivefold.collectives.shared_memory.peers import Directory, Peer, this_host
from fivefold.collectives.shared_memory.reduction import kind_of
from fivefold.collectives.shared_memory.segment import Segment
from fivefold.collectives.shared_memory.span import Parts, Span, alike, each, even, overlap, uneven, whole

SLOT_BYTES = 1 << 20
RING_BYTES = 1 << 22
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class SharedMemory:
    """The memory this process shares with the other ranks of its host, over all its groups.

    Args:
        directory: of a file system in memory. The files made there have no names.
        host: which ranks are together; by default those whose memory this process can map.
        slot_bytes, ring_bytes: a group takes two slots per rank, and a ring per pair of ranks that exchange messages.
    """

    directory: Path = SHARED_MEMORY
    host: str = ""
    slot_bytes: int = SLOT_BYTES
    ring_bytes: int = RING_BYTES
    _engine: Engine | None = field(default=None, init=False)
    _known: Directory = field(init=False)

    def __post_init__(self) -> None:
        self._known = Directory(self.host or this_host(self.directory))

    def connect(self, store: Store, rank: int, global_ranks: list[int], timeout: timedelta) -> "SharedGroup":
        """What carries the collectives of a group. Collective over the group; `store` is its own.

        Raises:
            SharedMemoryError: the memory cannot be had.
        """
        peers = self._known.meet(store, rank, global_ranks)
        hosts = _by_host(peers)
        here = next(ranks for ranks in hosts if rank in ranks)
        if self._engine is None:
            self._engine = Engine(Cores([peers[i].pid for i in here if i != rank]))
        segment = Segment.shared(
            PrefixStore(f"host {here[0]}", store),
            [peers[i] for i in here],
            here.index(rank),
            self.directory,
            self.slot_bytes,
            self.ring_bytes,
        )
        local = Exchange(segment)
        if len(hosts) == 1:
            return SharedGroup(self._engine, segment, rank, here, timeout, local)
        whole = dist.ProcessGroupGloo(PrefixStore("whole", store), rank, len(peers), timeout)
        rail = whole
        if len(here) > 1:
            index = here.index(rank)
            rail_store = PrefixStore(f"rail {index}", store)
            rail = dist.ProcessGroupGloo(rail_store, hosts.index(here), len(hosts), timeout)
        spanning = Hosts(local, hosts, rank, rail, whole)
        return SharedGroup(self._engine, segment, rank, here, timeout, spanning, whole)


class SharedGroup:
    """The collectives of a group, as gloo's process group names them.

    Each returns at once with an operation under way; one whose caller waits for it, when it has ended (with nothing) or
    may take longer. Tensors may be of any strides.

    Args:
        rank: in the group.
        here: the group's ranks on this host: those of the segment, in its order.
        timeout: for what is waited for in the segment.
        collectives: of all ranks of the group.
        whole: gloo between all of them, if there are others than those here.
    """

    def __init__(
        self,
        engine: Engine,
        segment: Segment,
        rank: int,
        here: list[int],
        timeout: timedelta,
        collectives: Exchange | Hosts,
        whole: Any = None,
    ) -> None:
        engine.join()
        self._engine = engine
        self._segment = segment
        self._rank = rank
        self._here = here
        self._timeout_seconds = timeout.total_seconds()
        self._collectives = collectives
        self._whole = whole
        self._lane = Lane(engine, segment, self._check)
        self._out: dict[int, tuple[Outbox, Lane]] = {}
        self._in: dict[int, Inbox] = {}

    def allreduce(self, tensors: Any, opts: Any = dist.ReduceOp.SUM, timeout: Any = None) -> Operation | None:
        return self.allreduce_coalesced(_listed(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Operation | None:
        landing, kind = _Landing(), kind_of(opts)
        spans = [whole(landing.inout(tensor)) for tensor in tensors]
        if len(spans) == 1:
            return self._start(self._collectives.all_reduce(spans[0], kind), tensors, opts, landing)

        def steps() -> Steps:
            for span in spans:
                yield from self._collectives.all_reduce(span, kind)

        return self._start(steps(), tensors, opts, landing)

    def broadcast(self, tensors: Any, opts: Any, timeout: Any = None) -> Operation | None:
        landing, tensors = _Landing(), _listed(tensors)
        root = self._root(opts)
        steps = self._collectives.broadcast(whole(landing.inout(tensors[0])), root)
        return self._start(steps, tensors, opts, landing)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Operation | None:
        landing = _Landing()
        span = whole(landing.inout(tensors[0]))
        steps = self._collectives.reduce(span, self._root(opts), kind_of(opts))
        return self._start(steps, tensors, opts, landing)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Operation | None:
        landing = _Landing()
        self._match_each(outputs[0], inputs[0])
        places = each([landing.out(tensor) for tensor in outputs[0]])
        steps = self._collectives.all_gather(places, whole(dense(inputs[0])))
        return self._start(steps, outputs[0], opts, landing)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> Operation | None:
        landing = _Landing()
        sources = [whole(dense(tensor)) for tensor in inputs]
        # outputs[rank][i] is rank's inputs[i]
        for i, source in enumerate(inputs):
            self._match_each([row[i] for row in outputs], source)
        places = [each([landing.out(row[i]) for row in outputs]) for i in range(len(inputs))]

        def steps() -> Steps:
            for place, source in zip(places, sources, strict=True):
                yield from self._collectives.all_gather(place, source)

        return self._start(steps(), [tensor for row in outputs for tensor in row], opts, landing)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> Operation | None:
        landing = _Landing()
        places = even(landing.out(output), self._collectives.size)
        _match(output, places.sizes[0], source, source.nbytes)
        steps = self._collectives.all_gather(places, whole(dense(source)))
        return self._start(steps, [output], opts, landing)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> Operation | None:
        landing = _Landing()
        self._match_each(inputs[0], outputs[0])
        place = whole(landing.out(outputs[0]))
        sources = self._kept(each([dense(tensor) for tensor in inputs[0]]), place)
        steps = self._collectives.reduce_scatter(place, sources, kind_of(opts))
        return self._start(steps, outputs, opts, landing)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any) -> Operation | None:
        landing, source = _Landing(), dense(source)
        place, sources = whole(landing.out(output)), even(source, self._collectives.size)
        _match(output, place.nbytes, source, sources.sizes[0])
        if overlap(place.address, place.nbytes, sources.base, sum(sources.sizes)):
            sources = self._kept(sources, place)
        steps = self._collectives.reduce_scatter(place, sources, kind_of(opts))
        return self._start(steps, [output], opts, landing)

    def _kept(self, sources: Parts, place: Span) -> Parts:
        """The sources; copies of those that `place` would be written over before they are sent."""
        tensors = sources.vectors()
        for rank, size in enumerate(sources.sizes):
            address = sources.address(rank)
            is_own = rank == self._rank and address == place.address
            if not is_own and overlap(place.address, place.nbytes, address, size):
                tensors[rank] = tensors[rank].clone()
        return each(tensors)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Operation | None:
        landing = _Landing()
        self._count(outputs)
        self._count(inputs)
        places = each([landing.out(tensor) for tensor in outputs])
        sources = each([dense(tensor) for tensor in inputs])
        for tensor in (*outputs, *inputs):
            _match(tensor, 0, inputs[0], 0)
        _match(outputs[0], places.sizes[self._rank], inputs[0], sources.sizes[self._rank])
        steps = self._collectives.all_to_all(places, sources, even=False)
        return self._start(steps, outputs, opts, landing)

    def alltoall_base(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Operation | None:
        """The splits are in rows of the tensors; empty ones are even."""
        landing, size = _Landing(), self._collectives.size
        place, source = landing.out(output), dense(source)
        places = uneven(place, output_splits) if output_splits else even(place, size)
        is_even = not output_splits and not input_splits
        if is_even:
            _match(place, place.nbytes, source, source.nbytes)
            sources = alike(source, places)
        else:
            sources = uneven(source, input_splits) if input_splits else even(source, size)
            _match(place, places.sizes[self._rank], source, sources.sizes[self._rank])
        if overlap(places.base, sum(places.sizes), sources.base, sum(sources.sizes)):
            sources = alike(source.data.clone(), sources)
        steps = self._collectives.all_to_all(places, sources, even=is_even)
        return self._start(steps, [output], opts, landing)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Operation | None:
        landing, root = _Landing(), self._root(opts)
        if self._rank == root:
            self._match_each(outputs[0], inputs[0])
        places = each([landing.out(tensor) for tensor in outputs[0]] if self._rank == root else [])
        steps = self._collectives.gather(places, whole(dense(inputs[0])), root)
        return self._start(steps, outputs[0] if places.tensors else [], opts, landing)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Operation | None:
        landing, root = _Landing(), self._root(opts)
        if self._rank == root:
            self._match_each(inputs[0], outputs[0])
        sources = each([dense(tensor) for tensor in inputs[0]] if self._rank == root else [])
        steps = self._collectives.scatter(whole(landing.out(outputs[0])), sources, root)
        return self._start(steps, outputs, opts, landing)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Operation | None:
        return self._start(self._collectives.barrier(), [], opts, _Landing())

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Operation | Work:
        if receiver not in self._here:
            return self._elsewhere(receiver).send(tensors, receiver, tag)  # type: ignore[no-any-return]
        if receiver not in self._out:
            lane = Lane(self._engine, self._segment, self._check)
            self._out[receiver] = Outbox(self._segment, self._here.index(receiver)), lane
        box, lane = self._out[receiver]
        operation = Operation(self._engine, box.send(dense(tensors[0]), tag), tensors)
        return lane.start(operation)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Operation | Work:
        if sender not in self._here:
            return self._elsewhere(sender).recv(tensors, sender, tag)  # type: ignore[no-any-return]
        return self._receive(tensors, [sender], tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Operation:
        if self._whole is not None:
            raise RuntimeError("a receive must name its sender in a group that spans hosts")
        return self._receive(tensors, [rank for rank in self._here if rank != self._rank], tag)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_seconds = timeout.total_seconds()

    def close(self) -> None:
        """Leaves the group."""
        lanes = [self._lane, *(lane for _, lane in self._out.values()), *self._in.values()]
        with self._engine.lock:
            self._segment.close()
            for lane in lanes:
                lane.fail(RuntimeError("the group has been destroyed"))
        self._engine.leave()
        del self._collectives, self._whole  # gloo lets go when it is deleted

    def _start(self, steps: Steps, tensors: list[Tensor], opts: Any, landing: "_Landing") -> Operation | None:
        if landing:
            steps = landing.after(steps)
        if getattr(opts, "asyncOp", True):
            return self._lane.start(Operation(self._engine, steps, tensors))
        return self._lane.run(steps, tensors)

    def _root(self, opts: Any) -> int:
        root: int = opts if isinstance(opts, int) else opts.rootRank
        if not 0 <= root < self._collectives.size:
            raise RuntimeError(f"root {root} is none of the group's {self._collectives.size} ranks")
        return root

    def _elsewhere(self, rank: int) -> Any:
        """What reaches a rank that is not on this host."""
        if self._whole is None:
            raise RuntimeError(f"{rank} is none of the group's {self._collectives.size} ranks")
        return self._whole

    def _count(self, tensors: list[Tensor]) -> None:
        if len(tensors) != self._collectives.size:
            raise RuntimeError(f"tensors given: {len(tensors)}, ranks: {self._collectives.size}")

    def _match_each(self, tensors: list[Tensor], one: Tensor) -> None:
        """Raises RuntimeError unless there is a tensor for each rank, of the type and size of that one."""
        self._count(tensors)
        for tensor in tensors:
            _match(tensor, tensor.nbytes, one, one.nbytes)

    def _receive(self, tensors: list[Tensor], senders: list[int], tag: int) -> Operation:
        for rank in senders:
            if rank not in self._in:
                self._in[rank] = Inbox(self._engine, self._segment, rank, self._here, self._check)
        _check_place(tensors[0])
        if not tensors[0].is_contiguous():
            raise RuntimeError("a message is received into a contiguous tensor only")
        return receive(self._engine, [self._in[rank] for rank in senders], tensors[0], tag)

    def _check(self, lack: Lack | None, seconds: float) -> None:
        """Raises RuntimeError if what an operation lacks will not come, or has not come in time."""
        if lack is None:
            return
        if reason := self._segment.examine(lack.rank, lack.word, lack.target):
            raise RuntimeError(reason)
        if seconds > self._timeout_seconds:
            peer = self._segment.peers[lack.rank]
            stopped = f", which is stopped (process {peer.pid})" if peer.condition() == "stopped" else ""
            raise RuntimeError(
                f"Timed out waiting {self._timeout_seconds * 1000:.0f}ms for rank {peer.rank}{stopped}"
            )


def _by_host(peers: list[Peer]) -> list[list[int]]:
    """The ranks of a group by host. Where hosts have different numbers of them, each rank is one by itself."""
    hosts: dict[str, list[int]] = {}
    for rank, peer in enumerate(peers):
        hosts.setdefault(peer.host, []).append(rank)
    if len({len(ranks) for ranks in hosts.values()}) > 1:
        return [[rank] for rank in range(len(peers))]
    return list(hosts.values())


class _Landing(list[tuple[Tensor, Tensor]]):
    """Where results land whose own memory is not contiguous, until they are copied there."""

    def out(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor to write instead of this one."""
        if tensor.is_contiguous() and tensor.is_cpu:
            return tensor
        _check_place(tensor)
        self.append((tensor, torch.empty(tensor.shape, dtype=tensor.dtype)))
        return self[-1][1]

    def inout(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor to read and write instead of this one."""
        place = self.out(tensor)
        if place is not tensor:
            place.copy_(tensor.data)
        return place

    def after(self, steps: Steps) -> Steps:
        """The steps, then the copies."""
        yield from steps
        for tensor, place in self:
            tensor.data.copy_(place)


def dense(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, to be read."""
    if tensor.is_contiguous() and tensor.is_cpu:
        return tensor
    _check_place(tensor)
    return tensor.data.contiguous()


def _check_place(tensor: Tensor) -> None:
    if not tensor.is_cpu:
        raise RuntimeError(f"a tensor is on {tensor.device}, this backend carries tensors of the cpu only")


def _match(one: Tensor, one_bytes: int, other: Tensor, other_bytes: int) -> None:
    """Raises RuntimeError unless so many bytes of these tensors can be exchanged for each other."""
    if one_bytes != other_bytes or one.dtype != other.dtype:
        raise RuntimeError(
            f"{one_bytes} bytes of {one.dtype} cannot be exchanged for {other_bytes} bytes of {other.dtype}: "
            "output and input must have one type, and the size of what each rank sends or receives"
        )


def _listed(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors
