"""A scaled-down twin of a config: the same structure, small enough to be computed by one process in moments.

Heads, KV heads, experts, top-k, tying, biases and norms stay. Widths, vocabulary and sequence length shrink; sizes
that an axis divides stay divisible and uneven ones keep their remainder. The number of layers shrinks to what the
pipeline stages need.
"""

from math import lcm

from msgspec.structs import replace

from fivefold.config.model import Model
from fivefold.config.tree import Batch, Config, Data, Precision, Run, Schedule
from fivefold.spec.mesh import resolve
from fivefold.spec.schedules import chunks_of, is_legal

HEAD_DIM = 4
INIT_STD = 0.15
STEPS = 2
OVERFLOWING_SCALE = 2.0**40
"""The loss scale of a twin's first step in fp16: every gradient overflows, so every rank has to skip the step."""


def twin(config: Config, dtype: str, ranks: int = 0) -> Config:
    """The twin of `config` on as many ranks, computing in `dtype`."""
    mesh, parallel = resolve(config.parallel, ranks or config.run.ranks), config.parallel
    stages = mesh.pp * (chunks_of(parallel.schedule, parallel.chunks) if mesh.pp > 1 else 1)
    unit = lcm(8, mesh.tp, 2 * mesh.cp)
    sequence = _like(config.batch.sequence_length, unit, 1)
    accumulation = _accumulation(config, mesh.pp, mesh.data_parallel)
    micro_batch = min(config.batch.micro_batch, 2)
    global_batch = accumulation * micro_batch * mesh.data_parallel
    return replace(
        config,
        model=_model(config.model, unit, stages, sequence),
        batch=Batch(global_batch=global_batch, micro_batch=micro_batch, sequence_length=sequence),
        precision=replace(config.precision, dtype=dtype)
        if dtype != "float64"
        else Precision(dtype="float64"),
        schedule=Schedule(kind=config.schedule.kind, warmup_tokens=2 * global_batch * sequence),
        data=Data(document_mask=config.data.document_mask),
        run=Run(steps=STEPS + (dtype == "fp16"), seed=config.run.seed),
    )


def _like(size: int, unit: int, times: int) -> int:
    """A small size with the remainder that `size` has: at least `times` units, never above `size`."""
    return min(size, unit * times + size % unit)


def _model(model: Model, unit: int, stages: int, sequence: int) -> Model:
    experts = model.experts
    dense = min(experts.dense_layers, 1)
    layers = min(model.layers, max(2, stages, dense + 1) + (model.layers % stages > 0))
    if experts.count:
        experts = replace(
            experts,
            ffn=_like(experts.ffn, unit, 1),
            shared_ffn=_like(experts.shared_ffn, unit, 1),
            dense_layers=dense,
        )
    return replace(
        model,
        layers=layers,
        head_dim=HEAD_DIM,
        hidden=model.heads * HEAD_DIM,
        ffn=_like(model.ffn, unit, 2),
        vocab=_like(model.vocab, unit, 6),
        max_positions=sequence if model.positions == "learned" else max(model.max_positions, sequence),
        init_std=INIT_STD,
        experts=experts,
    )


def _accumulation(config: Config, pp: int, data_parallel: int) -> int:
    """The fewest micro-batches, but two where the config has more than one, that the schedule allows."""
    batch = config.batch
    sequences = batch.global_batch or batch.global_batch_tokens // batch.sequence_length
    wanted = max(1, sequences // (batch.micro_batch * data_parallel))
    schedule = config.parallel.schedule
    few = min(wanted, 2)
    return next(m for m in range(few, wanted + 1) if pp == 1 or is_legal(schedule, pp, m))
