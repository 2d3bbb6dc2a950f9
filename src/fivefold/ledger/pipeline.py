"""Pipeline parallel: what each rank holds and does, the schedule simulated. Twin of parallel/pipeline.py."""

from typing import NamedTuple

from fivefold.ledger import activations
from fivefold.ledger.job import Job
from fivefold.ledger.layer import Work, edge_work, layer_work
from fivefold.ledger.network import collective_seconds
from fivefold.ledger.shards import Share, StageContent, contents, parts, stage_share
from fivefold.ledger.simulate import StageTimes, Timeline, simulate
from fivefold.ledger.traffic import Row, row
from fivefold.spec import schedules


class Stage(NamedTuple):
    """One stage's work for one micro-batch, and what it keeps for backward."""

    content: StageContent
    share: Share
    times: StageTimes
    saved: float
    rows: tuple[tuple[Row, float], ...]  # traffic of one micro-batch, and how many layers have it


class Kept(NamedTuple):
    """Bytes that a layer of each kind keeps of a micro-batch for backward (0 of a kind the model has not)."""

    dense: float
    expert: float
    live: float  # activations that recomputation brings back while one layer's backward runs


class Costs(NamedTuple):
    """What the kinds of layer and the edges cost under one job: enough to build any stage."""

    dense: Work | None
    expert: Work | None
    first: Work
    last: Work
    saved_dense: float
    saved_expert: float
    live: float


def kept(job: Job) -> Kept:
    """Bytes of every kind of layer the model has."""
    has_dense, has_expert = _kinds(job)
    return Kept(
        activations.saved(job, False) if has_dense else 0.0,
        activations.saved(job, True) if has_expert else 0.0,
        max(
            activations.live(job, False) if has_dense else 0.0,
            activations.live(job, True) if has_expert else 0.0,
        ),
    )


def _kinds(job: Job) -> tuple[bool, bool]:
    """Whether the model has dense layers, and expert layers."""
    experts = job.model.experts
    return not experts.count or experts.dense_layers > 0, bool(experts.count)


Works = tuple[Work | None, Work | None, Work, Work]
"""One micro-batch of a dense layer and of an expert layer, where the model has them, and of both edges."""


def works(job: Job) -> Works:
    """What all of them cost under one job."""
    has_dense, has_expert = _kinds(job)
    return (
        layer_work(job, False) if has_dense else None,
        layer_work(job, True) if has_expert else None,
        edge_work(job, True, False),
        edge_work(job, False, True),
    )


def costs(job: Job) -> Costs:
    """Costs of every kind of layer the model has."""
    return Costs(*works(job), *kept(job))


def stages(job: Job, cost: Costs) -> list[Stage]:
    """Every stage of the model under `job`."""
    known: dict[StageContent, Stage] = {}
    found = []
    for content in contents(job.model, job.stages, job.even_layers):
        if content not in known:
            known[content] = _stage(job, cost, content)
        found.append(known[content])
    return found


def _stage(job: Job, cost: Costs, content: StageContent) -> Stage:
    pieces: list[tuple[Work | None, float]] = [
        (cost.dense, content.dense_layers),
        (cost.expert, content.expert_layers),
    ]
    pieces += [
        (cost.first, int(content.first)),
        (cost.last, 1.0 / job.stages if job.head_split > 1 else int(content.last)),
    ]
    forward = inputs = weights = 0.0
    rows: list[tuple[Row, float]] = []
    for work, count in pieces:
        if work is None or not count:
            continue
        times = work.times
        forward += count * times.forward
        inputs += count * times.input_grad
        weights += count * times.weight_grad
        rows += [(item, count) for item in work.rows]
    if job.recompute in ("full", "elementwise"):  # layers run again once, for both halves of a split backward
        inputs, weights = inputs + weights, 0.0
    saved = content.dense_layers * cost.saved_dense + content.expert_layers * cost.saved_expert
    saved += activations.rotary_tables(job)
    if content.first:
        saved += activations.embedding(job)
    if content.last:
        saved += activations.head_input(job)
    if content.last or job.head_split > 1:
        saved += activations.loss(job) / (job.stages if job.head_split > 1 else 1)
    return Stage(content, stage_share(job, content), StageTimes(forward, inputs, weights), saved, tuple(rows))


