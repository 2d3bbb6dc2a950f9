"""What a config may ask for, decided before any process starts; refusals name the nearest legal values."""

from dataclasses import dataclass

from fivefold.config.errors import ConfigError, nearest
from fivefold.config.tree import Config, Model, Parallel
from fivefold.spec.batch import BatchPlan, LearningRate, learning_rate, plan_batch
from fivefold.spec.layout import Owned, Split, Unit, table
from fivefold.spec.mesh import Mesh, resolve


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config with what follows from it."""

    config: Config
    mesh: Mesh
    batch: BatchPlan
    learning_rate: LearningRate


def resolve_config(config: Config, world_size: int = 0) -> Resolved:
    """Checks `config` for `world_size` ranks (0 = as many as run.ranks or the layout name).

    Raises:
        ConfigError: one line about the first thing that cannot be.
    """
    check_model(config.model)
    mesh = resolve(config.parallel, world_size or config.run.ranks)
    check_layout(config.model, config.parallel, mesh)
    if config.batch.sequence_length > config.model.max_positions:
        raise ConfigError(
            f"batch.sequence_length = {config.batch.sequence_length}: longer than model.max_positions = "
            f"{config.model.max_positions}"
        )
    batch = plan_batch(config.batch, mesh)
    return Resolved(
        config, mesh, batch, learning_rate(config.optimizer, config.schedule, batch, config.run.steps)
    )


def check_model(model: Model) -> None:
    """Refuses sizes that contradict each other."""
    if model.hidden % model.heads and model.head_dim == model.hidden // model.heads:
        raise ConfigError(f"model.heads = {model.heads}: does not divide model.hidden = {model.hidden}")
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.kv_heads = {model.kv_heads}: does not divide model.heads = {model.heads}; nearest legal: "
            f"{nearest(model.kv_heads, _divisors(model.heads))}"
        )
    if model.positions == "rotary" and model.head_dim % 2 and not model.latent.kv_rank:
        raise ConfigError(
            f"model.head_dim = {model.head_dim}: rotary positions turn pairs, so it must be even"
        )
    experts = model.experts
    if experts.count and experts.top_k > experts.count:
        raise ConfigError(
            f"model.experts.top_k = {experts.top_k}: more than model.experts.count = {experts.count}"
        )
    if experts.count and not experts.ffn:
        raise ConfigError("model.experts.ffn = 0: routed experts need a width")


def check_layout(model: Model, parallel: Parallel, mesh: Mesh) -> None:
    """Refuses degrees that the layout table cannot serve."""
    shards = mesh.dp_shard * mesh.cp
    if parallel.zero and shards == 1:
        raise ConfigError(
            f"parallel.zero = {parallel.zero}: dp_shard × cp = 1, nothing to split over; "
            "set zero = 0 or dp_shard ≥ 2"
        )
    if shards % parallel.ep:
        raise ConfigError(
            f"parallel.ep = {parallel.ep}: does not divide dp_shard × cp = {shards}; nearest legal: "
            f"{nearest(parallel.ep, _divisors(shards))}"
        )
    if parallel.ep > 1 and not model.experts.count:
        raise ConfigError(f"parallel.ep = {parallel.ep}: the model has no experts; set ep = 1")
    degrees = {"tp": mesh.tp, "ep": parallel.ep}
    for _, axes in table(model):
        for axis, placement in axes.items():
            if degrees.get(axis, 1) > 1:
                _check_units(model, axis, degrees[axis], placement)
    if mesh.pp * parallel.chunks > model.layers:
        raise ConfigError(
            f"parallel.pp × chunks = {mesh.pp * parallel.chunks} stages: more than the model's "
            f"{model.layers} layers"
        )
    if parallel.sequence_parallel and mesh.tp == 1:
        raise ConfigError("parallel.sequence_parallel = true: belongs to tensor parallel, but tp = 1")


def check_trainable(resolved: Resolved) -> None:
    """Refuses what can be planned and is not trained yet."""
    model, parallel, mesh = resolved.config.model, resolved.config.parallel, resolved.mesh
    lacking = {
        "mixture of experts": model.experts.count > 0,
        "latent attention": model.latent.kv_rank > 0,
        f"model.positions = {model.positions}": model.positions != "rotary",
        f"model.norm = {model.norm}": model.norm != "rmsnorm",
        f"model.activation = {model.activation}": model.activation != "swiglu",
        "biases": model.qkv_bias or model.output_bias,
        "model.qk_norm": model.qk_norm,
        "model.embedding_norm": model.embedding_norm,
        "model.dropout": model.dropout > 0,
        f"parallel.pp = {mesh.pp}": mesh.pp > 1,
        f"parallel.cp = {mesh.cp}": mesh.cp > 1,
        f"parallel.tp = {mesh.tp}": mesh.tp > 1,
        f"parallel.ep = {parallel.ep}": parallel.ep > 1,
        f"parallel.zero = {parallel.zero}": parallel.zero in (1, 2),
        f"parallel.backend = {parallel.backend}": parallel.backend == "shm",
        "precision.dtype = fp16": resolved.config.precision.dtype == "fp16",
    }
    if used := [name for name, is_used in lacking.items() if is_used]:
        raise ConfigError(f"{', '.join(used)}: can be planned, but this version does not train it yet")


def _check_units(model: Model, axis: str, degree: int, placement: Split | Owned) -> None:
    count = units(model, placement.unit)
    if isinstance(placement, Split) and (
        placement.padded or (placement.replicable and degree % count == 0 and degree > count)
    ):
        return
    if count % degree:
        raise ConfigError(
            f"parallel.{axis} = {degree}: does not divide the model's {count} {placement.unit}; "
            f"nearest legal: {nearest(degree, _divisors(count))}"
        )


def units(model: Model, unit: Unit) -> int:
    """How many of a unit the model has; of columns, the greatest number that every split width divides by."""
    return {
        "heads": model.heads,
        "KV heads": model.kv_heads,
        "columns": model.experts.ffn if model.experts.count else model.ffn,
        "vocabulary rows": model.vocab,
        "experts": model.experts.count,
    }[unit]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
