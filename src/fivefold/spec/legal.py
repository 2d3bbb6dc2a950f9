"""Checks of a config before any process starts, and what follows from it; errors name the nearest legal values."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd

from fivefold.config.errors import ConfigError, nearest, nearest_multiples
from fivefold.config.model import Model
from fivefold.config.tree import Config, Data, Parallel
from fivefold.spec.batch import BatchPlan, LearningRate, learning_rate, plan_batch
from fivefold.spec.layout import Axis, Owned, Unit, table
from fivefold.spec.mesh import Mesh, resolve
from fivefold.spec.ramp import BatchCourse, plan_course
from fivefold.spec.schedules import chunks_of, is_legal, nearest_legal
from fivefold.spec.sequence import Span, spans
from fivefold.spec.stages import most_stages
from fivefold.spec.synchronisation import PROGRAMS, serves

MOST_DIVISOR = 1 << 16
"""Divisors are looked for up to here: the tree allows no more heads and experts."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked config with what follows from it.

    Attributes:
        batch: the batch after a ramp.
        course: the batch of every step.
    """

    config: Config
    mesh: Mesh
    batch: BatchPlan
    course: BatchCourse
    learning_rate: LearningRate

    @property
    def samples(self) -> int:
        """Samples that a run of `run.steps` consumes."""
        return self.course.samples_after(self.config.run.steps)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of every sequence that `rank` reads."""
        at = self.mesh.coordinates(rank)["cp"]
        return spans(self.batch.sequence_length, self.mesh.cp, at, self.config.parallel.context)


def resolve_config(config: Config, world_size: int = 0) -> Resolved:
    """Checks `config` for `world_size` ranks (0 = as many as run.ranks or the layout says).

    Raises:
        ConfigError: one line about the first problem.
    """
    check_model(config.model)
    check_data(config.data)
    mesh = resolve(config.parallel, world_size or config.run.ranks)
    check_layout(config.model, config.parallel, mesh)
    check_algorithm(config.parallel, mesh)
    check_compression(config, mesh)
    if config.batch.sequence_length > config.model.max_positions:
        raise ConfigError(
            f"batch.sequence_length = {config.batch.sequence_length}: longer than model.max_positions; "
            f"expected at most {config.model.max_positions}"
        )
    if mesh.cp > config.batch.sequence_length:
        raise ConfigError(
            f"parallel.cp = {mesh.cp}: more ranks than a sequence has tokens; "
            f"expected at most batch.sequence_length = {config.batch.sequence_length}"
        )
    batch = plan_batch(config.batch, mesh, config.parallel.schedule)
    course = plan_course(config.batch.ramp, batch)
    check_schedule(config.parallel, mesh, batch, f"batch.global_batch = {batch.global_batch}")
    for plan in course.plans():
        check_schedule(config.parallel, mesh, plan, f"batch.ramp reaches {plan.global_batch} sequences")
    total_tokens = course.samples_after(config.run.steps) * batch.sequence_length
    rate = learning_rate(config.optimizer, config.schedule, batch, total_tokens)
    return Resolved(config, mesh, batch, course, rate)


def check_model(model: Model) -> None:
    """Refuses sizes that contradict each other."""
    if problem := next(_contradictions(model), None):
        raise ConfigError(problem)


def check_data(data: Data) -> None:
    """Refuses a mixture beside the keys of a single source."""
    for key in ("path", "text_field", "answers_only"):
        if data.sources and getattr(data, key) != getattr(Data(), key):
            raise ConfigError(
                f"data.{key} and data.sources: give one of the two; each source has its own {key}"
            )


def _contradictions(model: Model) -> Iterator[str]:
    if model.hidden % model.heads and model.head_dim == model.hidden // model.heads:
        legal = nearest(model.heads, _divisors(model.hidden))
        yield f"model.heads = {model.heads}: does not divide model.hidden = {model.hidden}; nearest legal: {legal}"
    if model.heads % model.kv_heads:
        legal = nearest(model.kv_heads, _divisors(model.heads))
        yield (
            f"model.kv_heads = {model.kv_heads}: does not divide model.heads = {model.heads}; "
            f"nearest legal: {legal}"
        )
    if model.positions == "rotary" and model.head_dim % 2 and not model.latent.kv_rank:
        yield (
            f"model.head_dim = {model.head_dim}: rotary positions turn pairs, so it must be even; "
            f"nearest legal: {nearest_multiples(model.head_dim, 2)}"
        )
    scaling = model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            f"model.rope_scaling.low_freq_factor = {scaling.low_freq_factor}: expected less than "
            f"high_freq_factor = {scaling.high_freq_factor}"
        )
    if _has_dense_layers(model) and not model.ffn:
        yield "model.ffn = 0: dense layers need a width; set ffn ≥ 1"
    if model.experts.count:
        yield from _expert_contradictions(model)
    if model.latent.kv_rank:
        yield from _latent_contradictions(model)


