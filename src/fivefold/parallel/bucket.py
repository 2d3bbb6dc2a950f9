"""A bucket: parameters that data parallel gathers, and gradients that it reduces, as one flat tensor."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from fivefold.collectives.compression import Compressor
from fivefold.collectives.compression.flat import summed
from fivefold.parallel.synchronise import Collectives, Pending
from fivefold.spec.parts import shard_range, sharded_dim


@dataclass(frozen=True, slots=True)
class Division:
    """How a bucket is distributed over the data-parallel ranks.

    Attributes:
        shard: the ranks that ZeRO shards it over; None = every rank keeps all of it.
        replicate: the ranks that keep the same shard; None = there is one.
        zero: the ZeRO stage.
        compute: dtype of the parameters that forward and backward read.
        master: dtype of what the optimizer updates, and of gradient sums.
    """

    shard: Collectives | None
    replicate: Collectives | None
    zero: int
    compute: torch.dtype
    master: torch.dtype


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter's place in its bucket.

    Attributes:
        parameter: what the module computes with: the unsharded parameter.
        storage: the flat tensor that `parameter` is a view of, padded to a multiple of the shards.
        value: this rank's shard of it, which the optimizer updates.
        shard_numel: elements of one shard, padding included.
        offset: of the shard in the rank's flat shard of the whole bucket, in elements.
        lead: product of the dims before the sharded one.
    """

    parameter: nn.Parameter
    storage: Tensor
    value: nn.Parameter
    shard_numel: int
    offset: int
    lead: int

    def by_shard(self, flat: Tensor, shards: int) -> Tensor:
        """`flat`, the padded parameter, as `[shards, lead, rest]`."""
        return flat.view(self.lead, shards, self.shard_numel // self.lead).transpose(0, 1)

    def of(self, bucket: Tensor) -> Tensor:
        """The parameter's place in the flat bucket `[shards, shard length]`, as `[shards, lead, rest]`."""
        own = bucket[:, self.offset : self.offset + self.shard_numel]
        return own.view(len(bucket), self.lead, self.shard_numel // self.lead)


class Bucket:
    """Some parameters of a module on one rank.

    A gathered bucket is `[shards, shard length]`: each rank's shards of all its parameters one after the other.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], division: Division, device: torch.device) -> None:
        self.division = division
        self.shards = division.shard.ranks if division.shard else 1
        self.index = division.shard.rank if division.shard else 0
        self.gathers = division.shard is not None
        self._slots: list[_Slot] = []
        apart = self.gathers or division.compute != division.master
        self._shard = torch.zeros(
            sum(map(self._shard_numel, shapes)) if apart else 0, dtype=division.master, device=device
        )
        offset = 0
        for shape in shapes:
            shard_numel, dim = self._shard_numel(shape), sharded_dim(shape, self.shards)
            storage = torch.empty(self.shards * shard_numel, dtype=division.compute, device=device)
            parameter = nn.Parameter(storage[: prod(shape)].view(shape))
            parameter.grad_dtype = division.master
            if self.gathers:
                storage.untyped_storage().resize_(0)
            value = parameter
            if apart:
                start, stop = shard_range(shape[dim], self.shards, self.index)
                own = (*shape[:dim], stop - start, *shape[dim + 1 :])
                value = nn.Parameter(self._shard[offset : offset + prod(own)].view(own))
            self._slots.append(_Slot(parameter, storage, value, shard_numel, offset, prod(shape[:dim])))
            offset += shard_numel
        self._length = offset
        self._gathered: Tensor | None = None
        self._gathering: Pending | None = None
        self._is_whole = not self.gathers
        self._sent: Tensor | None = None
        self._reducing: Pending | None = None
        self._reduced: Tensor | None = None
        self._gradient: Tensor | None = None
        self._arrived = 0
        self._is_reduced = False
        self.compressor: Compressor | None = None
        self.place = (0, 1)
        self._names: Sequence[str] = ()
        self._exact: Collection[str] = ()

    def compress(
        self,
        compressor: Compressor | None,
        names: Sequence[str],
        exact: Collection[str],
        place: tuple[int, int],
    ) -> None:
        """From now on sums over the replicas go through `compressor`.

        Args:
            names: of the bucket's parameters, in its order.
            exact: names of parameters that are summed uncompressed.
            place: (index, count): of the `count` groups of replicas that hold different parts of these parameters,
                this rank is in the one numbered `index`.
        """
        self._names = names
        self._exact = exact
        self.place = place
        self.compressor = compressor
        if compressor is not None:
            named = zip(names, self.values, strict=True)
            compressor.prepare(
                [(name, torch.zeros_like(value)) for name, value in named if name not in exact]
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self._slots]

    @property
    def values(self) -> list[nn.Parameter]:
        return [slot.value for slot in self._slots]

    # Parameters

    def refresh(self, *, gather: bool) -> None:
        """After `values` have changed: casts them to the parameters. A sharded bucket is gathered: `gather` starts that
        now, else it starts when the parameters are used."""
        if self.compressor is not None:
            self.compressor.memory.settle(True)
        if self.gathers:
            self._is_whole = False
            self._discard_gather()  # one under way has the values of before (a checkpoint loaded right after the start)
            if gather:
                self.start_gather()
        elif len(self._shard):
            for slot in self._slots:
                slot.parameter.data.copy_(slot.value.data)

    def start_gather(self) -> None:
        """Starts the all-gather of the shards, unless it is done or under way."""
        if self._is_whole or self._gathering is not None:
            return
        own = self._shard.to(self.division.compute)
        self._gathered = own.new_empty(self.shards * self._length)
        assert self.division.shard is not None
        self._gathering = self.division.shard.all_gather(self._gathered, own)

    def finish_gather(self) -> None:
        """Waits until the parameters are gathered."""
        if self._is_whole:
            return
        self.start_gather()
        assert self._gathering is not None
        assert self._gathered is not None
        self._gathering.wait()
        gathered = self._gathered.view(self.shards, self._length)
        for slot in self._slots:
            slot.storage.untyped_storage().resize_(slot.storage.numel() * slot.storage.element_size())
            # .data, so that autograd's check for in-place changes does not see this copy
            slot.by_shard(slot.storage.data, self.shards).copy_(slot.of(gathered))
        self._gathering = self._gathered = None
        self._is_whole = True

    def reshard(self) -> None:
        """Frees the gathered parameters under zero 3."""
        if not self.gathers or self.division.zero < 3:
            return
        self._discard_gather()
        for slot in self._slots:
            slot.storage.untyped_storage().resize_(0)
        self._is_whole = False

    def _discard_gather(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = self._gathered = None

    # Gradients

    def on_complete(self, call: Callable[["Bucket"], None]) -> None:
        """Calls `call` in backward as soon as every parameter has its gradient."""

        def arrived(_parameter: Tensor) -> None:
            self._arrived += 1
            if self._arrived == len(self._slots):
                call(self)

        for slot in self._slots:
            slot.parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Resets what `on_complete` counts; call it before each backward."""
        self._arrived, self._is_reduced = 0, False

    def is_due(self, last: bool) -> bool:
        """Whether gradients are reduced after this backward: zero 2 and 3 keep them sharded, so after each."""
        return not self._is_reduced and (last or (self.gathers and self.division.zero >= 2))

    def reduce(self) -> None:
        """Starts the reduce-scatter over the shards, or the all-reduce over the replicas where nothing is sharded."""
        self._is_reduced = True
        if self.division.shard is not None:
            self._sent = self._gradients_by_shard()
            self._reduced = self._sent.new_empty(self._length)
            self._reducing = self.division.shard.reduce_scatter(self._reduced, self._sent.view(-1))
        elif self.division.replicate is not None:
            self._gradient = torch.cat([_gradient(slot.parameter).flatten() for slot in self._slots])
            self._free_parameter_gradients()
            self._sum_replicas(self.division.replicate)

    def accumulate(self) -> None:
        """Waits for `reduce` and adds its result to the step's gradient."""
        if self._reducing is None:
            return
        self._reducing.wait()
        self._reducing = None
        if self._reduced is not None:
            self._gradient = self._reduced if self._gradient is None else self._gradient.add_(self._reduced)
            self._sent = self._reduced = None

    def reduce_replicas(self) -> None:
        """Starts the all-reduce of sharded gradients over the replicas (hybrid sharding)."""
        if self.gathers and self.division.replicate is not None:
            self._sum_replicas(self.division.replicate)

    def _sum_replicas(self, over: Collectives) -> None:
        """Starts to sum the gradient over `over`; a compressed sum is also finished here."""
        if self.compressor is None:
            assert self._gradient is not None
            self._reducing = over.all_reduce(self._gradient)
            return
        # The last shards of a parameter with few rows are empty.
        named = [(n, self._own(s)) for n, s in zip(self._names, self._slots, strict=True) if s.value.numel()]
        if exact := [tensor for name, tensor in named if name in self._exact]:
            for tensor, total in zip(exact, summed(exact, over.group), strict=True):
                tensor.copy_(total)
        if coded := [(name, tensor) for name, tensor in named if name not in self._exact]:
            self.compressor.reduce(coded, over.group)

    def _own(self, slot: _Slot) -> Tensor:
        """A parameter's view of this rank's gradient."""
        assert self._gradient is not None
        own = self._gradient[slot.offset : slot.offset + slot.value.numel()]
        return own.view(slot.value.shape)

    def finish(self) -> None:
        """Waits for the reduction and sets every value's `grad`."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        for slot in self._slots:
            if self._gradient is None:
                slot.value.grad = slot.parameter.grad
            else:
                slot.value.grad = self._own(slot)

    def gradient_tensors(self) -> list[Tensor]:
        """The gradients held, except those in a reduction under way."""
        held = [self._gradient] if self._gradient is not None else []
        return held + [p.grad for s in self._slots for p in (s.parameter, s.value) if p.grad is not None]

    def clear(self) -> None:
        """Drops the gradients, and the error feedback of a step that was not applied."""
        if self.compressor is not None:
            self.compressor.memory.settle(False)
        self._gradient = None
        for slot in self._slots:
            slot.parameter.grad = slot.value.grad = None

    def _shard_numel(self, shape: tuple[int, ...]) -> int:
        """Elements of one shard of a parameter, padding included."""
        dim = sharded_dim(shape, self.shards)
        return -(-shape[dim] // self.shards) * (prod(shape) // max(shape[dim], 1))

    def _free_parameter_gradients(self) -> None:
        for slot in self._slots:
            slot.parameter.grad = None

    def _gradients_by_shard(self) -> Tensor:
        """The gradients as `[shards, shard length]`, padded with zeros; the parameters' own are freed."""
        sent = torch.zeros(self.shards, self._length, dtype=self.division.master, device=self._shard.device)
        for slot in self._slots:
            gradient, place = _gradient(slot.parameter).flatten(), slot.of(sent)
            if slot.lead > 1:
                place.copy_(slot.by_shard(gradient, self.shards))
                continue
            whole, rest = divmod(len(gradient), max(slot.shard_numel, 1))
            place[:whole, 0].copy_(gradient[: whole * slot.shard_numel].view(whole, slot.shard_numel))
            if rest:
                place[whole, 0, :rest].copy_(gradient[whole * slot.shard_numel :])
        self._free_parameter_gradients()
        return sent


def _gradient(parameter: nn.Parameter) -> Tensor:
    return (
        torch.zeros_like(parameter, dtype=parameter.grad_dtype) if parameter.grad is None else parameter.grad
    )
