"""Muon: torch's steps of whole matrices, wherever the parts of them lie; AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.tree import Config, Optimizer, Parallel
from fivefold.ledger import muon
from fivefold.ledger.pipeline import own_stages
from fivefold.ledger.shards import contents
from fivefold.parallel.apply import parallelize
from fivefold.parallel.mesh import Groups, groups
from fivefold.planner.jobs import job_of
from fivefold.proof.error import errors
from fivefold.proof.gather import wholes
from fivefold.spec.legal import resolve_config
from fivefold.spec.matrices import is_matrix, owners, work
from fivefold.spec.parameters import parameters
from fivefold.trainer.muon import direction
from fivefold.trainer.optimizer import LocalOptimizer
from fivefold.trainer.state import tensors
from ranks import Ranks
from test_dropout import trained
from test_experts import OPTIONS, with_experts
from test_parity import worst_by_kind
from toy import CPU, MODEL, start_group, toy_config, train_on_ranks

MUON = Optimizer(name="muon", lr=3e-3, momentum=0.95, clip=0.5)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def config_of(**layout: Any) -> Config:
    config = toy_config(dtype="float32", global_batch=12, **layout)
    return replace(config, model=with_experts(OPTIONS), optimizer=MUON)


def predicted(config: Config, world_size: int, rank: int) -> dict[str, tuple[int, int]]:
    """Calls and bytes of the exchanges of a rank, by axis, as the ledger has them."""
    job = job_of(replace(config, run=replace(config.run, ranks=world_size)))
    stages = contents(job.model, job.stages)
    at = resolve_config(config, world_size).mesh.coordinates(rank)["pp"]
    own = [stages[index] for index in own_stages(job, at)]
    place, tensor_place = divmod(rank % (world_size // job.pp), job.tp)
    found: dict[str, tuple[int, int]] = {}
    for row in muon.rows(job, own, place, tensor_place):
        count, size = found.get(row.axis, (0, 0))
        found[row.axis] = count + row.times, size + round(row.bytes_per_rank)
    return found


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    seed = sum(map(ord, name)) + 7919 * step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps_with_given_gradients(rank: int, world_size: int, config: Config) -> dict[str, Any]:
    """Three updates with gradients that every layout is given alike; state of the run, and traffic of the last."""
    recorder = start_group()
    resolved = resolve_config(config, world_size)
    model = parallelize(resolved, groups(resolved, rank), rank, CPU)
    optimizer = LocalOptimizer(config.optimizer, model.parameters)
    for step in range(3):
        for p in model.parameters:
            box = tuple(slice(a, a + n) for a, n in zip(*p.part, strict=True))
            p.value.grad = gradient(p.spec.name, p.spec.shape, step)[box].contiguous()
        recorder.clear()
        with recorder.phase("optimizer"):
            optimizer.step(2e-3, 0.5)
        rows = recorder.rows()
    found = wholes(tensors(model, optimizer))
    assert not found.disagreeing
    return {"state": found.tensors, "rows": rows}


def torch_steps(config: Config) -> dict[str, Tensor]:
    """The same by torch.optim's Muon and AdamW on whole parameters of one process."""
    model = parallelize(resolve_config(replace(config, parallel=Parallel())), Groups(), 0, CPU)
    values = {p.spec.name: p.value.detach().clone().requires_grad_() for p in model.parameters}
    matrices: dict[str, list[Tensor]] = {}
    for p in model.parameters:
        if is_matrix(p.spec):
            parts = values[p.spec.name].unbind() if len(p.spec.shape) == 3 else [values[p.spec.name]]
            matrices[p.spec.name] = [part.detach().clone().requires_grad_() for part in parts]
    options = config.optimizer
    of_matrices = torch.optim.Muon(
        [matrix for found in matrices.values() for matrix in found],
        lr=2e-3, weight_decay=options.weight_decay, momentum=options.momentum, nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    roles = {p.spec.name: p.spec.role for p in model.parameters}
    rest = {name: value for name, value in values.items() if name not in matrices}
    adamw = torch.optim.AdamW(
        [
            {"params": [v for n, v in rest.items() if (roles[n] in options.no_decay) == kept], "weight_decay": decay}
            for kept, decay in ((False, options.weight_decay), (True, 0.0))
        ],
        lr=2e-3, betas=options.betas, eps=options.eps,
    )  # fmt: skip
    for step in range(3):
        for name, value in values.items():
            given = 0.5 * gradient(name, tuple(value.shape), step)
            if name in matrices:
                for matrix, part in zip(
                    matrices[name], given.unbind() if given.dim() == 3 else [given], strict=True
                ):
                    matrix.grad = part.clone()
            else:
                value.grad = given
        of_matrices.step()
        adamw.step()
    whole = {n: torch.stack(m) if len(values[n].shape) == 3 else m[0] for n, m in matrices.items()}
    return {f"model.{name}": (whole.get(name, value)).detach() for name, value in values.items()}


FOUR = {"experts": replace(OPTIONS, count=4)}
LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [  # ranks, layout, model
    (1, {}, {}),
    (2, {"zero": 1}, {}),
    (3, {}, {}),
    (3, {"zero": 1}, {}),
    (3, {"zero": 2}, {}),
    (3, {"zero": 3}, {}),
    (2, {"tp": 2}, {}),
    (4, {"tp": 4}, {"kv_heads": 1}),
    (4, {"tp": 4, "sequence_parallel": True}, {"kv_heads": 2, "experts": replace(OPTIONS, shared_ffn=20)}),
    (4, {"tp": 2, "zero": 1}, {}),
    (4, {"tp": 2, "zero": 3, "ep": 2}, FOUR),
    (4, {"zero": 2, "ep": 2}, FOUR),
    (4, {"tp": 2, "cp": 2, "zero": 2}, {"kv_heads": 1}),
    (4, {"cp": 2, "ep": 2, "tp": 2}, FOUR),
    (4, {"pp": 2, "tp": 2}, {}),
    (4, {"dp_replicate": 2, "dp_shard": 2, "zero": 2}, {}),
]


@pytest.mark.parametrize(("world_size", "layout", "model"), LAYOUTS, ids=str)
def test_steps_are_torchs_on_whole_matrices(
    ranks: Ranks, world_size: int, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    """With the same gradients; and every rank sends what the ledger says."""
    config = config_of(**layout)
    config = replace(config, model=replace(config.model, **model))
    results = ranks.run(steps_with_given_gradients, config, world_size=world_size)
    expected = torch_steps(config)
    specs = [spec for spec in parameters(config.model) if is_matrix(spec)]
    assert {len(spec.shape) for spec in specs} == {2, 3}
    for result in results:
        state = result["state"]
        found = {name: state[name] for name in expected}
        worst = errors(found, expected)
        assert max(worst.values()) <= 1e-6, max(worst, key=worst.__getitem__)
        assert {f"optimizer.{spec.name}.momentum_buffer" for spec in specs} <= state.keys()
        assert not any(f"optimizer.{spec.name}.exp_avg" in state for spec in specs)
    rows = [[row for row in result["rows"] if row.primitive == "all_to_all"] for result in results]
    for rank, of_rank in enumerate(rows):
        told = {row.axis: (row.count, row.bytes_per_rank) for row in of_rank}
        assert told == predicted(config, world_size, rank), f"rank {rank}"
        assert {row.phase for row in of_rank} <= {"optimizer"}
    sent = sum(row.bytes_per_rank for of_rank in rows for row in of_rank)
    if layout.keys() == {"zero"}:  # each element there and back once, in bf16
        assert sent == 2 * 2 * sum(spec.numel for spec in specs)
    assert bool(sent) == (config.parallel.zero > 0 or config.parallel.tp > 1)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 6, 10)])
