"""Pipelines compute what one process computes, under every schedule, and hold no more than the schedule says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.config.model import Experts, Model
from fivefold.config.tree import Checkpoint, Config
from fivefold.ledger.simulate import most_in_flight
from fivefold.nn.generate import next_logits
from fivefold.observe.memory import SavedActivations
from fivefold.parallel.apply import parallelize
from fivefold.parallel.mesh import Groups
from fivefold.parallel.pipeline import rank_stages
from fivefold.proof.gather import wholes
from fivefold.spec import schedules
from fivefold.spec.legal import resolve_config
from fivefold.spec.messages import Message, Need, Plan, plans, receives_first
from fivefold.spec.schedules import Kind, Name
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.checkpoint import Checkpointer
from fivefold.trainer.evaluate import evaluate
from fivefold.trainer.state import tensors
from ranks import Ranks
from test_agreement import step_with_poison
from test_parity import check, check_replicas, worst_by_kind
from test_schedules import NAMES
from toy import (
    CPU,
    FLAGS,
    MODEL,
    global_batch,
    reference,
    start_group,
    stepper_on,
    toy_config,
    train_on_ranks,
)

DEEP = replace(MODEL, layers=5)
TIED = replace(DEEP, tied=True)
EXPERTS = Experts(count=4, top_k=2, ffn=16, dense_layers=1, auxiliary_loss=0.1, router_bias=True)
MOE = replace(DEEP, experts=EXPERTS)

LAYOUTS: list[dict[str, Any]] = [
    {"schedule": "gpipe", "pp": 2, "dp_shard": 2, "zero": 1},
    {"schedule": "1f1b", "pp": 4},
    {"schedule": "1f1b", "pp": 2, "dp_shard": 2, "zero": 2, "recompute": "full"},
    {"schedule": "interleaved", "pp": 2, "chunks": 2, "dp_replicate": 2, "recompute": "elementwise"},
    {"schedule": "zb_h1", "pp": 2, "dp_shard": 2, "zero": 3},
    {
        "schedule": "interleaved_zb",
        "pp": 2,
        "chunks": 2,
        "dp_shard": 2,
        "zero": 1,
        "recompute": "elementwise",
    },
    {"schedule": "zbv", "pp": 3},
    {"schedule": "zbv", "pp": 2, "dp_shard": 2, "zero": 3, "recompute": "attention"},
    {"schedule": "dualpipev", "pp": 2, "dp_shard": 2, "zero": 2},
]


def imported(rank: int, world_size: int) -> None:
    """Ranks that have run it have imported this file."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        started.run(imported, timeout=240.0)
        yield started


def of(model: Model, steps: int = 2, size: int = 8, dtype: str = "float64", **parallel: Any) -> Config:
    return replace(toy_config(global_batch=size, steps=steps, dtype=dtype, **parallel), model=model)


@lru_cache(maxsize=16)
def expected(name: str, steps: int, size: int, dtype: str = "float64") -> dict[str, Any]:
    model = {"tied": TIED, "experts": MOE, "two layers": MODEL}[name]
    found = reference(of(model, steps, size, dtype))
    for kind in ("gradients", "initial"):
        if name == "tied":
            found[kind].pop("head.weight", None)
    return found


def trained(ranks: Ranks, config: Config) -> dict[str, Any]:
    """Whole tensors; every rank has the same, and copies agree to the bit (tied ones too: `train_on_ranks`)."""
    results = ranks.run(train_on_ranks, config, world_size=resolve_config(config).mesh.world_size)
    check_replicas(results)
    found: dict[str, Any] = results[0]
    return found


