"""The recording process group: right values, exact bytes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

import recorded
from fivefold.collectives.group import RecordingGroup, axis_of, register
from fivefold.collectives.record import Recorder, Row
from ranks import Ranks
from recorded import (
    AXES,
    TRANSPORTS,
    join,
    mesh_of,
    ranks_over,
    taken,
    wait,
)

ranks = pytest.fixture(scope="module", params=TRANSPORTS)(ranks_over)


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
    assert isinstance(group, RecordingGroup)
    assert group.progress.entered is not None
    assert group.progress.entered.primitive == "all_gather"


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
    assert isinstance(saving, RecordingGroup)
    assert saving.progress.entered is not None
    assert (saving.progress.entered.primitive, saving.progress.entered.number) == ("all_reduce", 1)


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


def check_registered_again(rank: int, n: int) -> None:
    first = join()
    second = Recorder()
    register(second, timedelta(seconds=20), recorded.shared)
    later = dist.new_group(group_desc="mesh_cp")
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=later)
    assert taken(first) == [("world", "all_reduce", 1, 4)]
    assert taken(second) == [("cp", "all_reduce", 1, 4)]


def test_groups_keep_the_recorder_they_were_made_with(ranks: Ranks) -> None:
    ranks.run(check_registered_again, world_size=2)
