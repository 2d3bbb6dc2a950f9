"""Runs a program of `ledger.programs` over the point-to-point messages of any process group.

What a program costs and how it is drawn is derived from the same rounds that are sent here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fivefold.ledger.programs.steps import Program, bounds

Operation = Literal["sum", "mean", "max", "min"]
OPERATIONS: tuple[Operation, ...] = ("sum", "mean", "max", "min")

_COMBINE: dict[Operation, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda own, other: own.add_(other),
    "mean": lambda own, other: own.add_(other),
    "max": lambda own, other: torch.maximum(own, other, out=own),
    "min": lambda own, other: torch.minimum(own, other, out=own),
}


@dataclass(frozen=True, slots=True)
class _Message:
    """Chunks that one rank sends another in a round, in the order both know."""

    peer: int  # within the group
    chunks: tuple[int, ...]
    reduce: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Round:
    """What one rank does in a round."""

    sends: tuple[_Message, ...]
    receives: tuple[_Message, ...]


class Execution:
    """A program prepared for one rank of a group; its collective may run any number of times.

    Every rank makes one from an equal program and calls the same method, which returns when this rank's part is done.
    Tensors are contiguous, of equal length and dtype on all ranks; any length is allowed, also 0, and chunks are as
    equal as possible. Sums use the tensor's own dtype in an order fixed by the program, so results have the same bits
    in every run and, after an all-reduce, on every rank.
    """

    def __init__(self, program: Program, group: dist.ProcessGroup | None = None) -> None:
        self.program = program
        self._group = group if group is not None else dist.group.WORLD
        if self._group is None or self._group.size() != program.ranks:
            size = "no group" if self._group is None else f"a group of {self._group.size()}"
            raise ValueError(f"a program for {program.ranks} ranks in {size}")
        self.rank = self._group.rank()
        self._rounds = [_round(round_, self.rank) for round_ in program]

    def all_reduce(self, tensor: Tensor, operation: Operation = "sum") -> None:
        """Reduces `tensor` over all ranks, in place."""
        flat = self._flat(tensor, "all_reduce")
        self._run(_cut(flat, self.program.chunks), operation)
        _finish(flat, operation, self.program.ranks)

    def broadcast(self, tensor: Tensor) -> None:
        """The root's `tensor`, on every rank."""
        self._run(_cut(self._flat(tensor, "broadcast"), self.program.chunks))

    def all_gather(self, output: Tensor, part: Tensor) -> None:
        """Every rank's `part` in rank order. Rank r's is as long as part r of `output` cut evenly."""
        chunks = _cut(self._flat(output, "all_gather"), self.program.ranks)
        _same_length(part, chunks[self.rank], "part")
        chunks[self.rank].copy_(part.view(-1))
        self._run(chunks)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, operation: Operation = "sum") -> None:
        """This rank's part of `tensor` (left as it is), reduced over all ranks."""
        chunks = _cut(self._flat(tensor, "reduce_scatter").clone(), self.program.ranks)
        _same_length(output, chunks[self.rank], "output")
        self._run(chunks, operation)
        flat = output.view(-1).copy_(chunks[self.rank])
        _finish(flat, operation, self.program.ranks)

    def all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        """Part d of every rank's `tensor` to rank d, in `output` in rank order: all equal parts."""
        ranks, rank = self.program.ranks, self.rank
        if tensor.numel() % ranks or output.numel() != tensor.numel():
            raise ValueError(
                f"all_to_all over {ranks} ranks of {tensor.numel()} into {output.numel()} elements"
            )
        given, taken = _cut(self._flat(tensor, "all_to_all"), ranks), _cut(output.view(-1), ranks)
        taken[rank].copy_(given[rank])
        chunks = {rank * ranks + target: part for target, part in enumerate(given)}
        chunks |= {source * ranks + rank: part for source, part in enumerate(taken) if source != rank}
        for passing in {
            chunk for round_ in self._rounds for message in round_.receives for chunk in message.chunks
        }:
            if passing not in chunks:  # on its way from one rank to another
                chunks[passing] = torch.empty_like(given[0])
        self._run(chunks)

    def _flat(self, tensor: Tensor, primitive: str) -> Tensor:
        if self.program.primitive != primitive:
            raise ValueError(
                f"{self.program.name} is a program for {self.program.primitive}, not {primitive}"
            )
        return tensor.view(-1)

    def _run(self, chunks: "Sequence[Tensor] | Mapping[int, Tensor]", operation: Operation = "sum") -> None:
        """Receives are posted a round ahead. gloo sends nothing before it has word that it is awaited, and over a slow
        link this word presumably queues behind data that go the same way. Not so with NCCL: a batch that holds a
        receive of the next round would not end before the peer's next batch, nor that one begin."""
        combine = _COMBINE[operation]
        landings = self._landings(0, chunks)
        early = next(iter(chunks.values() if isinstance(chunks, Mapping) else chunks)).device.type == "cpu"
        arriving = _begin([landing.receive for landing in landings]) if early else []
        for number, round_ in enumerate(self._rounds):
            following = self._landings(number + 1, chunks)
            messages = [
                (message, _packed([chunks[chunk] for chunk in message.chunks])) for message in round_.sends
            ]
            sends = [
                self._message(dist.isend, packed, message) for message, packed in messages if packed.numel()
            ]
            if early:
                works, arriving = arriving, _begin([landing.receive for landing in following])
                works += _begin(sends)
            else:
                works = _begin([landing.receive for landing in landings] + sends)
            for work in works:
                work.wait()
            for landing in landings:
                landing.settle(combine)
            landings = following

    def _landings(self, number: int, chunks: "Sequence[Tensor] | Mapping[int, Tensor]") -> "list[_Landing]":
        """Where what this rank receives in a round lands: in the chunks' own memory if nothing there is needed until
        then, in that round and the one before."""
        if number >= len(self._rounds):
            return []
        near = self._rounds[max(0, number - 1) : number]
        needed = {chunk for round_ in near for message in round_.receives for chunk in message.chunks}
        for round_ in (*near, self._rounds[number]):
            needed |= {chunk for message in round_.sends for chunk in message.chunks}
        landings = []
        for message in self._rounds[number].receives:
            parts = [chunks[chunk] for chunk in message.chunks]
            direct = not any(message.reduce) and needed.isdisjoint(message.chunks) and _adjacent(parts)
            place = _span(parts) if direct else parts[0].new_empty(sum(part.numel() for part in parts))
            if place.numel():
                receive = self._message(dist.irecv, place, message)
                landings.append(_Landing(receive, place, () if direct else parts, message.reduce))
        return landings

    def _message(self, start: Callable[..., object], place: Tensor, message: _Message) -> dist.P2POp:
        return dist.P2POp(start, place, group=self._group, group_peer=message.peer)


