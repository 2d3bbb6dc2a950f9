"""Checkpoints of every axis load in every other layout: bit for bit, and the next step has the same gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from checkpoint_state import checkpointer
from fivefold.config.model import Experts
from fivefold.config.tree import Config
from fivefold.nn.dropout import step_key
from fivefold.parallel.apply import ParallelModel
from fivefold.proof.error import errors
from fivefold.proof.gather import wholes
from fivefold.spec.legal import Resolved, resolve_config
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.state import tensors
from fivefold.trainer.step import Stepper
from ranks import Ranks
from toy import CPU, FLAGS, MODEL, global_batch, gradients, start_group, stepper_on, toy_config

STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp 2 × zero 2": (4, {"pp": 2, "dp_shard": 2, "zero": 2}),
    "replicas": (2, {"dp_replicate": 2}),
    "pp 2": (2, {"pp": 2}),
    "pp 2, zbv": (2, {"pp": 2, "schedule": "zbv"}),
    "cp 2": (2, {"cp": 2}),
    "cp 2, ulysses, zero 1": (2, {"cp": 2, "context": "ulysses", "zero": 1}),
    "ep 2": (2, {"dp_shard": 2, "ep": 2, "zero": 1}),
    "ep 4, zero 3": (4, {"dp_shard": 4, "ep": 4, "zero": 3}),
    "zero 3 of 3": (3, {"dp_shard": 3, "zero": 3}),
    "hybrid": (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    "tp 2 × zero 1": (4, {"tp": 2, "dp_shard": 2, "zero": 1}),
    "pp 2 × tp 2": (4, {"pp": 2, "tp": 2}),
    "cp 2 × tp 2, zero 3": (4, {"cp": 2, "tp": 2, "zero": 3}),
}
FEW = list(LAYOUTS)[:3]


class Account(NamedTuple):
    """What a run holds, and the gradients of its next step; whole tensors."""

    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def config_of(layout: str) -> Config:
    config = toy_config(steps=STEPS + 1, **({"dp_shard": 1} | LAYOUTS[layout][1]))
    experts = Experts(count=4, top_k=2, ffn=20, auxiliary_loss=0.05, shared_ffn=12, dense_layers=1)
    return replace(config, model=replace(MODEL, tied=True, layers=4, experts=experts))


def step(stepper: Stepper, resolved: Resolved, rank: int, number: int) -> dict[str, Tensor]:
    """The whole gradients of a step."""
    found: dict[str, Tensor] = {}

    def keep(model: ParallelModel) -> None:
        found.update(gradients(model))

    data_rank, key = resolved.mesh.data_rank(rank), step_key(resolved.config.run.seed, number)
    batch = global_batch(resolved.config, number)
    share = held_out_share(batch, resolved.batch, data_rank, CPU, resolved.spans(rank), key)
    stepper.step(share, 1e-3, FLAGS, keep)
    return found


def save(rank: int, world_size: int, layout: str, directory: Path) -> Account:
    """Trains, saves, and goes on for one step."""
    recorder, resolved = start_group(), resolve_config(config_of(layout), world_size)
    stepper = stepper_on(resolved, recorder)
    for number in range(STEPS):
        step(stepper, resolved, rank, number)
    state, keeper = tensors(stepper.model, stepper.optimizer), checkpointer(directory)
    keeper.save(STEPS, state, {"step": STEPS}, "", asynchronous=False)
    keeper.close()
    whole = wholes(state)
    assert whole.disagreeing == []
    return Account(whole.tensors, step(stepper, resolved, rank, STEPS))


def load(rank: int, world_size: int, layout: str, directories: Sequence[Path]) -> list[Account]:
    """Of each checkpoint, as `save` told."""
    recorder, resolved = start_group(), resolve_config(config_of(layout), world_size)
    found = []
    for directory in directories:
        stepper, keeper = stepper_on(resolved, recorder), checkpointer(directory)
        state = tensors(stepper.model, stepper.optimizer)
        keeper.load(directory / f"step-{STEPS}", state)
        keeper.close()
        stepper.model.data.updated()
        whole = wholes(state)
        assert whole.disagreeing == []
        found.append(Account(whole.tensors, step(stepper, resolved, rank, STEPS)))
    return found


@pytest.mark.parametrize(
    "layouts", [pytest.param(FEW, id="few"), pytest.param(list(LAYOUTS), id="all", marks=pytest.mark.full)]
)
def test_each_loads_in_each(ranks: Ranks, tmp_path: Path, layouts: list[str]) -> None:
    directories = [tmp_path / str(number) for number in range(len(layouts))]
    saved = []
    for layout, directory in zip(layouts, directories, strict=True):
        world_size = LAYOUTS[layout][0]
        saved.append(ranks.run(save, layout, directory, world_size=world_size, timeout=300.0)[0])
    for layout in layouts:
        loaded = ranks.run(load, layout, directories, world_size=LAYOUTS[layout][0], timeout=300.0)[0]
        for source, before, after in zip(layouts, saved, loaded, strict=True):
            what = f"{source}, loaded in {layout}"
            assert after.state.keys() == before.state.keys(), what
            assert all(torch.equal(after.state[name], t) for name, t in before.state.items()), what
            assert len(before.gradients) == len({n for n in before.state if n.startswith("model.")}), what
            worst = errors(after.gradients, before.gradients)
            assert max(worst.values()) <= 1e-12, (what, max(worst, key=worst.__getitem__))
