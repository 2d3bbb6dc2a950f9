"""The recording process group: right values, exact bytes, under every part of torch that communicates."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fivefold.collectives.group import RecordingGroup, axis_of, register
from fivefold.collectives.record import Recorder, Row
from fivefold.collectives.shared_memory.transport import SharedMemory
from fivefold.collectives.work import CollectiveError
from ranks import Ranks, run_ranks

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


@pytest.fixture(scope="module", params=[pytest.param("gloo", marks=pytest.mark.full), "shm"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
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


# --- the recorder alone


def test_recorder_counts_by_axis_primitive_and_phase() -> None:
    recorder = Recorder()
    recorder.add("tp", "all_reduce", 8)
    with recorder.phase("forward"):
        recorder.add("tp", "all_reduce", 8)
        recorder.add("tp", "all_reduce", 4)
        with recorder.phase("optimizer"):
            recorder.add("world", "all_reduce", 2)
        recorder.add("pp", "send", 1)
    assert recorder.rows() == [
        Row("pp", "send", "forward", 1, 1),
        Row("tp", "all_reduce", "forward", 2, 12),
        Row("tp", "all_reduce", "step", 1, 8),
        Row("world", "all_reduce", "optimizer", 1, 2),
    ]
    recorder.clear()
    assert recorder.rows() == []


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "dp_shard_cp", "embedding"])
def test_reductions_over_data_parallel_axes_during_backward_are_of_gradients(axis: str) -> None:
    recorder = Recorder()
    with recorder.phase("backward"):
        recorder.add(axis, "reduce_scatter", 1)
        recorder.add(axis, "all_reduce", 1)
        recorder.add(axis, "all_gather", 1)
        recorder.add("tp", "all_reduce", 1)
        recorder.add("cp", "reduce_scatter", 1)
    with recorder.phase("forward"):
        recorder.add(axis, "all_reduce", 1)
    phases = {(row.axis, row.primitive, row.phase) for row in recorder.rows()}
    assert phases == {
        (axis, "reduce_scatter", "gradient"),
        (axis, "all_reduce", "gradient"),
        (axis, "all_gather", "backward"),
        ("tp", "all_reduce", "backward"),
        ("cp", "reduce_scatter", "backward"),
        (axis, "all_reduce", "forward"),
    }


def test_recorder_leaves_out_what_is_paused_or_excluded() -> None:
    recorder = Recorder()
    recorder.add("checkpoint", "all_gather", 1)
    with recorder.paused():
        recorder.add("world", "all_gather", 1)
        with recorder.paused():
            recorder.add("world", "all_gather", 1)
        recorder.add("world", "all_gather", 1)
    assert recorder.rows() == []
    with pytest.raises(ZeroDivisionError), recorder.paused(), recorder.phase("forward"):
        _ = 1 / 0
    recorder.add("world", "all_gather", 1)
    assert recorder.rows() == [Row("world", "all_gather", "step", 1, 1)]


def test_axis_of() -> None:
    descriptions = ["default_pg", "mesh_tp", "mesh_dp_shard_cp", "embedding", "checkpoint_async", "undefined"]
    assert [axis_of(d) for d in descriptions] == [
        "world",
        "tp",
        "dp_shard_cp",
        "embedding",
        "checkpoint",
        "undefined",
    ]


# --- every primitive: values and bytes


def check_collectives(rank: int, n: int) -> None:
    recorder = join()
    group = dist.new_group(group_desc="mesh_tp")
    mine = torch.arange(6, dtype=torch.float64) + 10 * rank  # 48 bytes
    everyone = [torch.arange(6, dtype=torch.float64) + 10 * r for r in range(n)]
    total = torch.stack(everyone).sum(0)

    def check(what: str, primitive: str, size: int, got: Tensor, right: Tensor, count: int = 1) -> None:
        assert torch.equal(got, right), what
        assert taken(recorder) == [("tp", primitive, count, size)], what

    x = mine.clone()
    dist.all_reduce(x, group=group)
    check("all_reduce", "all_reduce", 48, x, total)
    x = mine.clone()
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    check("all_reduce, asynchronous", "all_reduce", 48, x, total)
    x = mine.to(torch.bfloat16)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    check("all_reduce of maxima in bf16", "all_reduce", 12, x, everyone[-1].to(torch.bfloat16))
    x = torch.tensor(float(rank))
    dist.all_reduce(x, group=group)
    check("all_reduce of a scalar", "all_reduce", 4, x, torch.tensor(sum(range(n)) * 1.0))
    x, y = mine.clone(), mine[:2].clone()
    with distributed_c10d._coalescing_manager(group=group):
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group)
    check("all_reduce, coalesced", "all_reduce", 64, torch.cat([x, y]), torch.cat([total, total[:2]]))

    x = mine.clone()
    dist.broadcast(x, src=1, group=group)
    check("broadcast", "broadcast", 48, x, everyone[1])
    x = mine.clone()
    dist.reduce(x, dst=1, group=group)
    check("reduce", "reduce", 48, x if rank == 1 else total, total)

    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    check("all_gather", "all_gather", 48 * n, torch.stack(parts), torch.stack(everyone))
    whole = torch.empty(6 * n, dtype=torch.float64)
    dist.all_gather_single(whole, mine, group=group)
    check("all_gather_single", "all_gather", 48 * n, whole, torch.cat(everyone))
    whole.zero_()
    group._allgather_base(whole, mine).wait()
    check("all_gather_single, old name", "all_gather", 48 * n, whole, torch.cat(everyone))
    small = torch.empty(2 * n, dtype=torch.float64)
    with distributed_c10d._coalescing_manager(group=group):
        dist.all_gather_single(whole, mine, group=group)
        dist.all_gather_single(small, mine[:2], group=group)
    check("all_gather, coalesced", "all_gather", 64 * n, small, torch.cat([e[:2] for e in everyone]))

    part = slice(2 * rank, 2 * rank + 2)  # n = 3 ranks, 6 elements
    out = torch.empty(2, dtype=torch.float64)
    dist.reduce_scatter(out, list(mine.chunk(n)), group=group)
    check("reduce_scatter", "reduce_scatter", 48, out, total[part])
    out.zero_()
    dist.reduce_scatter_single(out, mine, group=group)
    check("reduce_scatter_single", "reduce_scatter", 48, out, total[part])
    out.zero_()
    group._reduce_scatter_base(out, mine, dist.ReduceScatterOptions()).wait()
    check("reduce_scatter_single, old name", "reduce_scatter", 48, out, total[part])
    with distributed_c10d._coalescing_manager(group=group):
        for target in (out, torch.empty_like(out)):
            dist.reduce_scatter_single(target, mine, group=group)
    check("reduce_scatter, coalesced", "reduce_scatter", 96, out, total[part])

    swapped = torch.cat([e[part] for e in everyone])
    out = torch.empty_like(mine)
    dist.all_to_all_single(out, mine, group=group)
    check("all_to_all_single", "all_to_all", 48, out, swapped)
    out.zero_()
    group.alltoall_base(out, mine, [], []).wait()
    check("all_to_all_single, old name", "all_to_all", 48, out, swapped)
    parts = [torch.empty(2, dtype=torch.float64) for _ in range(n)]
    dist.all_to_all(parts, list(mine.chunk(n)), group=group)
    check("all_to_all", "all_to_all", 48, torch.cat(parts), swapped)
    splits = [rank + 1, 0, 2]  # to ranks 0, 1, 2: as expert dispatch does
    source = torch.full((sum(splits),), float(rank))
    received = [[1, 2, 3], [0, 0, 0], [2, 2, 2]][rank]
    out = torch.empty(sum(received))
    dist.all_to_all_single(out, source, received, splits, group=group)
    right = torch.cat([torch.full((k,), float(r)) for r, k in enumerate(received)])
    check("all_to_all_single, uneven", "all_to_all", 4 * sum(splits), out, right)

    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.gather(mine, parts if rank == 1 else None, dst=1, group=group)
    got = torch.stack(parts if rank == 1 else everyone)
    check("gather", "gather", 48 * n, got, torch.stack(everyone))
    x = torch.empty_like(mine)
    dist.scatter(x, everyone if rank == 1 else None, src=1, group=group)
    check("scatter", "scatter", 48 * n, x, mine)
    dist.barrier(group)
    check("barrier", "barrier", 0, mine, mine)

    x = wait(functional.all_reduce(mine, "sum", group=group))
    check("functional all_reduce", "all_reduce", 48, x, total)
    x = wait(functional.all_gather_single(mine, 0, group=group))
    check("functional all_gather", "all_gather", 48 * n, x, torch.cat(everyone))
    x = wait(functional.reduce_scatter_single(mine, "sum", 0, group=group))
    check("functional reduce_scatter", "reduce_scatter", 48, x, total[part])
    x = wait(functional.all_to_all_single(mine, None, None, group=group))
    check("functional all_to_all", "all_to_all", 48, x, swapped)
    x = wait(functional.broadcast(mine, 1, group=group))
    check("functional broadcast", "broadcast", 48, x, everyone[1])
    a, b = functional.all_reduce_coalesced([mine, mine[:2]], "sum", group)
    check("functional, coalesced", "all_reduce", 64, torch.cat([a, b]), torch.cat([total, total[:2]]))

    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    assert objects == [{"rank": r} for r in range(n)]
    assert [row[:3] for row in taken(recorder)] == [("tp", "all_gather", 2)]  # the sizes, then the objects
    assert recorder.last is not None
    assert recorder.last[:2] == ("tp", "all_gather")


def test_every_collective_is_right_and_counted(ranks: Ranks) -> None:
    ranks.run(check_collectives, world_size=3)


def check_point_to_point(rank: int, n: int) -> None:
    recorder = join()
    group = dist.new_group(group_desc="mesh_pp")
    other = 1 - rank
    mine, theirs = torch.full((5,), float(rank)), torch.full((5,), float(other))

    def check(what: str, got: Tensor) -> None:
        assert torch.equal(got, theirs), what
        assert taken(recorder) == [("pp", "recv", 1, 20), ("pp", "send", 1, 20)], what

    got = torch.empty(5)
    for step in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
        step(mine if step is dist.send else got, other, group=group)
    check("send and recv", got)
    got = torch.empty(5)
    works = [dist.isend(mine, other, group=group), dist.irecv(got, other, group=group)]
    for work in works:
        assert work is not None
        work.wait()
    check("isend and irecv", got)
    got = torch.empty(5)
    ops = [dist.P2POp(dist.isend, mine, other, group), dist.P2POp(dist.irecv, got, other, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    check("batch_isend_irecv", got)
    got = torch.empty(5)
    sent = dist.isend(mine, other, group=group)
    assert dist.recv(got, group=group) == other
    assert sent is not None
    sent.wait()
    check("recv from any rank", got)


def test_point_to_point(ranks: Ranks) -> None:
    ranks.run(check_point_to_point, world_size=2)


# --- axes


def check_axes(rank: int, n: int) -> None:
    recorder = join()
    mesh = mesh_of(dp_shard=3)
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp", backend_override="fivefold")
    x = torch.ones(2)
    groups = [mesh.get_group(axis) for axis in AXES]
    assert [g.group_desc for g in groups] == [f"mesh_{axis}" for axis in AXES]
    assert all(isinstance(g, RecordingGroup) for g in groups)
    for group in [*groups, flat.get_group(), None]:
        dist.all_reduce(x, group=group)
    # the four groups of one rank are not counted: nothing passes between ranks
    assert taken(recorder) == [(axis, "all_reduce", 1, 8) for axis in ("dp_shard", "dp_shard_cp", "world")]
    assert torch.equal(x, torch.full((2,), 27.0))

    embedding = dist.new_group([0, 2], group_desc="embedding")
    saving = dist.new_group(group_desc="checkpoint_save")
    if rank != 1:
        dist.all_reduce(x, group=embedding)
        assert taken(recorder) == [("embedding", "all_reduce", 1, 8)]
        assert isinstance(embedding, RecordingGroup)
        assert embedding.global_ranks == [0, 2]
    dist.all_reduce(x, group=saving)
    assert taken(recorder) == []
    assert recorder.last == ("checkpoint", "all_reduce", 1)


def test_axes_of_meshes_flattened_meshes_and_groups(ranks: Ranks) -> None:
    ranks.run(check_axes, world_size=3)


def check_world_axis(rank: int, n: int) -> list[str]:
    join()
    shape = (1, 1, n, 1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return [mesh.get_group("dp_shard").group_desc, flat.get_group().group_desc]


def test_an_axis_of_the_whole_world_is_the_default_group_unless_overridden(ranks: Ranks) -> None:
    """torch re-uses the default group, also in a mesh of several axes: why `mesh_of` passes backend_override."""
    assert ranks.run(check_world_axis, world_size=2) == [["default_pg", "default_pg"]] * 2


# --- under torch's parallelisms


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


def mean_gradients(n: int) -> list[Tensor]:
    """One process: the gradients of the mean over ranks of each rank's loss."""
    model = make_model()
    losses = [model(batch_of(rank)).square().sum() for rank in range(n)]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters() if p.grad is not None]