def _expert_contradictions(model: Model) -> Iterator[str]:
    experts = model.experts
    if not experts.ffn:
        yield "model.experts.ffn = 0: routed experts need a width; set ffn ≥ 1"
    if experts.dense_layers >= model.layers:
        yield (
            f"model.experts.dense_layers = {experts.dense_layers}: leaves none of the {model.layers} layers "
            f"to the experts; expected at most {model.layers - 1}"
        )
    if experts.count % experts.groups:
        legal = nearest(experts.groups, _divisors(experts.count))
        yield (
            f"model.experts.groups = {experts.groups}: does not divide model.experts.count = {experts.count}; "
            f"nearest legal: {legal}"
        )
    if experts.top_groups > experts.groups:
        yield f"model.experts.top_groups = {experts.top_groups}: expected at most groups = {experts.groups}"
    eligible = experts.count * experts.top_groups // experts.groups
    if experts.top_k > eligible:
        of = f"{experts.top_groups} of {experts.groups} groups" if experts.groups > 1 else "the model"
        yield f"model.experts.top_k = {experts.top_k}: expected at most {eligible}, the experts of {of}"


def _latent_contradictions(model: Model) -> Iterator[str]:
    latent = model.latent
    if not latent.value_dim:
        yield "model.latent.value_dim = 0: latent attention needs a width; set value_dim ≥ 1"
    if not latent.nope_dim + latent.rope_dim:
        yield "model.latent.nope_dim = rope_dim = 0: latent attention needs a width; set nope_dim ≥ 1"
    if latent.rope_dim % 2:
        yield (
            f"model.latent.rope_dim = {latent.rope_dim}: rotary positions turn pairs, so it must be even; "
            f"nearest legal: {nearest_multiples(latent.rope_dim, 2)}"
        )


def check_layout(model: Model, parallel: Parallel, mesh: Mesh) -> None:
    """Refuses degrees that the model does not divide by (layout table), and keys that contradict each other."""
    shards = mesh.dp_shard * mesh.cp
    if parallel.zero and shards == 1:
        raise ConfigError(
            f"parallel.zero = {parallel.zero}: dp_shard × cp = 1, nothing to split over; "
            "set zero = 0 or dp_shard ≥ 2"
        )
    if parallel.sequence_parallel and mesh.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel = true: belongs to tensor parallel, but tp = 1; set it to false"
        )
    if parallel.ep > 1 and not model.experts.count:
        raise ConfigError(f"parallel.ep = {parallel.ep}: the model has no experts; set ep = 1")
    _check_degree("tp", mesh.tp, _demands(model, "tp"))
    dealt = f"dp_shard × cp = {shards}"
    if not parallel.zero and mesh.data_parallel > 1:
        dealt += " (with zero = 0, dp_shard is 1: set zero = 1)"
    _check_degree("ep", parallel.ep, [*_demands(model, "ep"), _Demand(shards, dealt)])
    if parallel.context == "ulysses":
        _check_degree("cp", mesh.cp, _head_demands(model, mesh.tp))
    _check_stages(model, parallel, mesh)


def check_algorithm(parallel: Parallel, mesh: Mesh) -> None:
    """Refuses a program if there is one data rank, or if it lacks a collective that the ZeRO stage needs."""
    name, zero = parallel.algorithm, parallel.zero
    if name == "backend":
        return
    if not zero and mesh.data_parallel * mesh.cp == 1:
        raise ConfigError(
            f"parallel.algorithm = {name}: sums gradients over the data ranks, and there is one; set dp_replicate ≥ 2, "
            "or algorithm = backend"
        )
    if not serves(name, zero):
        legal = " or ".join(other for other in PROGRAMS if serves(other, zero))
        raise ConfigError(
            f"parallel.algorithm = {name} with zero = {zero}: sums whole gradients, and has no reduce-scatter and "
            f"all-gather of shards; set zero = 0, or algorithm = {legal}"
        )
    if parallel.compression != "none":
        raise ConfigError(
            f"parallel.algorithm = {name} with compression = {parallel.compression}: compressed sums have collectives "
            "of their own, and there is room for 1 of the 2; set algorithm = backend, or compression = none"
        )


def check_compression(config: Config, mesh: Mesh) -> None:
    """Refuses gradient compression where nothing is summed over replicas, or where error feedback cannot work."""
    method, zero = config.parallel.compression, config.parallel.zero
    if method == "none":
        return
    if (mesh.dp_replicate if zero else mesh.data_parallel * mesh.cp) == 1:
        raise ConfigError(
            f"parallel.compression = {method}: compresses sums over replicas, and there are none; "
            + ("set zero = 0, or dp_replicate ≥ 2" if zero else "set dp_replicate ≥ 2, or compression = none")
        )
    if method == "powersgd" and zero:
        raise ConfigError(
            f"parallel.compression = powersgd with zero = {zero}: its factors belong to whole matrices, not to "
            "shards; set zero = 0, or compression = int8"
        )
    if config.model.tied and mesh.pp > 1:
        raise ConfigError(
            f"parallel.compression = {method} with pp = {mesh.pp}: two stages hold the tied embedding, and would "
            "keep different parts of its gradient; set pp = 1, model.tied = false, or compression = none"
        )
    if config.precision.dtype == "fp16":
        raise ConfigError(
            f"parallel.compression = {method}: what is kept for the next gradient would be in the unit of a loss "
            "scale that changes; set precision.dtype = bf16, or compression = none"
        )


