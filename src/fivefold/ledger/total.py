"""The ledger of one layout: memory of every rank class, traffic, FLOPs and time of one optimizer step."""

from functools import lru_cache
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.ledger import activations, data, flops, muon, pipeline, tensor
from fivefold.ledger.job import Job
from fivefold.ledger.pipeline import Costs, Stage
from fivefold.ledger.roofline import stream_seconds
from fivefold.ledger.shards import Share, StageContent, parts
from fivefold.ledger.simulate import Timeline
from fivefold.ledger.traffic import Row
from fivefold.spec.parameters import active, total


class Memory(NamedTuple):
    """Peak bytes of one rank, by category."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    overhead: float  # device context, communicators, fragmentation

    @property
    def allocated(self) -> float:
        """What the framework's allocator hands out: everything but the overhead."""
        return sum(self) - self.overhead

    @property
    def peak(self) -> float:
        return sum(self)


class RankClass(NamedTuple):
    """All ranks of one pipeline coordinate: they hold the same parts of the model."""

    rank: int
    layers: int
    share: Share
    memory: Memory


class Time(NamedTuple):
    """Seconds of one step, in parts that sum to `step`."""

    step: float
    compute: float  # of the pipeline rank that finishes last
    exposed_communication: float
    bubble: float
    optimizer: float
    other: float


class Ledger(NamedTuple):
    """Everything estimated about one step."""

    job: Job
    ranks: tuple[RankClass, ...]
    traffic: tuple[Row, ...]  # of the pipeline rank that finishes last
    time: Time
    timeline: Timeline
    parameters: int
    active_parameters: int

    @property
    def fullest(self) -> RankClass:
        return max(self.ranks, key=lambda item: item.memory.peak)

    @property
    def fits(self) -> bool:
        return self.fullest.memory.peak <= self.job.hardware.device.memory

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.job.step_tokens / self.time.step / self.job.world_size

    def utilization(self, convention: flops.Convention, hardware: bool = False) -> float:
        """MFU, or HFU: FLOPs of a step over what the devices' dense peak allows."""
        count = flops.hardware_flops if hardware else flops.model_flops
        peak = self.job.hardware.device.peak_of(self.job.precision)
        return count(self.job, convention) / (self.time.step * self.job.world_size * peak)


def estimate(job: Job) -> Ledger:
    """The ledger of `job`."""
    cost = pipeline.costs(job)
    built = pipeline.stages(job, cost)
    line = pipeline.timeline(job, built)
    shares = pipeline.shares(job, built)
    spare = transient(job)
    classes = tuple(
        RankClass(
            rank,
            _layers(job, built, rank),
            shares[rank],
            memory(
                job,
                cost,
                line.peak_in_flight[rank],
                rank,
                share,
                spare,
                pipeline.rank_share(job, built, rank),
            ),
        )
        for rank, share in enumerate(shares)
    )
    time, traffic = _time(job, built, line, shares)
    return Ledger(job, classes, traffic, time, line, *counts(job.model))


@lru_cache(maxsize=64)
def counts(model: Model) -> tuple[int, int]:
    """(all, active) trained parameters."""
    return total(model), active(model)


def _layers(job: Job, built: list[Stage], rank: int) -> int:
    own = [built[index].content for index in pipeline.own_stages(job, rank)]
    return sum(content.dense_layers + content.expert_layers for content in own)


def memory(
    job: Job, cost: Costs, held: float, rank: int, share: Share, buffers: float, whole: Share | None = None
) -> Memory:
    """One rank's memory: states, `held` bytes of activations in flight, what recomputation brings back. `whole` as in
    `data.states`; by default as much as `share`, a little more."""
    states = data.states(job, share, whole or share)
    last = rank == (0 if job.schedule in ("zbv", "dualpipev") else job.pp - 1)
    active = held + cost.live
    if last:
        active += activations.loss_chunk(job) + activations.outputs(job)
    buffers = max(buffers, muon.update_bytes(job, share) - active)  # there when activations are not any more
    allocated = sum(states) + active + buffers
    physics = job.physics
    overhead = physics.context_bytes + physics.fragmentation * (active + buffers)
    if job.hardware.device.is_cpu:
        overhead = physics.fragmentation * allocated
    return Memory(*states, active, buffers, overhead)