def gradients_of(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients if g is not None]


def step(model: nn.Module, recorder: Recorder, rank: int) -> list[Row]:
    """One forward and backward in their phases; what they cost."""
    recorder.clear()
    with recorder.phase("forward"):
        loss = model(batch_of(rank)).square().sum()
    with recorder.phase("backward"):
        loss.backward()
    rows = recorder.rows()
    with recorder.paused():
        for got, right in zip(gradients_of(model), mean_gradients(dist.get_world_size()), strict=True):
            torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    return rows


def bytes_of(module: nn.Module, n: int) -> int:
    """Bytes of a module's parameters as FSDP gathers them: dim 0 padded to a multiple of the n ranks."""
    return sum(math.ceil(p.shape[0] / n) * n * p[0].nbytes for p in module.parameters())


def check_ddp(rank: int, n: int) -> list[Row]:
    recorder = join()
    group = mesh_of(dp_replicate=n).get_group("dp_replicate")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # broadcast_buffers is deprecated
        model = DistributedDataParallel(make_model(), process_group=group, broadcast_buffers=False)
    for _ in range(2):  # the second forward rebuilds the buckets, and broadcasts how
        step(model, recorder, rank)
        model.zero_grad()
    return step(model, recorder, rank)


def test_ddp(ranks: Ranks) -> None:
    size = sum(p.nbytes for p in make_model().parameters())
    for rows in ranks.run(check_ddp, world_size=3):
        assert rows == [Row("dp_replicate", "all_reduce", "gradient", 1, size)]