@dataclass(frozen=True, slots=True)
class _Landing:
    """A message to be received: into `place`, from where it goes to `parts`, if it does not land there directly."""

    receive: dist.P2POp
    place: Tensor
    parts: Sequence[Tensor]
    reduce: tuple[bool, ...]

    def settle(self, combine: Callable[[Tensor, Tensor], object]) -> None:
        if self.parts:
            received = torch.split(self.place, [part.numel() for part in self.parts])
            for own, other, reduce in zip(self.parts, received, self.reduce, strict=True):
                if reduce:
                    combine(own, other)
                else:
                    own.copy_(other)


def _begin(messages: list[dist.P2POp]) -> list[Work]:
    return dist.batch_isend_irecv(messages) if messages else []


def _round(transfers: Sequence[tuple[int, int, int, bool]], rank: int) -> _Round:
    sends: dict[int, list[tuple[int, bool]]] = {}
    receives: dict[int, list[tuple[int, bool]]] = {}
    for source, target, chunk, reduce in transfers:
        if source == rank:
            sends.setdefault(target, []).append((chunk, reduce))
        if target == rank:
            receives.setdefault(source, []).append((chunk, reduce))
    return _Round(_messages(sends), _messages(receives))


def _messages(found: Mapping[int, Sequence[tuple[int, bool]]]) -> tuple[_Message, ...]:
    return tuple(
        _Message(peer, tuple(chunk for chunk, _ in items), tuple(reduce for _, reduce in items))
        for peer, items in ((peer, sorted(items)) for peer, items in found.items())
    )


def _cut(flat: Tensor, parts: int) -> list[Tensor]:
    return [flat[start:end] for start, end in pairwise(bounds(flat.numel(), parts))]


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether the parts follow each other in memory."""
    return all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parts) if a.numel() and b.numel())


def _span(parts: Sequence[Tensor]) -> Tensor:
    """Adjacent parts as one tensor on the same memory."""
    first = next((part for part in parts if part.numel()), parts[0])
    return first.as_strided((sum(part.numel() for part in parts),), (1,))


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one message; a copy only where they are apart."""
    if len(parts) == 1:
        return parts[0]
    return _span(parts) if _adjacent(parts) else torch.cat(list(parts))


def _finish(flat: Tensor, operation: Operation, ranks: int) -> None:
    if operation == "mean":
        rounding = None if flat.is_floating_point() else "trunc"  # as NCCL does for whole numbers
        torch.div(flat, ranks, rounding_mode=rounding, out=flat)


def _same_length(tensor: Tensor, expected: Tensor, name: str) -> None:
    if tensor.numel() != expected.numel():
        raise ValueError(f"{name}: {tensor.numel()} elements, where this rank's part has {expected.numel()}")