def transient(job: Job) -> float:
    """Bytes of `buffers`."""
    return sum(buffers(job).values())


def buffers(job: Job) -> dict[str, float]:
    """A layer's tensors in the middle of its backward, messages of the pipeline, ring attention's spare keys and
    values, parameters gathered by zero 3 (two units) or cast, and the gradients about to be scattered."""
    part, stack = parts(job.model, job.tp, job.ep, job.expert_width_split), job.stack
    found = {"a layer's tensors in backward": activations.backward_buffers(job)}
    if stack.bucket_bytes:
        found["buckets"] = stack.bucket_bytes
    if job.pp > 1:
        found["four messages of the pipeline"] = 4 * pipeline.message_bytes(job)
    if job.cp > 1:
        keys = job.model.kv_heads / min(job.tp, job.model.kv_heads) * job.model.head_dim
        found["spare keys and values"] = 2 * 2 * job.tokens * keys * job.itemsize
    unit = max(part.dense_layer.total, part.expert_layer.total)
    edge = max(part.embedding.total, part.head.total)
    gathered, scattered = "parameters gathered or cast", "gradients to be scattered"
    if job.zero >= 2 and job.pp == 1 and stack.shard_apart:
        found[scattered] = (edge + 2 * unit) * stack.reduce
        if job.zero == 3:
            found[gathered] = (edge + 2 * unit) * stack.gather
    elif job.zero == 3 and job.pp == 1:
        found[gathered] = (2 * unit + edge) * stack.gather
        found[scattered] = max(unit, edge) * stack.reduce
    elif stack.compute_copy == 0 and job.itemsize < stack.master:
        found[gathered] = (2 * unit + edge) * job.itemsize  # cast unit by unit
    elif job.zero == 2 and job.pp == 1:
        found[scattered] = max(unit, edge) * stack.gradient
    if stack.gradient > stack.master and job.data_parallel > 1:
        # sums apart from gradients are flattened, a whole parameter at least
        found["a flattened parameter"] = edge * stack.reduce
    return found


class Tail(NamedTuple):
    """What follows a rank's last backward: exposed gradient and parameter traffic, and the update."""

    late: float
    update: float
    rows: tuple[Row, ...]


class Closing(NamedTuple):
    """What follows a rank's pipeline before compute hides any of it: the same for every schedule, recomputation and
    size of micro-batch."""

    data: list[Row]
    others: list[Row]
    update: float


def closing(job: Job, built: list[Stage], rank: int, share: Share, place: int = 0) -> Closing:
    """The traffic and update at the end of one rank's step; `place` as in `data.rows`."""
    contents = [built[index].content for index in pipeline.own_stages(job, rank)]
    others = [item for item in pipeline.rows(job, built, rank) if item.axis == "embedding"]
    others += tensor.gradient_rows(job, contents)
    others += muon.rows(job, contents, place)
    others += data.agreements(job)
    update = optimizer_seconds(job, share) + muon.seconds(job, contents, share)
    return Closing(data.rows(job, data.groups(job, contents, share), place), others, update)


def tail(job: Job, built: list[Stage], rank: int, close: Closing) -> Tail:
    """The end of one rank's step."""
    own = [built[index].times for index in pipeline.own_stages(job, rank)]
    forward = sum(times.forward for times in own)
    backward = sum(times.input_grad + times.weight_grad for times in own)
    found = data.exposed(job, close.data, forward, backward) + close.others
    return Tail(sum(item.exposed_seconds for item in found), close.update, tuple(found))