def check_fsdp(rank: int, n: int, sizes: dict[str, int]) -> list[Row]:
    recorder = join()
    mesh = mesh_of(**sizes)
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp", backend_override="fivefold")
    axes = mesh["dp_replicate", "dp_shard"] if "dp_replicate" in sizes else flat
    model = make_model()
    for block in (model[0], model[1]):
        fully_shard(block, mesh=axes)
    fully_shard(model, mesh=axes)
    return step(model, recorder, rank)


def test_fsdp2_costs_its_closed_form(ranks: Ranks) -> None:
    model = make_model()
    blocks = sum(bytes_of(block, 3) for block in (model[0], model[1]))
    root = bytes_of(model[2], 3)
    for rows in ranks.run(check_fsdp, {"dp_shard": 3}, world_size=3):
        assert rows == [
            # Forward gathers every group. The root stays gathered, so backward gathers the blocks again.
            Row("dp_shard_cp", "all_gather", "backward", 2, blocks),
            Row("dp_shard_cp", "all_gather", "forward", 3, blocks + root),
            Row("dp_shard_cp", "reduce_scatter", "gradient", 3, blocks + root),
        ]


def test_hybrid_fsdp2_costs_its_closed_form(ranks: Ranks) -> None:
    model = make_model()
    blocks = sum(bytes_of(block, 2) for block in (model[0], model[1]))
    root = bytes_of(model[2], 2)
    for rows in ranks.run(check_fsdp, {"dp_replicate": 2, "dp_shard": 2}):
        assert rows == [
            Row("dp_replicate", "all_reduce", "gradient", 3, (blocks + root) // 2),  # each its shard
            Row("dp_shard", "all_gather", "backward", 2, blocks),
            Row("dp_shard", "all_gather", "forward", 3, blocks + root),
            Row("dp_shard", "reduce_scatter", "gradient", 3, blocks + root),
        ]


def check_replicate(rank: int, n: int) -> list[Row]:
    recorder = join()
    mesh = mesh_of(dp_replicate=n)["dp_replicate"]
    model = make_model()
    for block in (model[0], model[1]):
        replicate(block, mesh=mesh)
    replicate(model, mesh=mesh)
    return step(model, recorder, rank)


def test_replicate_costs_its_closed_form(ranks: Ranks) -> None:
    size = sum(p.nbytes for p in make_model().parameters())
    for rows in ranks.run(check_replicate, world_size=3):
        assert rows == [Row("dp_replicate", "all_reduce", "gradient", 3, size)]


def check_tensor_parallel(rank: int, n: int) -> list[Row]:
    recorder = join()
    mesh = mesh_of(tp=n)["tp"]
    torch.manual_seed(0)
    model, reference = Block(inner=6), Block(inner=6)
    reference.load_state_dict(model.state_dict())
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    recorder.clear()
    x, y = batch_of(0).requires_grad_(), batch_of(0).requires_grad_()
    with recorder.phase("forward"):
        out = model(x)
    with recorder.phase("backward"):
        out.square().sum().backward()
    reference(y).square().sum().backward()
    rows = recorder.rows()
    with recorder.paused():
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-12)
        for got, p in zip(gradients_of(model), reference.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(got, p.grad, rtol=1e-12, atol=1e-12)
    return rows


def test_dtensor_tensor_parallel(ranks: Ranks) -> None:
    activation = 3 * 4 * 8  # [batch 3, width 4] in float64
    for rows in ranks.run(check_tensor_parallel, world_size=3):
        assert rows == [
            Row("tp", "all_reduce", "backward", 1, activation),
            Row("tp", "all_reduce", "forward", 1, activation),
        ]


def check_dtensor(rank: int, n: int) -> None:
    recorder = join()
    mesh = mesh_of(tp=n)["tp"]
    whole = torch.arange(24.0).reshape(6, 4)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    recorder.clear()
    assert torch.equal(tensor.full_tensor(), whole)
    assert taken(recorder) == [("tp", "all_gather", 1, 96)]
    partial = tensor.sum(0)
    assert isinstance(partial, DTensor)
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), whole.sum(0))
    assert taken(recorder) == [("tp", "all_reduce", 1, 16)]


