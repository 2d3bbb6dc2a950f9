"""What a save writes: the state as it was when `save` was called, and who writes which part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from fivefold.parallel.local import Piece
from fivefold.trainer.checkpoint_directory import CheckpointError
from fivefold.trainer.storage import kind


class HostMemory:
    """Copies of tensors in host memory that is re-used from save to save: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`, valid until the next call."""
        for name in self._copies.keys() - tensors.keys():
            del self._copies[name]
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
                self._copies[name] = copy
            copy.copy_(tensor, non_blocking=True)
        if any(not tensor.is_cpu for tensor in tensors.values()):
            torch.accelerator.synchronize()
        return self._copies


class SavePlanner(DefaultSavePlanner):
    """torch's plan of who writes what, with values of our own and with replicas compared.

    `locals` is what this rank holds of every tensor, `error` why there is nothing: the plan is made together,
    so every rank hears of it. The state given to torch is only asked for shapes and meshes.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.locals: dict[str, Tensor] = {}
        self.error: Exception | None = None

    def create_local_plan(self) -> SavePlan:
        if self.error is not None:
            raise self.error
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Refuses tensors that differ between ranks: torch would keep one of them and say nothing."""
        seen: dict[str, tuple[int, str]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                name, mine = item.index.fqn, kind(item.tensor_data.size, item.tensor_data.properties.dtype)
                first, theirs = seen.setdefault(name, (rank, mine))
                if theirs != mine:
                    raise CheckpointError(f"{name} is {theirs} on rank {first} and {mine} on rank {rank}")
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.locals[index.fqn]


class LoadPlanner(DefaultLoadPlanner):
    """torch's plan of who reads what, which fills pieces, too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own would first make every value that is no tensor None.
        self.state_dict, self.metadata, self.is_coordinator = dict(state_dict), metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.local if isinstance(found, Piece) else super().lookup_tensor(index)


def local(tensor: Tensor | Piece) -> Tensor:
    """What this rank holds of a tensor."""
    if isinstance(tensor, Piece):
        return tensor.local
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
