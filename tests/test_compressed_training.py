"""Training with compressed gradients: near the reference, in fewer bytes, through checkpoints and other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace as structs_replace

from fivefold.config.errors import ConfigError
from fivefold.config.load import parse
from fivefold.config.model import Experts
from fivefold.config.tree import Checkpoint, Config
from fivefold.ledger.compression import compression_of, messages
from fivefold.ledger.job import Job
from fivefold.ledger.total import estimate, traffic_of
from fivefold.parallel.apply import ParallelModel
from fivefold.planner.compression import compression_verdicts, own_verdict
from fivefold.planner.jobs import job_of
from fivefold.proof.error import errors
from fivefold.proof.gather import wholes
from fivefold.spec.legal import Resolved, resolve_config
from fivefold.spec.parameters import parameters
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.checkpoint import Checkpointer
from fivefold.trainer.state import COMPRESSION, RegroupedCompression, compression_state, tensors
from fivefold.trainer.step import Stepper
from ranks import Ranks
from toy import (
    CPU,
    FLAGS,
    global_batch,
    gradients,
    reference,
    start_group,
    stepper_on,
    toy_config,
    train_on_ranks,
)

Balance: TypeAlias = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By parameter: Σ of the gradients that were applied, Σ of the true ones."""
REPLICAS = {"dp_replicate": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


@pytest.mark.parametrize(
    ("layout", "bound"),
    [
        (REPLICAS | {"compression": "bf16"}, 0.01),
        (REPLICAS | {"compression": "int8"}, 0.05),
        (REPLICAS | {"tp": 2, "compression": "int8"}, 0.05),
        (REPLICAS | {"cp": 2, "compression": "bf16"}, 0.01),
        (REPLICAS | {"pp": 2, "compression": "int8"}, 0.05),
        (HYBRID | {"zero": 1, "compression": "int8"}, 0.05),
        pytest.param(HYBRID | {"zero": 2, "compression": "bf16"}, 0.01, marks=pytest.mark.full),
        (HYBRID | {"zero": 3, "compression": "fp16"}, 0.01),
        # Sent densely from 1/n on: exact.
        (REPLICAS | {"compression": "topk", "compression_density": 0.5}, 1e-12),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_first_gradient_is_nearly_the_reference(
    ranks: Ranks, layout: dict[str, Any], bound: float
) -> None:
    config = toy_config(steps=2, **layout)
    world = 2 * max(layout.get(axis, 1) for axis in ("dp_shard", "tp", "cp", "pp"))
    found = ranks.run(train_on_ranks, config, world_size=world)[0]
    expected = reference(config)
    assert max(errors(found["gradients"], expected["gradients"]).values()) < bound
    assert found["loss"][1] == pytest.approx(expected["loss"][1], rel=bound)
    kept = [name for name in found["state"] if name.startswith("compression.own/error/")]
    assert kept


def test_bytes_are_counted_as_they_are_sent(ranks: Ranks) -> None:
    """int8: a little over a quarter of float32 both ways, instead of one all-reduce."""
    plain, coded = (
        ranks.run(
            train_on_ranks, toy_config(steps=1, dtype="float32", compression=c, **REPLICAS), world_size=2
        )
        for c in ("none", "int8")
    )
    bytes_of = [
        {row.primitive: row.bytes_per_rank for row in found[0]["rows"][0] if row.axis == "dp_replicate"}
        for found in (plain, coded)
    ]
    assert set(bytes_of[0]) == {"all_reduce"}
    assert set(bytes_of[1]) == {"all_to_all", "all_gather"}
    assert sum(bytes_of[1].values()) < 0.6 * bytes_of[0]["all_reduce"]


@pytest.mark.parametrize(
    ("layout", "axis"),
    [
        (REPLICAS, "dp_replicate"),
        (REPLICAS | {"cp": 2}, "dp_shard_cp"),
        (HYBRID | {"zero": 3}, "dp_replicate"),
    ],
    ids=["replicas", "cp", "hybrid"],
)
def test_recorded_bytes_are_the_ledgers(ranks: Ranks, layout: dict[str, Any], axis: str) -> None:
    """In the phase "gradient", also where sums start inside backward; zero 3's parameters stay in "backward"."""
    for method in ("bf16", "int8", "topk"):
        config = toy_config(steps=1, dtype="float32", compression=method, compression_density=0.1, **layout)
        world = 4 if len(layout) > 1 else 2
        of_data = ("dp_replicate", "dp_shard", "dp_shard_cp")
        predicted = {
            (row.axis, row.primitive, row.phase): (row.times, round(row.bytes_per_rank))
            for row in traffic_of(
                job_of(structs_replace(config, run=structs_replace(config.run, ranks=world))), 0
            )
            if row.axis in of_data
        }
        assert any(place[::2] == (axis, "gradient") for place in predicted)
        for found in ranks.run(train_on_ranks, config, world_size=world):
            recorded = {
                (row.axis, row.primitive, row.phase): (row.count, row.bytes_per_rank)
                for row in found["rows"][0]
                if row.axis in of_data
            }
            assert recorded == predicted, method


def gone_on(resolved: Resolved, first: int, directory: str) -> tuple[Stepper, Checkpointer]:
    """Ranks in the state of the newest checkpoint in `directory`, from before step `first`, if there is one."""
    stepper = stepper_on(resolved, start_group())
    checkpoints = Checkpointer(Path(directory), Checkpoint())
    if (path := checkpoints.latest()) is not None:
        regrouped = RegroupedCompression(stepper.model, checkpoints.shapes(path))
        asked = regrouped.asked(tensors(stepper.model, stepper.optimizer))
        checkpoints.load(path, asked, leave=lambda unasked: [n for n in unasked if n.startswith(COMPRESSION)])
        regrouped.adopt()
        stepper.optimizer.set_updates(first)
        stepper.model.data.updated()
    return stepper, checkpoints


def stepped(rank: int, n: int, config: Config, first: int, count: int, directory: str, save: bool) -> Stepper:
    """Some steps, from the newest checkpoint in `directory`; saves at the end if asked to."""
    resolved = resolve_config(config, n)
    stepper, checkpoints = gone_on(resolved, first, directory)
    for step in range(first, first + count):
        share = held_out_share(global_batch(config, step), resolved.batch, resolved.mesh.data_rank(rank), CPU)
        stepper.step(share, 1e-3, FLAGS)
    if save:
        checkpoints.save(first + count, tensors(stepper.model, stepper.optimizer), {}, "", asynchronous=False)
    checkpoints.close()
    return stepper


def kept_and_weights(
    rank: int, n: int, config: Config, first: int, count: int, directory: str, save: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Σ over the ranks of what they keep, what this one keeps, and the weights."""
    model = stepped(rank, n, config, first, count, directory, save).model
    own = {each.key: each.value for each in compression_state(model)}
    totals = {}
    for each in compression_state(model):
        if each.is_own:
            totals[each.key] = each.value.clone()
            dist.all_reduce(totals[each.key])
    return totals, own, {p.spec.name: p.value.detach() for p in model.parameters}


@pytest.mark.parametrize("method", ["int8", "powersgd", "topk"])
def test_checkpoints_keep_the_state_also_for_other_numbers_of_ranks(
    ranks: Ranks, method: str, tmp_path: Path
) -> None:
    def config(n: int) -> Config:
        return toy_config(dp_replicate=n, compression=method, compression_density=0.1, compression_rank=2)

    whole = ranks.run(kept_and_weights, config(3), 0, 4, str(tmp_path / "a"), False, world_size=3)
    half = ranks.run(kept_and_weights, config(3), 0, 2, str(tmp_path / "b"), True, world_size=3)
    rest = ranks.run(kept_and_weights, config(3), 2, 2, str(tmp_path / "b"), False, world_size=3)
    for (_, own, weights), (_, own_again, weights_again) in zip(whole, rest, strict=True):
        assert own.keys() == own_again.keys()
        assert all(torch.equal(own[key], own_again[key]) for key in own)
        assert all(torch.equal(weights[key], weights_again[key]) for key in weights)
    for n in (2, 4):
        totals = ranks.run(kept_and_weights, config(n), 2, 0, str(tmp_path / "b"), False, world_size=n)[0][0]
        assert totals.keys() == half[0][0].keys()
        for key, total in totals.items():
            torch.testing.assert_close(total, half[0][0][key], rtol=1e-12, atol=1e-15)


def test_a_run_goes_on_compressed_in_another_way_or_not_at_all(ranks: Ranks, tmp_path: Path) -> None:
    def config(method: str, rank: int = 2, **axes: int) -> Config:
        return toy_config(compression=method, compression_rank=rank, **(REPLICAS | axes))

    def go_on(to: Config, world_size: int = 2) -> list[Any]:
        return ranks.run(kept_and_weights, to, 2, 0, str(tmp_path), False, world_size=world_size)

    before = ranks.run(kept_and_weights, config("powersgd"), 0, 2, str(tmp_path), True, world_size=2)
    for to, world_size in (
        (config("none"), 2),
        (config("int8"), 2),  # keeps what is not sent of small tensors, too
        (config("powersgd", rank=1), 2),
        (config("powersgd", tp=2), 4),
    ):
        found = go_on(to, world_size)
        if world_size == 2:
            assert all(torch.equal(found[0][2][name], value) for name, value in before[0][2].items())
        for key, total in found[0][0].items():
            if key in before[0][0] and total.shape == before[0][0][key].shape:
                torch.testing.assert_close(total, before[0][0][key], rtol=1e-12, atol=1e-15)
    # Also where a checkpoint is written before any gradient has taken it.
    ranks.run(kept_and_weights, config("none"), 3, 0, str(tmp_path), True, world_size=2)
    for key, total in go_on(config("powersgd"))[0][0].items():
        torch.testing.assert_close(total, before[0][0][key], rtol=1e-12, atol=1e-15)
    stepped_on = ranks.run(kept_and_weights, config("none"), 3, 1, str(tmp_path), True, world_size=2)
    again = ranks.run(kept_and_weights, config("topk"), 4, 1, str(tmp_path), False, world_size=2)
    assert not stepped_on[0][0]
    assert all(bool(total.isfinite().all()) for total in again[0][0].values())


def check_skip(rank: int, n: int, directory: str) -> None:
    """A step that is not applied leaves what is kept as it was."""
    config = toy_config(compression="int8", **REPLICAS)
    stepper = stepped(rank, n, config, 0, 2, directory, False)
    before = {each.key: each.value.clone() for each in compression_state(stepper.model)}
    resolved = resolve_config(config, n)
    share = held_out_share(global_batch(config, 2), resolved.batch, resolved.mesh.data_rank(rank), CPU)

    weight = stepper.model.data.buckets[-1].parameters[0]
    hook = weight.register_hook(lambda gradient: gradient * (torch.inf if rank == 1 else 1.0))
    spoilt = stepper.step(share, 1e-3, FLAGS)
    hook.remove()
    assert spoilt.skipped is not None
    after = {each.key: each.value for each in compression_state(stepper.model)}
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert stepper.step(share, 1e-3, FLAGS).skipped is None


def test_a_skipped_step_keeps_nothing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(check_skip, str(tmp_path), world_size=2)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ({"compression": "int8"}, "there are none; set dp_replicate ≥ 2"),
        ({"compression": "int8", "dp_shard": 2, "zero": 3}, "set zero = 0, or dp_replicate ≥ 2"),
    ],
)
def test_what_cannot_be_compressed_is_refused(layout: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_config(toy_config(**layout))


def test_a_loss_scale_is_refused() -> None:
    config = toy_config(dtype="fp16", compression="int8", **REPLICAS)
    with pytest.raises(ConfigError, match="loss scale"):
        resolve_config(config)


def test_the_ledger_counts_what_is_sent() -> None:
    """As collectives/compression does, which another test counts; PowerSGD on whole matrices."""
    for method in ("bf16", "int8", "topk", "powersgd"):
        config = toy_config(dtype="float32", compression=method, compression_rank=2, **REPLICAS)
        found = estimate(job_of(config))
        rows = [row for row in found.traffic if row.phase == "gradient"]
        how, buckets = compression_of(config.parallel), bucket_shapes(config)
        expected = sum(size for shapes in buckets for _, size in messages(how, shapes, 4, 2))
        assert sum(row.bytes_per_rank for row in rows) == pytest.approx(expected, rel=0.1)


def bucket_shapes(config: Config) -> list[list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for spec in parameters(config.model):
        found.setdefault(spec.name.split(".")[1] if spec.name.startswith("layers.") else "", []).append(
            spec.shape
        )
    return list(found.values())


def on_two_h100(*lines: str) -> Job:
    """GPT-2 on two devices."""
    text = "[model]\nlayers = 12\nhidden = 768\nheads = 12\nffn = 2048\nvocab = 50257\n"
    text += '[cluster]\npreset = "1x2 h100"\n[batch]\nglobal_batch = 2\nsequence_length = 1024\n'
    return job_of(parse("\n".join((text + "[parallel]\ndp_replicate = 2", *lines))))


def on_100_mbit(job: Job) -> Job:
    node = structs_replace(job.hardware.node, bandwidth=1.25e7)
    return dataclass_replace(job, hardware=structs_replace(job.hardware, node=node))


def test_plan_says_whether_compression_pays() -> None:
    """Over NVLink no method pays, over 100 Mbit/s every one does."""
    job = on_two_h100()
    lines = compression_verdicts(job)
    assert len(lines) == 4
    assert all(line.endswith("does not pay") for line in lines)
    assert all(line.endswith(", pays") for line in compression_verdicts(on_100_mbit(job)))
    assert compression_verdicts(dataclass_replace(job, dp_replicate=1)) == []


def test_estimate_says_whether_the_compression_asked_for_pays() -> None:
    assert own_verdict(on_two_h100()) is None
    for method in ("bf16", "int8", "topk", "powersgd"):
        job = on_two_h100(f'compression = "{method}"')
        assert (own_verdict(job) or "").endswith("does not pay")
        assert (own_verdict(on_100_mbit(job)) or "").endswith(", pays")


def balanced(
    rank: int, n: int, config: Config, first: int, directory: str, sums: Balance
) -> tuple[Balance, list[str]]:
    """Two steps that go on from the newest checkpoint. After each, for every parameter, Σ applied + Σ over the ranks of
    what they keep = Σ of the true gradients, of all steps since the first run's first; true are those of the same
    layout, uncompressed, at the same weights. Also returns the names of what is kept."""
    resolved = resolve_config(config, n)
    stepper, checkpoints = gone_on(resolved, first, directory)
    plain = structs_replace(config, parallel=structs_replace(config.parallel, compression="none"))
    twin = stepper_on(resolve_config(plain, n), stepper.recorder)
    found: list[dict[str, torch.Tensor]] = []

    def keep(model: ParallelModel) -> None:
        found.append(gradients(model))

    names: list[str] = []
    for step in range(first, first + 2):
        for own, copied in zip(stepper.model.parameters, twin.model.parameters, strict=True):
            copied.value.data.copy_(own.value.data)
        twin.model.data.updated()
        for each in (stepper, twin):
            share = held_out_share(
                global_batch(config, step), resolved.batch, resolved.mesh.data_rank(rank), CPU
            )
            assert each.step(share, 1e-3, FLAGS, keep).skipped is None
        rows = {each.key: each.piece() for each in compression_state(stepper.model) if each.is_own}
        kept = {key.rpartition("/")[2]: rows.sum(0) for key, rows in wholes(rows).tensors.items()}
        names = list(kept)
        sent, exact = found[-2:]
        assert sent.keys() == exact.keys()
        for name in sent:
            applied, true = sums.get(name, (torch.zeros_like(sent[name]),) * 2)
            sums[name] = applied + sent[name], true + exact[name]
            applied, true = sums[name]
            torch.testing.assert_close(
                applied + kept.get(name, 0.0), true, rtol=1e-12, atol=1e-12 * float(true.norm())
            )
    checkpoints.save(first + 2, tensors(stepper.model, stepper.optimizer), {}, "", asynchronous=False)
    checkpoints.close()
    return sums, names


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp_replicate": 3},
    REPLICAS | {"tp": 2},  # sums norms uncompressed
    REPLICAS | {"pp": 2},
    HYBRID | {"zero": 1},
)


@pytest.mark.parametrize(
    "method",
    ["int8", "topk", pytest.param("threshold", marks=pytest.mark.full), "powersgd"],
)
def test_nothing_is_lost_at_any_step_of_training_through_checkpoints_in_other_layouts(
    ranks: Ranks, method: str, tmp_path: Path
) -> None:
    """Also where parameters are not compressed any more: copies under tensor parallel, and all of them at the end."""
    sums: Balance = {}
    layouts = [layout for layout in LAYOUTS if method != "powersgd" or "zero" not in layout]
    for index, layout in enumerate((*layouts, {"dp_replicate": 2})):
        is_last = index == len(layouts)
        config = toy_config(
            compression="none" if is_last else method,
            compression_density=0.1,
            compression_rank=2,
            **layout,
        )
        config = structs_replace(config, model=structs_replace(config.model, tied=False))
        world = 1
        for axis in ("dp_replicate", "dp_shard", "tp", "pp"):
            world *= layout.get(axis, 1)
        (sums, names), *others = ranks.run(balanced, config, 2 * index, str(tmp_path), sums, world_size=world)
        assert bool(names) != is_last
        for other, _ in others:
            assert all(torch.equal(sums[name][0], other[name][0]) for name in sums)
    assert len(sums) > 10
    assert all(bool(true.norm() > 0) for _, true in sums.values())


@pytest.mark.full
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_nothing_is_lost_of_experts(ranks: Ranks, method: str, tmp_path: Path) -> None:
    sums: Balance = {}  # in the third layout experts have no replicas, so that nothing compresses them
    for index, layout in enumerate(({"dp_replicate": 2}, {"dp_replicate": 2, "ep": 2}, {"ep": 2}, {"ep": 1})):
        axes = {"dp_replicate": 1, "cp": 2} | layout
        config = toy_config(compression=method, compression_density=0.1, compression_rank=2, **axes)
        config = structs_replace(
            config, model=structs_replace(config.model, experts=Experts(count=4, ffn=16))
        )
        world = 2 * axes["dp_replicate"]
        sums, _ = ranks.run(balanced, config, 2 * index, str(tmp_path), sums, world_size=world)[0]
    assert any("expert" in name for name in sums)


def momentum_weights(
    rank: int, n: int, config: Config, first: int, directory: str
) -> dict[str, torch.Tensor]:
    """Whole weights after two steps that go on from the newest checkpoint, and save."""
    return wholes(
        {
            p.spec.name: p.piece(p.value)
            for p in stepped(rank, n, config, first, 2, directory, True).model.parameters
        }
    ).tensors


def test_momentum_correction_is_momentum_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Sent densely it is SGD with momentum: of what is compressed, and, by the optimizer, of the copies under tensor
    parallel that are not; also where a checkpoint hands the momentum from one to the other."""

    def config(compression: str, **axes: int) -> Config:
        made = toy_config(compression=compression, compression_density=0.5, **(REPLICAS | axes))
        return structs_replace(
            made,
            optimizer=structs_replace(made.optimizer, name="sgd", momentum=0.9, weight_decay=0.0, clip=0.0),
        )

    def weights(directory: str, *configs: Config) -> dict[str, torch.Tensor]:
        for index, each in enumerate(configs):
            world = 2 * each.parallel.tp
            found = ranks.run(momentum_weights, each, 2 * index, str(tmp_path / directory), world_size=world)
        return found[0]

    plain = config("none")
    expected = weights("a", plain, plain, plain, plain)
    found = weights("b", plain, config("topk"), config("topk", tp=2), config("none", tp=2))
    assert max(errors(found, expected).values()) <= 1e-12
    again = weights("c", plain, plain, config("topk", tp=2), config("topk"))
    assert max(errors(again, expected).values()) <= 1e-12