def test_dtensor_redistribution(ranks: Ranks) -> None:
    ranks.run(check_dtensor, world_size=2)


def check_pipeline(rank: int, n: int, micro_batches: int) -> list[Row]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # half a second no other rank needs

    recorder = join()
    group = mesh_of(pp=n).get_group("pp")
    torch.manual_seed(rank)
    stage = PipelineStage(Block(), rank, n, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    batch, target = torch.randn(2 * micro_batches, 4, dtype=torch.float64), torch.zeros(2 * micro_batches)
    for _ in range(2):  # the first step exchanges shapes
        recorder.clear()
        schedule.step(batch) if rank == 0 else schedule.step(target=target)
    return recorder.rows()


def test_pipeline_1f1b(ranks: Ranks) -> None:
    size = 3 * 2 * 4 * 8  # 3 micro-batches of [2, 4] in float64; activations one way, gradients the other
    for rows in ranks.run(check_pipeline, 3, world_size=2):
        assert rows == [Row("pp", "recv", "step", 3, size), Row("pp", "send", "step", 3, size)]


def check_checkpoint(rank: int, n: int, path: str) -> None:
    recorder = join()
    mesh = mesh_of(dp_shard=n)["dp_shard"]
    saving = dist.new_group(group_desc="checkpoint")
    whole = torch.arange(20.0).reshape(10, 2)
    weight = distribute_tensor(whole, mesh, [Shard(0)])
    state = {"weight": weight, "step": torch.tensor(7)}
    recorder.clear()
    save(state, checkpoint_id=path, process_group=saving, no_dist=False)
    empty = distribute_tensor(torch.zeros(10, 2), mesh, [Shard(0)])
    loaded = {"weight": empty, "step": torch.tensor(0)}
    recorder.clear()
    load(loaded, checkpoint_id=path, process_group=saving, no_dist=False)
    assert recorder.rows() == []
    assert torch.equal(empty.to_local(), weight.to_local())
    assert loaded["step"] == 7


def test_checkpoints_pass_uncounted(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_checkpoint, str(tmp_path / "saved"), world_size=2)


def check_registered_again(rank: int, n: int) -> None:
    first = join()
    second = Recorder()
    register(second, timedelta(seconds=20), shared)
    later = dist.new_group(group_desc="mesh_cp")
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=later)
    assert taken(first) == [("world", "all_reduce", 1, 4)]
    assert taken(second) == [("cp", "all_reduce", 1, 4)]