def check_schedule(parallel: Parallel, mesh: Mesh, batch: BatchPlan, what: str) -> None:
    """Refuses a number of micro-batches that the pipeline schedule does not support; `what` names the key."""
    if mesh.pp > 1 and not is_legal(parallel.schedule, mesh.pp, batch.accumulation):
        unit = batch.micro_batch * batch.data_parallel
        legal = [count * unit for count in nearest_legal(parallel.schedule, mesh.pp, batch.accumulation)]
        raise ConfigError(
            f"{what}: schedule {parallel.schedule} on {mesh.pp} pipeline "
            f"ranks cannot run {batch.accumulation} micro-batches; nearest legal: "
            f"{nearest(batch.global_batch, legal)}"
        )


@dataclass(frozen=True, slots=True)
class _Demand:
    """A number that a degree must divide; with `replicable` it may also be a multiple of it."""

    count: int
    what: str
    replicable: bool = False

    def is_met(self, degree: int) -> bool:
        return self.count % degree == 0 or (self.replicable and degree % self.count == 0)


def _demands(model: Model, axis: Axis) -> Iterator[_Demand]:
    """What the layout table demands of a degree; placements that may be uneven demand nothing."""
    for placement in {axes[axis].unit: axes[axis] for _, axes in table(model) if axis in axes}.values():
        count = units(model, placement.unit)
        if isinstance(placement, Owned):
            yield _Demand(count, f"{count} {placement.unit}")
        elif not placement.uneven:
            yield _Demand(count, f"{count} {placement.unit}", placement.replicable)


def _head_demands(model: Model, tp: int) -> Iterator[_Demand]:
    """What Ulysses demands of cp: it distributes a tensor-parallel rank's heads; KV heads may be fewer than ranks."""
    share = f" on each of tp {tp} ranks" if tp > 1 else ""
    heads, kv_heads = model.heads // tp, max(1, model.kv_heads // tp)
    yield _Demand(heads, f"{heads} heads{share} (context = ulysses)")
    if not model.latent.kv_rank:
        yield _Demand(kv_heads, f"{kv_heads} KV heads{share} (context = ulysses)", replicable=True)


def _check_degree(axis: Axis, degree: int, demands: Iterable[_Demand]) -> None:
    demands = list(demands)
    if failing := [demand.what for demand in demands if not demand.is_met(degree)]:
        most = min(demand.count for demand in demands if not demand.replicable)
        legal = [number for number in range(1, most + 1) if all(demand.is_met(number) for demand in demands)]
        raise ConfigError(
            f"parallel.{axis} = {degree}: does not divide {', '.join(failing)}; "
            f"nearest legal: {nearest(degree, legal)}"
        )


def _check_stages(model: Model, parallel: Parallel, mesh: Mesh) -> None:
    own = chunks_of(parallel.schedule, parallel.chunks)
    if parallel.chunks > 1 and mesh.pp == 1:
        raise ConfigError(
            f"parallel.chunks = {parallel.chunks}: belongs to pipeline parallel, but pp = 1; set chunks = 1"
        )
    if parallel.chunks not in (1, own):
        raise ConfigError(
            f"parallel.chunks = {parallel.chunks}: schedule {parallel.schedule} has {own} a rank; "
            f'set chunks = {own}, or schedule = "interleaved"'
        )
    if mesh.pp > 1 and mesh.pp * own > most_stages(model):
        raise ConfigError(
            f"parallel.pp × chunks = {mesh.pp} × {own} stages: more than the model's layers, "
            f"embedding and head; expected at most {most_stages(model)}"
        )


def check_trainable(resolved: Resolved) -> None:
    """Refuses what can be planned but not trained yet."""
    model = resolved.config.model
    lacking = {
        "latent attention": model.latent.kv_rank > 0,
        f"model.positions = {model.positions}": model.positions == "alibi",
    }
    if used := [name for name, is_used in lacking.items() if is_used]:
        raise ConfigError(f"{', '.join(used)}: can be planned, but this version does not train it yet")


def units(model: Model, unit: Unit) -> int:
    """How many of a unit the model has; for columns the greatest common divisor of all split widths."""
    return {
        "heads": model.heads,
        "KV heads": model.kv_heads,
        "columns": gcd(*_widths(model)),
        "vocabulary rows": model.vocab,
        "experts": model.experts.count,
    }[unit]


def _widths(model: Model) -> Iterator[int]:
    if _has_dense_layers(model):
        yield model.ffn
    if model.experts.count:
        yield model.experts.ffn
        yield model.experts.shared_ffn


def _has_dense_layers(model: Model) -> bool:
    return model.experts.count == 0 or model.experts.dense_layers > 0


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, MOST_DIVISOR) + 1) if number % divisor == 0]
