"""Memory by category, to the byte, from what tensors really hold: unique storages, never shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_Key = tuple[torch.device, int]  # names a storage as long as it lives


@dataclass(frozen=True, slots=True)
class MemoryByCategory:
    """Bytes on one rank. The names are those of `fivefold estimate`'s "memory"."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`: views and tensors that share one count once, a DTensor counts
    what this rank holds of it."""
    return sum(_storages(tensors).values())


def memory_by_category(
    *,
    parameters: Iterable[Tensor],
    gradients: Iterable[Tensor],
    optimizer: Iterable[Tensor],
    buffers: Iterable[Tensor],
    activations: int,
) -> MemoryByCategory:
    """Memory of this rank, to be taken when a step's gradients are whole.

    Args:
        parameters: in every form this rank holds them.
        optimizer: its state.
        activations: bytes, from `SavedActivations.peak_bytes` around that step.

    A storage that serves two categories (a gradient kept in a flat parameter buffer) counts in the first of
    parameters, gradients, optimizer, buffers.
    """
    seen: dict[_Key, int] = {}
    sizes = []
    for tensors in (parameters, gradients, optimizer, buffers):
        new = {key: size for key, size in _storages(tensors).items() if key not in seen}
        seen |= new
        sizes.append(sum(new.values()))
    return MemoryByCategory(sizes[0], sizes[1], sizes[2], activations, sizes[3])


class SavedActivations(saved_tensors_hooks):
    """Counts what autograd keeps for backward while its body runs; nothing is copied or changed.

        with SavedActivations([*model.parameters(), *model.buffers()]) as activations:
            ...  # a whole step, all micro-batches and their backwards
        activations.peak_bytes

    A storage counts from the first time autograd saves it until the last node that needs it is freed, so the
    peak is that of whatever the step does: accumulation, several micro-batches in flight in a pipeline,
    recomputation (of a checkpointed region only the inputs are saved in forward; what backward recomputes is
    not counted; what selective recomputation keeps, if it is told to `hold`). Tensors that a custom autograd function
    keeps without `save_for_backward` are not seen.

    Costs a few microseconds per saved tensor.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        super().__init__(self._pack, _unpack)
        self._excluded = set(_storages(excluded))
        self._holders: Counter[_Key] = Counter()  # saved tensors by storage
        self._held: dict[_Key, tuple[int, StorageWeakRef]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> SavedActivations:  # type: ignore[override]  # torch's returns nothing
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> _Saved:
        storages = {} if _is_parameter(tensor) else _storages([tensor])
        kept = {key: size for key, size in storages.items() if key not in self._excluded}
        for key, size in kept.items():
            if not self._holders[key]:
                self.live_bytes += size
            self._holders[key] += 1
        self._look()
        return _Saved(tensor.detach(), self, kept)

    def hold(self, tensor: Tensor) -> None:
        """Counts `tensor`, which somebody else keeps for backward, as long as it lives."""
        for key, size in _storages([tensor]).items():
            if key not in self._excluded:
                self._held[key] = size, StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._look()

    def _look(self) -> None:
        held = 0
        for key, (size, storage) in list(self._held.items()):
            if storage.expired():  # type: ignore[no-untyped-call]
                del self._held[key]
            elif not self._holders[key]:
                held += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + held)

    def release(self, storages: dict[_Key, int]) -> None:
        """One holder of each of `storages` is gone."""
        for key, size in storages.items():
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.live_bytes -= size


class _Saved:
    """What autograd holds in place of a tensor; its death is the tensor's release.

    It keeps the detached tensor: the tensor itself may be an output of the very node that saves it, and the
    two would then keep each other alive (see `torch.autograd.graph.saved_tensors_hooks`).
    """

    __slots__ = ("activations", "storages", "tensor")

    def __init__(self, tensor: Tensor, activations: SavedActivations, storages: dict[_Key, int]) -> None:
        self.tensor = tensor
        self.activations = activations
        self.storages = storages

    def __del__(self) -> None:
        self.activations.release(self.storages)


def _unpack(saved: _Saved) -> Tensor:
    return saved.tensor


def _is_parameter(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter or a view of one (a weight is saved as its transpose).

    FSDP gathers a parameter into a new storage in each forward, which no list made before can name; so the
    view's base is asked. `_base` is private, but the only way from a view to what it views.
    """
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _storages(tensors: Iterable[Tensor]) -> dict[_Key, int]:
    """Bytes of each storage behind `tensors`."""
    found: dict[_Key, int] = {}
    for tensor in tensors:
        for plain in _plain_parts(tensor):
            storage = plain.untyped_storage()
            if storage.nbytes():  # empty ones all have the address 0
                found[(storage.device, storage.data_ptr())] = storage.nbytes()
    return found


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors with storages inside a wrapper (DTensor, a collective's pending result); else the tensor.

    `__tensor_flatten__` is torch's protocol for wrapper subclasses; with it this room needs no
    torch.distributed.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)  # a DTensor names its mesh, too
        if isinstance(part, Tensor):
            yield from _plain_parts(part)
