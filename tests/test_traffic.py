"""What a step sends equals a closed form, to the byte, for every data-parallel layout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fivefold.collectives.record import Row
from fivefold.config.tree import Config
from fivefold.spec.legal import Resolved, resolve_config
from fivefold.spec.parameters import Parameter, parameters
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.evaluate import evaluate
from ranks import Ranks
from toy import CPU, FLAGS, global_batch, start_group, stepper_on, toy_config, train_on_ranks

ITEMSIZE = {"float64": 8, "float32": 4, "bf16": 2}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, backend=None) as started:
        yield started


def padded(group: list[Parameter], shards: int) -> int:
    """Elements of a group when every parameter's rows are filled up to a multiple of the shards."""
    return sum(-(-p.shape[0] // shards) * shards * (p.numel // p.shape[0]) for p in group)


def closed_form(resolved: Resolved) -> list[Row]:
    """One optimizer step, from the parameter list alone.

    Groups: one per decoder layer, and the root's (embedding, final norm, head), which zero 3 does not drop between
    forward and backward. Gathers carry the compute type, reductions the master type; m = micro-batches.
    """
    config, mesh, m = resolved.config, resolved.mesh, resolved.batch.accumulation
    listed = parameters(config.model)
    root = [p for p in listed if p.layer is None]
    layers = [[p for p in listed if p.layer == layer] for layer in range(config.model.layers)]
    groups = [*layers, root]
    compute = ITEMSIZE[config.precision.dtype]
    master = max(compute, 4)
    rows = [Row("world", "all_reduce", "step", 2, 8 * 5)]  # token count, two flags; loss, squared norm
    if config.parallel.zero == 0:
        size = sum(p.numel for p in listed) * master
        rows.append(Row("dp_replicate", "all_reduce", "gradient", len(groups), size))
        return sorted(rows)
    shards = mesh.dp_shard
    whole, divided = (sum(padded(g, shards) for g in some) for some in (groups, layers))
    gathering = "forward" if config.parallel.zero == 3 else "optimizer"
    gathers = m if config.parallel.zero == 3 else 1
    reductions = 1 if config.parallel.zero == 1 else m
    rows += [
        Row("dp_shard", "all_gather", gathering, gathers * len(groups), gathers * whole * compute),
        Row("dp_shard", "reduce_scatter", "gradient", reductions * len(groups), reductions * whole * master),
    ]
    if config.parallel.zero == 3:
        rows.append(Row("dp_shard", "all_gather", "backward", m * len(layers), m * divided * compute))
    if mesh.dp_replicate > 1:
        rows.append(Row("dp_replicate", "all_reduce", "gradient", len(groups), whole // shards * master))
    return sorted(rows)


def check(ranks: Ranks, config: Config, wrapped: bool = True) -> None:
    expected = closed_form(resolve_config(config, ranks.world_size))
    for rank, found in enumerate(ranks.run(train_on_ranks, config, 0, wrapped)):
        for step, rows in enumerate(found["rows"], start=1):
            assert rows == expected, f"rank {rank}, step {step}"


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.full), "float32", "bf16"])
def test_recorded_bytes_equal_the_closed_form(ranks: Ranks, dtype: str) -> None:
    for accumulation in (1, 3) if dtype == "float32" else (2,):
        size = accumulation * ranks.world_size
        for zero in (0, 1, 2, 3):
            check(ranks, toy_config(zero=zero, dtype=dtype, global_batch=size, steps=2))
            if zero and ranks.world_size == 4:
                hybrid = {"zero": zero, "dp_replicate": 2, "dp_shard": 2}
                check(ranks, toy_config(dtype=dtype, global_batch=size, steps=2, **hybrid))


def test_recompute_gathers_no_more(ranks: Ranks) -> None:
    """The parameters are at hand when a layer is recomputed in backward."""
    check(ranks, toy_config(zero=3, global_batch=ranks.world_size, steps=2, recompute="full"))


def test_a_dispatch_mode_records_the_same(ranks: Ranks) -> None:
    """What is used where the backend stays unwrapped (NCCL)."""
    check(ranks, toy_config(zero=0, global_batch=2 * ranks.world_size, steps=2), wrapped=False)
    if ranks.world_size == 4:
        hybrid = {"zero": 3, "dp_replicate": 2, "dp_shard": 2}
        check(ranks, toy_config(global_batch=2 * ranks.world_size, steps=2, **hybrid), wrapped=False)


def rows_around_an_evaluation(rank: int, world_size: int, config: Config) -> list[list[Row]]:
    recorder = start_group()
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    found = []
    for _ in range(2):
        recorder.clear()
        stepper.step(share, 1e-3, FLAGS)
        found.append(recorder.rows())
        evaluate(stepper.model, [share], stepper.agreement)
    return found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_evaluation_leaves_nothing_gathered(ranks: Ranks, zero: int) -> None:
    config = toy_config(zero=zero, global_batch=2 * ranks.world_size)
    for first, second in ranks.run(rows_around_an_evaluation, config):
        assert first == second
