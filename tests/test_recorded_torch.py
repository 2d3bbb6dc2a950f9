"""Every part of torch that communicates runs over recorded groups: right values, exact bytes."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fivefold.collectives.record import Recorder, Row
from ranks import Ranks
from recorded import (
    TRANSPORTS,
    Block,
    batch_of,
    join,
    make_model,
    mesh_of,
    ranks_over,
    taken,
)

ranks = pytest.fixture(scope="module", params=TRANSPORTS)(ranks_over)


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