def slowest(job: Job, built: list[Stage], line: Timeline, shares: list[Share]) -> tuple[float, int, Tail]:
    """(time at which the last rank finishes, which rank, its tail). Ranks are tried in the order of their last
    backward, latest first, as long as one could finish last with the longest tail. Ranks with equal content have
    equal tails."""
    tails: dict[tuple[StageContent, ...], Tail] = {}

    def tail_of(rank: int) -> Tail:
        held = tuple(built[index].content for index in pipeline.own_stages(job, rank))
        if held not in tails:
            tails[held] = tail(job, built, rank, closing(job, built, rank, shares[rank]))
        return tails[held]

    biggest = max(range(job.pp), key=lambda rank: shares[rank].total)
    longest = tail_of(biggest)
    worst, last, found = line.finished[biggest] + longest.late + longest.update, biggest, longest
    for rank in sorted(range(job.pp), key=lambda rank: -line.finished[rank]):
        if line.finished[rank] + 1.5 * (longest.late + longest.update) < worst:
            break
        own = tail_of(rank)
        if line.finished[rank] + own.late + own.update > worst:
            worst, last, found = line.finished[rank] + own.late + own.update, rank, own
    return worst, last, found


def _time(job: Job, built: list[Stage], line: Timeline, shares: list[Share]) -> tuple[Time, tuple[Row, ...]]:
    """The step of the rank that finishes last: its pipeline, exposed traffic, its update."""
    end, rank, ending = slowest(job, built, line, shares)
    inner = _inner_rows(job, built, rank)
    exposed = sum(item.exposed_seconds for item in inner)
    time = Time(
        step=end + job.physics.step,
        compute=line.busy[rank] - exposed,
        exposed_communication=exposed + ending.late,
        bubble=max(0.0, line.finished[rank] - line.busy[rank]) if job.pp > 1 else 0.0,
        optimizer=ending.update,
        other=job.physics.step,
    )
    return time, (*inner, *ending.rows)


def traffic_of(job: Job, rank: int, place: int = 0) -> tuple[Row, ...]:
    """One step's traffic of a pipeline rank; `place` among the ranks of its data and context axes."""
    built = pipeline.stages(job, pipeline.costs(job))
    share = pipeline.shares(job, built)[rank]
    close = closing(job, built, rank, share, place)
    return (*_inner_rows(job, built, rank), *tail(job, built, rank, close).rows)


def _inner_rows(job: Job, built: list[Stage], rank: int) -> list[Row]:
    """The traffic while micro-batches are in flight."""
    found = _layer_rows(job, built, rank)
    return found + [item for item in pipeline.rows(job, built, rank) if item.axis == "pp"]


def _layer_rows(job: Job, built: list[Stage], rank: int) -> list[Row]:
    """One step's traffic inside the stages of a rank, equal rows joined."""
    joined: dict[tuple[str, str, str], Row] = {}
    for index in pipeline.own_stages(job, rank):
        for item, layers in built[index].rows:
            key = (item.axis, item.primitive, item.phase)
            times = round(layers * job.microbatches)
            grown = item._replace(
                times=item.times * times,
                bytes_per_rank=item.bytes_per_rank * times,
                wire_bytes=item.wire_bytes * times,
                seconds=item.seconds * times,
                exposed_seconds=item.exposed_seconds * times,
            )
            joined[key] = _join(joined[key], grown) if key in joined else grown
    return list(joined.values())


def _join(one: Row, two: Row) -> Row:
    return one._replace(
        times=one.times + two.times,
        bytes_per_rank=one.bytes_per_rank + two.bytes_per_rank,
        wire_bytes=one.wire_bytes + two.wire_bytes,
        seconds=one.seconds + two.seconds,
        exposed_seconds=one.exposed_seconds + two.exposed_seconds,
    )


def optimizer_seconds(job: Job, share: Share) -> float:
    """Seconds of one pass of the optimizer over a rank's states; Muon's orthogonalisation is added by
    ledger/muon.py."""
    stack = job.stack
    dense, expert = data.shard_degrees(job) if job.zero >= 1 else (1, 1)
    moved = (share.dense / dense + share.expert / expert) * update_bytes(job)
    moved -= 2 * stack.spared_moments * (share.matrices / dense + share.expert_matrices / expert)
    return stream_seconds(moved, job.hardware.device, job.physics)


def update_bytes(job: Job) -> int:
    """Bytes moved per element: AdamW reads gradient, master copy and moments, and writes master copy, moments and the
    compute copy; so does Muon, without the moments it does not keep. Momentum that compression keeps is part of its
    coding."""
    stack = job.stack
    moments = 0 if stack.corrects_momentum else stack.moments
    return stack.gradient + 2 * stack.master + 2 * moments + stack.compute_copy