@pytest.mark.parametrize("name", ["tied", pytest.param("experts", marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_schedules_equal_one_process(ranks: Ranks, layout: dict[str, Any], name: str) -> None:
    model = {"tied": TIED, "experts": MOE}[name]
    check(trained(ranks, of(model, **layout)), expected(name, 2, 8), 1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        {"schedule": "zbv", "tp": 2},
        {"schedule": "interleaved_zb", "chunks": 2, "tp": 2, "sequence_parallel": True},
        {"schedule": "1f1b", "cp": 2, "zero": 1},
        {"schedule": "zb_h1", "dp_shard": 2, "ep": 2, "zero": 2},
    ],
    ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_other_axes_inside_stages(ranks: Ranks, layout: dict[str, Any]) -> None:
    check(trained(ranks, of(MOE, pp=2, **layout)), expected("experts", 2, 8), 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv"])
def test_few_layers_many_stages_and_few_micro_batches(ranks: Ranks, schedule: Name) -> None:
    """Two layers on four stages: embedding and head have stages of their own. Fewer micro-batches than stages."""
    pp = 2 if schedule == "zbv" else 4
    check(trained(ranks, of(MODEL, pp=pp, schedule=schedule, size=3)), expected("two layers", 2, 3), 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zb"])
def test_tied_copies_stay_equal(ranks: Ranks, schedule: Name) -> None:
    chunks = {"chunks": 2} if schedule == "interleaved_zb" else {}
    config = of(TIED, steps=5, size=6, pp=2, schedule=schedule, dp_shard=2, zero=1, **chunks)
    check(trained(ranks, config), expected("tied", 5, 6), 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_float32(ranks: Ranks, schedule: Name) -> None:
    config = of(TIED, dtype="float32", pp=2, schedule=schedule, dp_shard=2, zero=3)
    check(trained(ranks, config), expected("tied", 2, 8, "float32"), 1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_bf16_differs_no_more_than_a_permutation_does(ranks: Ranks, schedule: Name) -> None:
    alone, config = (
        of(TIED, dtype="bf16"),
        of(TIED, dtype="bf16", pp=2, schedule=schedule, dp_shard=2, zero=1),
    )
    base, *others = (ranks.run(train_on_ranks, alone, seed, world_size=1)[0] for seed in (0, 1, 2, 3))
    bounds = [worst_by_kind(other, base) for other in others]
    for kind, error in worst_by_kind(trained(ranks, config), base).items():
        assert error <= 3 * max(bound[kind] for bound in bounds), f"{kind}: {error:.1e}"


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_one_stages_bad_number_is_skipped_by_all_and_named(ranks: Ranks, schedule: Name) -> None:
    config = of(DEEP, pp=2, dp_shard=2, zero=1, schedule=schedule)
    for where, layer, module in (("gradient", 1, "attention.query.weight"), ("output", 0, "feed_forward")):
        stages = (rank_stages(DEEP, schedule, 1, 2, pp).values() for pp in range(2))
        pp = next(pp for pp, own in enumerate(stages) if any(layer in stage.layers for stage in own))
        sick = 2 * pp + 1
        # the gradient is whole when it is looked at, and both of its ranks have the bad number
        first = 2 * pp if where == "gradient" else sick
        for result in ranks.run(step_with_poison, config, sick, float("nan"), where):
            assert result["unchanged"]
            assert result["updates"] == {1.0}
            assert result["skipped"].startswith(f"rank {first}: {where} of layers.{layer}.{module}")


def loss_and_logits(rank: int, world_size: int, config: Config) -> tuple[float, torch.Tensor]:
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, start_group())
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    loss = evaluate(stepper.model, [share, share], stepper.agreement)
    return loss, stepper.model.next_logits([3, 1, 4, 1, 5])


@pytest.mark.parametrize("layout", [{"schedule": "1f1b", "zero": 3, "dp_shard": 2}, {"schedule": "zbv"}])
def test_evaluation_and_generation(ranks: Ranks, layout: dict[str, Any]) -> None:
    config = of(TIED, pp=2, **layout)
    alone = parallelize(resolve_config(of(TIED)), Groups(), 0, CPU).module
    batch = held_out_share(global_batch(config, 0), resolve_config(of(TIED)).batch, 0, CPU)
    with torch.no_grad():
        summed = sum(alone(b.inputs).item() for b in batch)
        logits = next_logits(alone)([3, 1, 4, 1, 5])
    size = resolve_config(config).mesh.world_size
    for loss, found in ranks.run(loss_and_logits, config, world_size=size):
        assert loss == pytest.approx(summed / sum(b.loss_tokens for b in batch), rel=1e-13)
        assert torch.allclose(found, logits, rtol=1e-13)


def train_and_save(rank: int, world_size: int, config: Config, directory: Path) -> dict[str, torch.Tensor]:
    recorder, resolved = start_group(), resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    stepper.step(share, 1e-3, FLAGS)
    checkpoints = Checkpointer(directory, Checkpoint())
    state = tensors(stepper.model, stepper.optimizer)
    checkpoints.save(1, state, {}, "", asynchronous=False)
    checkpoints.close()
    return wholes(state).tensors


def load_saved(rank: int, world_size: int, config: Config, directory: Path) -> dict[str, torch.Tensor]:
    recorder, resolved = start_group(), resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)
    checkpoints = Checkpointer(directory, Checkpoint())
    state = tensors(stepper.model, stepper.optimizer)
    checkpoints.load(directory / "step-1", state)
    checkpoints.close()
    return wholes(state).tensors


@pytest.mark.parametrize("model", [TIED, MOE], ids=["tied", "experts"])
def test_checkpoints_load_under_another_pipeline(ranks: Ranks, tmp_path: Path, model: Model) -> None:
    layouts: list[dict[str, Any]] = [
        {"pp": 2, "dp_shard": 2, "zero": 2, "schedule": "1f1b"},
        {},
        {"pp": 4, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zbv", "dp_shard": 2, "zero": 3},
    ]
    for number, layout in enumerate(layouts):
        config, directory = of(model, **layout), tmp_path / str(number)
        size = resolve_config(config).mesh.world_size
        saved = ranks.run(train_and_save, config, directory, world_size=size)[0]
        other = of(model, **layouts[(number + 1) % len(layouts)])
        for found in ranks.run(
            load_saved, other, directory, world_size=resolve_config(other).mesh.world_size
        ):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


def saved_bytes(rank: int, world_size: int, config: Config) -> int:
    """The most that autograd keeps at once in a step."""
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, start_group())
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    with SavedActivations([*stepper.model.module.parameters(), *stepper.model.data.master_tensors()]) as kept:
        stepper.step(share, 1e-3, FLAGS)
    assert kept.live_bytes == 0
    return kept.peak_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_in_flight_is_what_the_schedule_says(ranks: Ranks, schedule: Name) -> None:
    one = ranks.run(saved_bytes, of(DEEP, size=1, pp=4, schedule="gpipe"))
    many = ranks.run(saved_bytes, of(DEEP, size=8, pp=4, schedule=schedule))
    for rank, (each, found) in enumerate(zip(one, many, strict=True)):
        held = max(sum(counts) for counts in most_in_flight(schedule, 4, 8, 1, rank))
        assert held == {"gpipe": 8, "1f1b": 4 - rank, "zb_h1": held}[schedule]
        # token ids are views of the whole batch, so those of one micro-batch cannot be told apart
        assert found == pytest.approx(held * each, rel=0.01)


@st.composite
def work(draw: st.DrawFn) -> tuple[Name, int, int, int]:
    name, ranks = draw(st.sampled_from(NAMES)), draw(st.integers(2, 6))
    microbatches = draw(st.integers(1, 20).filter(lambda m: schedules.is_legal(name, ranks, m)))
    return name, ranks, microbatches, schedules.chunks_of(name, draw(st.integers(1, 3)))


def planned(name: Name, ranks: int, microbatches: int, chunks: int) -> tuple[list[Plan], list[int]]:
    place = [schedules.rank_of_stage(name, stage, ranks) for stage in range(ranks * chunks)]
    return plans(schedules.actions(name, ranks, microbatches, chunks), place), place


@given(work())
def test_ranks_never_wait_in_a_circle(drawn: tuple[Name, int, int, int]) -> None:
    """Even if a message takes both its ranks until it has passed, as in-order queues of a device do."""
    name, ranks, microbatches, chunks = drawn
    found, place = planned(*drawn)
    at, passed = [0] * ranks, 0
    while any(number < len(plan) for number, plan in zip(at, found, strict=True)):
        before = list(at)
        for rank, plan in enumerate(found):
            while at[rank] < len(plan) and not isinstance(plan[at[rank]], Message):
                at[rank] += 1
            if at[rank] == len(plan):
                continue
            message = plan[at[rank]]
            assert isinstance(message, Message)
            other = message.receiver if rank == message.sender else message.sender
            if at[other] < len(found[other]) and found[other][at[other]] == message:
                at[rank] += 1
                at[other] += 1
                passed += 1
        assert at != before, "all ranks wait"
    crossings = sum(one != two for one, two in pairwise(place))
    assert passed == 2 * crossings * microbatches
    lists = schedules.actions(name, ranks, microbatches, chunks)
    assert [[entry for entry in plan if not isinstance(entry, Message)] for plan in found] == lists


@given(work())
def test_receives_are_begun_before_sends(drawn: tuple[Name, int, int, int]) -> None:
    """Between the same actions, and in the same order for each pair of ranks."""
    for rank, plan in enumerate(planned(*drawn)[0]):
        ordered = receives_first(plan, rank)
        for one, two in pairwise(ordered):
            if isinstance(one, Message) and isinstance(two, Message):
                assert one.receiver == rank or two.sender == rank
        for end in ("sender", "receiver"):
            own = [[e for e in p if getattr(e, end, rank) == rank] for p in (plan, ordered)]
            assert own[0] == own[1]


@given(work())
def test_what_was_sent_is_let_go(drawn: tuple[Name, int, int, int]) -> None:
    """What arrives tells which sends have arrived: never are many more kept than a schedule has in flight."""
    name, ranks, microbatches, chunks = drawn
    for rank, plan in enumerate(planned(*drawn)[0]):
        sent: list[Message] = []
        coming: dict[Need, Message] = {}
        most = 0
        for entry in plan:
            if isinstance(entry, Message):
                if entry.sender == rank:
                    sent.append(entry)
                else:
                    coming[entry.need] = entry
            else:
                kind, stage, number, _ = entry
                arrived = coming.pop(Need(kind is Kind.FORWARD, stage, number), None)
                if arrived and kind is not Kind.WEIGHT_GRAD:
                    sent = [m for m in sent if m.receiver != arrived.sender or m.used > arrived.made]
            most = max(most, len(sent) + len(coming))
        if name != "gpipe":
            assert most <= 4 * ranks * chunks
        assert most <= 2 * chunks * microbatches


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.sampled_from(NAMES))
def test_every_layer_is_on_one_stage(layers: int, ranks: int, chunks: int, name: Name) -> None:
    chunks = schedules.chunks_of(name, chunks)
    if ranks * chunks > layers + 2:
        return
    model = replace(MODEL, layers=layers)
    found = {n: s for rank in range(ranks) for n, s in rank_stages(model, name, chunks, ranks, rank).items()}
    assert sorted(found) == list(range(ranks * chunks))
    stages = [found[number] for number in sorted(found)]
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]


def two_batches(rank: int, world_size: int, config: Config) -> list[tuple[float, float]]:
    """(loss, norm) of a step of few micro-batches and one of more, as a growing batch has them."""
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, start_group())
    share = held_out_share(global_batch(config, 0), resolved.batch, resolved.mesh.data_rank(rank), CPU)
    results = [stepper.step(some, 1e-3, FLAGS) for some in (share[:4], share)]
    return [(result.loss, result.grad_norm) for result in results]


def test_the_number_of_micro_batches_may_change(ranks: Ranks) -> None:
    alone = ranks.run(two_batches, of(TIED), world_size=1)[0]
    for found in ranks.run(two_batches, of(TIED, pp=2, schedule="zbv"), world_size=2):
        for mine, theirs in zip(found, alone, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12)