def test_products_are_counted(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape).bfloat16()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        found = direction(whole)
    assert counter.get_total_flops() == work(shape)
    sizes = torch.linalg.svdvals(found.float())
    assert 0.5 < sizes.min() <= sizes.max() < 1.5


def test_owners_are_balanced() -> None:
    assert owners([5, 1, 4, 4, 2], 2) == [0, 0, 1, 1, 0]
    sizes = [100, 100, 60, 60, 60, 20, 20, 3]
    loads = [sum(s for s, o in zip(sizes, owners(sizes, 3), strict=True) if o == rank) for rank in range(3)]
    assert max(loads) <= 4 / 3 * sum(sizes) / 3  # what taking the largest first guarantees


def test_layouts_train_alike(ranks: Ranks) -> None:
    """Judged like bf16: at most 3 × what one process shows when the rows of its micro-batches are permuted."""
    base = replace(config_of(micro_batch=2, steps=4), model=MODEL)
    with Ranks(1, backend=None) as one:
        expected = one.run(train_on_ranks, base)[0]
        others = [one.run(train_on_ranks, base, seed)[0] for seed in (1, 2, 3)]
    bounds: dict[str, float] = {}
    for other in others:
        for kind, error in worst_by_kind(other, expected).items():
            bounds[kind] = max(bounds.get(kind, 0.0), error)
    for zero in (1, 3):
        config = replace(config_of(micro_batch=2, steps=4, zero=zero), model=MODEL)
        for kind, error in worst_by_kind(trained(ranks, config, 3), expected).items():
            assert error <= 3 * bounds[kind], f"zero {zero} {kind}: {error:.1e}, permuted {bounds[kind]:.1e}"