def test_groups_keep_the_recorder_they_were_made_with(ranks: Ranks) -> None:
    ranks.run(check_registered_again, world_size=2)


# --- what breaks


def until_error(collective: Callable[[], Any]) -> tuple[str, float]:
    """Calls until it fails: the message of the CollectiveError, and the seconds it took."""
    start = time.monotonic()
    try:
        for _ in range(10):  # what the dead rank had sent before may still be accepted
            collective()
    except CollectiveError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no error")


def check_dead_peer(rank: int, n: int) -> list[tuple[str, float]]:
    recorder = join()
    x = torch.ones(4)
    groups = [dist.new_group(group_desc=f"mesh_{axis}") for axis in ("tp", "cp", "dp_shard", "pp")]
    for group in groups:
        dist.all_reduce(x, group=group)
    model = make_model()
    fully_shard(model, mesh=DeviceMesh.from_group(groups[2], "cpu"))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tp, cp, _, pp = groups
    errors = [
        until_error(lambda: dist.all_reduce(x, group=tp)),
        until_error(lambda: dist.all_gather_object([None] * n, 1, group=tp)),
        until_error(lambda: wait(functional.all_reduce(x, "sum", group=cp))),
        until_error(lambda: model(batch_of(rank))),
        until_error(lambda: dist.recv(x, group_src=1, group=pp)),
    ]
    assert recorder.last is not None
    assert recorder.last[:2] == ("pp", "recv")
    return errors


