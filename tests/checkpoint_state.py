"""A tiny training state in every layout, for the tests of checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fivefold.config.tree import Checkpoint
from fivefold.trainer.checkpoint import Checkpointer
from fivefold.trainer.checkpoint_directory import CheckpointError

CONFIG_TEXT = "[run]\nsteps = 5\n"
# Layout → ranks. "zero0" is plain replicas; it also stands for one process, with no default group.
LAYOUTS = {"zero0": 2, "zero1": 2, "zero3": 2, "zero3_of_3": 3, "hybrid": 4, "tensor": 4}


class Model(nn.Module):
    """Widths that 2, 3, 4 do not divide: of 3 ranks, one holds nothing of `table`, two nothing of a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 7)
        self.down = nn.Linear(7, 1)
        self.table = nn.Parameter(torch.zeros(2, 5))


def make_state(layout: str, salt: int) -> dict[str, Tensor]:
    """Parameters, moments, step counts and a buffer, laid out over the default group, with their `value`s."""
    model = Model()
    with torch.no_grad():  # before sharding: so it is torch that cuts the parameters, not this file
        for name, parameter in model.named_parameters():
            parameter.copy_(value(f"model.{name}", parameter, salt))
    mesh = _shard(model, layout)
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state[f"model.{name}"] = parameter
        split: Tensor = parameter.detach()
        if layout == "zero1":
            split = distribute_tensor(split, mesh, [Shard(0)])
        state[f"optimizer.{name}.exp_avg"] = torch.zeros_like(split)
        state[f"optimizer.{name}.exp_avg_sq"] = torch.zeros_like(split, dtype=torch.bfloat16)
        state[f"optimizer.{name}.step"] = torch.zeros(())
    state["model.up.count"] = torch.zeros(4, dtype=torch.int64)
    for name, tensor in state.items():
        if not isinstance(tensor, nn.Parameter):
            local(tensor).copy_(part(value(name, tensor, salt), tensor))
    return state


def _shard(model: Model, layout: str) -> DeviceMesh | None:
    if layout == "zero0":
        return None
    if layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    elif layout == "tensor":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model.table = nn.Parameter(distribute_tensor(model.table.data, both["tp"], [Replicate()]))
        mesh = both["dp_shard"]
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout != "zero1":
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return mesh


def value(name: str, like: Tensor, salt: int) -> Tensor:
    """The full tensor that stands for `name`: a function of the name and `salt` alone."""
    seed = int.from_bytes(hashlib.sha256(f"{salt} {name}".encode()).digest()[:6], "big")
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 1000
    return noise.to(like.dtype)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank should hold of `whole` if it is laid out as `like`."""
    if not isinstance(like, DTensor):
        return whole
    sizes, offsets = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, offset if size else 0, size)
    return whole


def wrong(state: dict[str, Tensor], salt: int) -> list[str]:
    """The names of which this rank does not hold, bit for bit, what it should."""
    return [
        name
        for name, tensor in state.items()
        if not torch.equal(local(tensor), part(value(name, tensor, salt), tensor))
    ]


def checkpointer(directory: Path, **options: int) -> Checkpointer:
    """A checkpointer with some options set."""
    return Checkpointer(directory, Checkpoint(**options))  # type: ignore[arg-type]


def error_of(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The text of the CheckpointError that a call raises, "" if it raises none."""
    try:
        call(*arguments, **keywords)
    except CheckpointError as error:
        return str(error)
    return ""