def message_bytes(job: Job) -> float:
    """One tensor between stages: tokens · hidden · itemsize, split with the sequence over tp."""
    split = job.tp if job.sequence_parallel or job.stack.scatter_messages else 1
    return float(-(-job.tokens // split) * job.model.hidden * job.itemsize)


def message_group(job: Job) -> tuple[int, int]:
    """The link between neighbouring pipeline ranks, as a group of two."""
    stride = job.world_size // job.pp
    return (2, 1) if 2 * stride <= job.hardware.fast_domain else (1, 2)


def message_seconds(job: Job) -> float:
    """Time of one message between stages."""
    if job.pp == 1:
        return 0.0
    local, domains = message_group(job)
    on = job.wires
    seconds = collective_seconds("send", message_bytes(job), local, domains, on)
    if job.stack.scatter_messages and not job.sequence_parallel and job.tp > 1:
        whole = job.tokens * job.model.hidden * job.itemsize
        seconds += collective_seconds("all_gather", float(whole), *job.group("tp"), on)
    return seconds


def timeline(job: Job, built: list[Stage], trace: bool = False) -> Timeline:
    """The schedule of one step, simulated; `peak_in_flight` is in bytes of saved activations."""
    message = message_seconds(job)
    if not job.stack.overlap_pipeline:  # sender and receiver both wait
        message *= 2
    return simulate(
        job.schedule,
        job.pp,
        job.microbatches,
        [stage.times for stage in built],
        message=message,
        weights=[stage.saved for stage in built],
        trace=trace,
    )


def own_stages(job: Job, rank: int) -> tuple[int, ...]:
    """Indices of the stages on pipeline rank `rank`."""
    return schedules.stages_of_rank(job.schedule, rank, job.pp, job.chunks)


def rank_share(job: Job, built: list[Stage], rank: int, pad: int = 1) -> Share:
    """Parameters of one rank, rows filled up to multiples of `pad`; tied ends on the same rank are one."""
    own = [built[index] for index in own_stages(job, rank)]
    share = Share(0, 0)
    for stage in own:
        share += stage.share if pad == 1 else stage_share(job, stage.content, pad)
    ends = any(s.content.first for s in own) and any(s.content.last for s in own)
    if job.model.tied and ends and len(own) > 1:
        head = parts(job.model, job.tp, job.ep, job.expert_width_split, pad).head
        share = share._replace(dense=share.dense - head.dense)
    return share


def padded_share(job: Job, built: list[Stage], rank: int) -> Share:
    """Parameters of one rank as they are split: rows filled up where ZeRO cuts them."""
    return rank_share(job, built, rank, job.dp_shard * job.cp if job.zero else 1)


def shares(job: Job, built: list[Stage]) -> list[Share]:
    """Parameters of every rank as they are split."""
    return [padded_share(job, built, rank) for rank in range(job.pp)]


def rows(job: Job, built: list[Stage], rank: int) -> list[Row]:
    """Messages of one rank in one step: sent forward to the next stage, backward to the one before. A message
    counts where it is sent; stages on one rank, and the two ends of a tied embedding there, send none."""
    found = []
    last = len(built) - 1
    own = own_stages(job, rank)
    size = message_bytes(job)
    for phase, count in (
        ("forward", sum(1 for s in own if s < last and s + 1 not in own)),
        ("backward", sum(1 for s in own if s > 0 and s - 1 not in own)),
    ):
        if count and job.pp > 1:
            text = "micro-batch · sequence · hidden · itemsize, per boundary"
            item = row(
                job,
                "pp",
                "send",
                phase,
                count=count * job.microbatches,
                size=size,
                group=message_group(job),
                formula=text,
            )
            found.append(item.exposing(0.0))
    if job.model.tied and job.pp > 1:
        ends = any(built[s].content.first or built[s].content.last for s in own)
        together = any(built[s].content.first for s in own) and any(built[s].content.last for s in own)
        if ends and not together:
            shards = job.dp_shard * job.cp if job.zero else 1
            per_tp = -(-job.model.vocab // job.tp)
            amount = -(-per_tp // shards) * job.model.hidden * job.stack.reduce
            found.append(
                row(
                    job,
                    "embedding",
                    "all_reduce",
                    "gradient",
                    count=1,
                    size=float(amount),
                    group=(1, 2) if job.world_size > job.hardware.fast_domain else (2, 1),
                    formula="rows of the tied embedding that the rank keeps, filled up, between the two copies",
                )
            )
    return found