@pytest.mark.parametrize("transport", [pytest.param("gloo", marks=pytest.mark.full), "shm"])
def test_a_dead_peer_is_one_clear_line_within_seconds(transport: str) -> None:
    results = run_ranks(partial(over, transport, check_dead_peer), 3, backend=None, dies={1})
    for rank, others in ((0, "ranks 1, 2"), (2, "ranks 0, 1")):
        messages = [message for message, _ in results[rank]]
        for message, pattern in zip(
            messages,
            [
                rf"rank {rank}: all_reduce number \d+ on axis tp with {others} failed: .+",
                rf"rank {rank}: all_gather number \d+ on axis tp with {others} failed: .+",
                rf"rank {rank}: all_reduce number \d+ on axis cp with {others} failed: .+",
                rf"rank {rank}: all_gather number \d+ on axis dp_shard with {others} failed: .+",
                rf"rank {rank}: recv number 1 on axis pp with rank 1 failed: .+",
            ],
            strict=True,
        ):
            assert re.fullmatch(pattern, message), message
        assert sum(seconds for _, seconds in results[rank]) < 5.0


def check_timeout(rank: int, n: int) -> str:
    join(timeout=0.5)
    group = mesh_of(tp=2).get_group("tp")  # torch would give it 30 minutes
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 1:
        time.sleep(1.5)
        return ""
    message, seconds = until_error(lambda: dist.all_reduce(torch.ones(1), group=group))
    assert 0.4 < seconds < 1.4
    return message


def test_every_group_has_the_timeout_registered(ranks: Ranks) -> None:
    message = ranks.run(check_timeout, world_size=2)[0]
    assert message.startswith(
        "rank 0: all_reduce number 2 on axis tp with rank 1 failed: Timed out waiting 500ms"
    )


# --- the end of a process

LIFE = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from fivefold.collectives.group import register
from fivefold.collectives.record import Recorder
from fivefold.collectives.shared_memory.transport import SharedMemory

rank, store, destroy = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3] == "destroy"
shared = SharedMemory() if sys.argv[4] == "shm" else None
dist.init_process_group(register(Recorder(), timedelta(seconds=20), shared), store=store, rank=rank, world_size=2)
group = dist.new_group(group_desc="mesh_tp")
pending = dist.all_reduce(torch.ones(1000), group=group, async_op=True)
dist.all_reduce(torch.ones(1))
pending.wait()
dist.barrier()
if destroy:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", [pytest.param("gloo", marks=pytest.mark.full), "shm"])
@pytest.mark.parametrize("ending", ["destroy", "leave"])
def test_processes_end_cleanly(tmp_path: Path, ending: str, transport: str) -> None:
    arguments = [str(tmp_path / "store"), ending, transport]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LIFE, str(rank), *arguments], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
        assert "terminate called" not in errors
        assert "Traceback" not in errors
