"""Ranks whose groups are recorded, over gloo or shared memory, and what was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.transport import SharedMemory
from ranks import Ranks

TRANSPORTS = (pytest.param("gloo", marks=pytest.mark.full), "shm")
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


shared: SharedMemory | None = None  # of a rank: what its groups are made with, see `over`


def over(transport: str, check: Callable[..., Any], rank: int, n: int, *args: Any) -> Any:
    """Runs a check in a rank over "gloo" or "shm"."""
    global shared
    shared = SharedMemory() if transport == "shm" else None
    return check(rank, n, *args)


class RanksOver(Ranks):
    def __init__(self, transport: str) -> None:
        super().__init__(4, backend=None)
        self._transport = transport

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return super().run(partial(over, self._transport, fn), *args, **kwargs)


def ranks_over(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A fixture of four ranks; a file gives it the scope and, as `params`, the transports."""
    with RanksOver(request.param) as ranks:
        yield ranks


def wait(tensor: Tensor) -> Tensor:
    """The result of a functional collective, which torch leaves untyped."""
    done: Tensor = functional.wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return done


def join(timeout: float = 20.0) -> Recorder:
    """Joins the default group, recorded."""
    recorder = Recorder()
    dist.init_process_group(register(recorder, timedelta(seconds=timeout), shared))
    return recorder


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh with all axes, each with a group of its own (see test_an_axis_of_the_whole_world)."""
    backends: Any = dict.fromkeys(AXES, "fivefold")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES, backend_override=backends)


def taken(recorder: Recorder) -> list[tuple[str, str, int, int]]:
    """What was recorded since the last call, without the phase."""
    rows = [(row.axis, row.primitive, row.count, row.bytes_per_rank) for row in recorder.rows()]
    recorder.clear()
    return rows


class Block(nn.Module):
    """Two linear layers whose widths do not divide by 3: FSDP pads, and the ledger counts the padding."""

    def __init__(self, width: int = 4, inner: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, dtype=torch.float64)
        self.down = nn.Linear(inner, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 5, dtype=torch.float64))


def batch_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
