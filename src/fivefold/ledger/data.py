"""Data parallel and ZeRO: states of one rank, and what it reduces and gathers. Twin of parallel/data.py.

zero 1 splits optimizer state over dp_shard × cp, 2 gradients too, 3 parameters too (Rajbhandari 2020). What
the runtime does is what is counted: under a pipeline gradients stay whole until the end of the step, and
zero 3 gathers its parameters once a step; without one, zero 2 and 3 reduce-scatter every micro-batch and
zero 3 gathers before every forward and every backward. Experts split over the ranks that hold the same
experts.
"""

from collections.abc import Callable
from typing import NamedTuple

from fivefold.ledger.compression import bucket_messages, kept_bytes, touched_bytes
from fivefold.ledger.job import Job
from fivefold.ledger.network import Primitive
from fivefold.ledger.roofline import stream_seconds
from fivefold.ledger.shards import Share
from fivefold.ledger.traffic import Row, row


class States(NamedTuple):
    """Bytes of one rank between steps (gradients: at their fullest)."""

    parameters: float
    gradients: float
    optimizer: float


def shard_degrees(job: Job) -> tuple[int, int]:
    """Ranks that ZeRO splits dense parameters, and expert parameters, over."""
    dense = job.dp_shard * job.cp
    return dense, max(1, dense * job.tp // (job.ep * job.expert_width_split))


def replica_degrees(job: Job) -> tuple[int, int]:
    """Ranks whose gradients of dense, and of expert, parameters are summed."""
    dense, expert = shard_degrees(job)
    return dense * job.dp_replicate, expert * job.dp_replicate


def states(job: Job, share: Share, whole: Share) -> States:
    """Bytes of parameters, gradients and optimizer state, each part split as zero says; `whole` is the share before any
    of it is filled up to be split."""
    dense, expert = shard_degrees(job)
    parts = (
        _part_states(job, share.dense, whole.dense, dense),
        _part_states(job, share.expert, whole.expert, expert),
    )
    return States(*(sum(kinds) for kinds in zip(*parts, strict=True)))


def _part_states(job: Job, padded: int, whole: int, degree: int) -> States:
    """States of so many elements over `degree` ranks. Experts may be dealt over all of them: then `degree` is 1, and
    our trainer keeps no shard apart from what is read."""
    stack = job.stack
    is_split = degree > 1 or not stack.shard_apart
    kept = kept_bytes(stack.compression, stack.reduce, stack.corrects_momentum)
    compute_copy = stack.compute_copy
    if stack.shard_apart and job.zero in (1, 2) and is_split:
        compute_copy = stack.gather
    optimizer = stack.moments + (stack.master if compute_copy else 0)
    copy = compute_copy or stack.master
    if stack.gradient < 4 <= stack.master:
        optimizer += 4  # the step's float32 copy of the gradient
    gathered = 0.0
    if job.zero == 3 and is_split:  # the shard is the master copy; what matmuls read is gathered
        copy, optimizer = stack.master, stack.moments
        if job.pp > 1:
            gathered = stack.gather * padded
    # zero 1 adds micro-batches up whole; of a single one, buckets are scattered as they fill (parallel/data.py).
    scatters = job.zero >= 2 or (job.zero == 1 and job.microbatches == 1 and stack.shard_apart)
    own = -(-padded // degree)
    return States(
        copy * (own if job.zero == 3 else padded) + gathered,
        stack.gradient * (own if scatters and job.pp == 1 else whole),
        (optimizer + kept) * (own if job.zero >= 1 else padded),
    )


class Groups(NamedTuple):
    """What a rank communicates as one piece each: its layers, and the rest (embedding, norm, head) together."""

    whole: Share  # of all groups
    layers: Share
    pieces: int  # groups
    layer_pieces: int
    expert_pieces: int  # layers with experts, which are groups of their own


def rows(job: Job, groups: Groups) -> list[Row]:
    """One step's gradient and parameter traffic of a rank; exact for what parallel/data.py does (a test).

    zero 3 keeps the last group's parameters between forward and backward, so backward gathers layers only. The
    sum over the replicas of a shard waits for the last micro-batch.
    """
    found: list[Row] = []
    dense, expert = shard_degrees(job)
    if groups.whole.dense:
        found += _part_rows(job, groups.whole.dense, groups.layers.dense, groups, dense, False)
    if groups.whole.expert:
        found += _part_rows(job, groups.whole.expert, groups.layers.expert, groups, expert, True)
    return found


def _part_rows(job: Job, whole: int, layers: int, groups: Groups, shards: int, expert: bool) -> list[Row]:
    stack, count = job.stack, groups.expert_pieces if expert else groups.pieces
    what = ("expert parameters" if expert else "parameters") + " of the rank · bytes on the wire"
    stride = job.ep * job.expert_width_split if expert else job.tp

    def make(
        axis: str, primitive: Primitive, phase: str, times: int, size: float, ranks: int, step: int
    ) -> Row:
        group = job.spread(ranks, step)
        each = size / times if times else 0.0
        return row(job, axis, primitive, phase, count=times, size=each, group=group, formula=what)

    found: list[Row] = []
    held = 1 if job.zero == 0 else shards
    layer_pieces = groups.expert_pieces if expert else groups.layer_pieces
    buckets = _buckets(whole // held, layers // held, count, layer_pieces)
    if job.zero == 0:
        ranks = shards * job.dp_replicate
        if ranks > 1:
            axis = "dp_replicate" if job.cp == 1 else "dp_shard_cp"
            found += _replica_rows(job, make, axis, buckets, ranks, stride)
        return found
    axis = "dp_shard" if job.cp == 1 else "dp_shard_cp"
    m = job.microbatches
    each = m if job.zero >= 2 and job.pp == 1 else 1  # reductions a step
    if shards > 1:
        reduced = each * whole * stack.reduce
        if job.zero == 3 and job.pp == 1:
            gathered = (m * whole * stack.gather, m * layers * stack.gather)
            found.append(make(axis, "all_gather", "forward", m * count, gathered[0], shards, stride))
            again = m * (groups.expert_pieces if expert else groups.layer_pieces)
            found.append(make(axis, "all_gather", "backward", again, gathered[1], shards, stride))
        else:
            phase = "forward" if job.zero == 3 else "optimizer"
            found.append(make(axis, "all_gather", phase, count, whole * stack.gather, shards, stride))
        found.append(make(axis, "reduce_scatter", "gradient", each * count, reduced, shards, stride))
    if job.dp_replicate > 1:
        outer = job.tp * job.cp * job.dp_shard
        found += _replica_rows(job, make, "dp_replicate", buckets, job.dp_replicate, outer)
    return found


def _buckets(whole: int, layers: int, pieces: int, layer_pieces: int) -> list[int]:
    """Elements of each bucket: those of the layers are equal, what remains is in one more."""
    if pieces == layer_pieces:
        layers = whole
    rest = [whole - layers] if pieces > layer_pieces else []
    return [(layers + i) // layer_pieces for i in range(layer_pieces)] + rest


def _replica_rows(
    job: Job, make: Callable[..., Row], axis: str, buckets: list[int], ranks: int, stride: int
) -> list[Row]:
    """The sum of gradients over replicas, in one piece a bucket or compressed (then in memory passes, too)."""
    stack, how, elements = job.stack, job.stack.compression, sum(buckets)
    if how.method == "none":
        size = elements * stack.reduce
        return [make(axis, "all_reduce", "gradient", len(buckets), size, ranks, stride)]
    sent: dict[Primitive, list[int]] = {}
    for bucket in buckets:
        for primitive, size in bucket_messages(how, job.model, bucket, stack.reduce, ranks):
            sent.setdefault(primitive, []).append(size)
    found = [
        make(axis, primitive, "gradient", len(sizes), sum(sizes), ranks, stride)
        for primitive, sizes in sent.items()
    ]
    coding = stream_seconds(elements * touched_bytes(how), job.hardware.device, job.physics)
    first = found[0]
    text = f"{how.method} codes of the {first.formula}, with {coding * 1e3:.3g} ms of coding"
    return [
        first._replace(seconds=first.seconds + coding, exposed_seconds=first.seconds + coding, formula=text),
        *found[1:],
    ]


def agreements(job: Job) -> list[Row]:
    """What every rank must know before it acts, in float64: the token count with two flags (stop, save ended);
    the loss and the squared norm, with the choices of every expert."""
    if job.world_size == 1:
        return []
    group = job.spread(job.world_size, 1)
    choices = job.model.layers * job.model.experts.count
    text = "8 B a number: token count, stop, save ended; loss, squared norm"
    text += f", {choices} expert counts" if choices else ""
    size = (24.0 + 16.0 + 8.0 * choices) / 2
    return [row(job, "world", "all_reduce", "step", count=2, size=size, group=group, formula=text)]


def exposed(job: Job, found: list[Row], forward: float, backward: float) -> list[Row]:
    """What compute does not hide: gradients under one backward, parameters under one forward.

    `forward` and `backward` are a micro-batch's seconds on the rank. The last group's gradients and the first
    group's parameters have nothing to hide under. zero 3 without a pipeline has a window in every micro-batch,
    and shares the backward's between gathering and reducing.
    """
    windows = job.microbatches if job.zero >= 2 and job.pp == 1 else 1
    reach = job.physics.gradient_window
    gathers_again = any(item.phase == "backward" for item in found)
    spans = {
        "gradient": backward / 2 if gathers_again else backward,
        "backward": backward / 2,
        "forward": forward,
        "optimizer": forward,
    }
    total = dict.fromkeys(spans, 0.0)
    for item in found:
        total[item.phase] += item.seconds
    result = []
    for item in found:
        reducing = item.phase == "gradient"
        overlaps = job.stack.overlap_gradients and job.stack.compression.method == "none"
        if not (overlaps if reducing else job.stack.overlap_parameters):
            result.append(item)
            continue
        own = item.seconds / total[item.phase] if total[item.phase] else 0.0
        edge = 0.0 if item.phase == "backward" else item.seconds / max(item.times, 1) * windows
        hidden = min(item.seconds - min(edge, item.seconds), reach * windows * spans[item.phase] * own)
        result.append(item.exposing(item.seconds - (1 - job.physics.sharing) * hidden))
    return result
