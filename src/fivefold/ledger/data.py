"""Data parallel and ZeRO: states of one rank, and what it reduces and gathers. Twin of parallel/data.py.

ZeRO 1 shards optimizer state over dp_shard × cp, 2 gradients too, 3 parameters too (Rajbhandari 2020). Counted is
what the runtime does: under a pipeline gradients stay unsharded until the end of the step, and ZeRO 3 gathers its
parameters once per step; without one, ZeRO 2 and 3 reduce-scatter in every micro-batch, and ZeRO 3 gathers before
every forward and every backward. Experts are sharded over the ranks that hold the same experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.ledger.compression import bucket_messages, kept_bytes, touched_bytes
from fivefold.ledger.job import Job
from fivefold.ledger.network import Primitive
from fivefold.ledger.roofline import stream_seconds
from fivefold.ledger.shards import Share, StageContent, parts
from fivefold.ledger.synchronisation import program_row
from fivefold.ledger.traffic import Row, row
from fivefold.spec.synchronisation import Collective


class States(NamedTuple):
    """Bytes of one rank between steps (gradients: at their fullest)."""

    parameters: float
    gradients: float
    optimizer: float


def shard_degrees(job: Job) -> tuple[int, int]:
    """Ranks that ZeRO splits dense parameters, and expert parameters, over."""
    dense = job.dp_shard * job.cp
    return dense, max(1, dense * job.tp // (job.ep * job.expert_width_split))


def states(job: Job, share: Share, whole: Share) -> States:
    """Bytes of parameters, gradients and optimizer state, sharded by the ZeRO stage; `whole` is the share without the
    padding that sharding needs."""
    dense, expert = shard_degrees(job)
    kept, expert_kept = kept_elements(job, share)
    parts = (
        _part_states(job, share.dense, whole.dense, dense, share.matrices, kept),
        _part_states(job, share.expert, whole.expert, expert, share.expert_matrices, expert_kept),
    )
    return States(*(sum(kinds) for kinds in zip(*parts, strict=True)))


def kept_elements(job: Job, share: Share) -> tuple[int, int]:
    """Elements that compression keeps of the gradients of dense parameters and of experts, before any ZeRO split; none
    where no other rank holds the same."""
    shards = (1, 1) if job.zero else shard_degrees(job)
    dense, expert = (job.dp_replicate * degree > 1 for degree in shards)
    return share.kept * dense, share.expert_kept * expert


class Rates(NamedTuple):
    """Bytes per element of each state: (of the elements of a rank's shard, of all unsharded elements)."""

    parameters: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]


def rates(job: Job, degree: int) -> Rates:
    """The rates of elements sharded over `degree` ranks. Degree 1 (experts that expert parallel distributes over all
    ranks): our trainer then keeps no shard apart from the parameter."""
    stack = job.stack
    is_split = degree > 1 or not stack.shard_apart
    compute_copy = stack.compute_copy
    if stack.shard_apart and job.zero in (1, 2) and is_split:
        compute_copy = stack.gather
    optimizer = stack.moments + (stack.master if compute_copy else 0)
    copy = compute_copy or stack.master
    if stack.gradient < 4 <= stack.master:
        optimizer += 4  # the step's float32 copy of the gradient
    gathered = 0
    if job.zero == 3 and is_split:  # the shard is the master copy; what matmuls read is gathered
        copy, optimizer = stack.master, stack.moments
        if job.pp > 1:
            gathered = stack.gather
    # zero 1 adds micro-batches up whole; of a single one, buckets are scattered as they fill (parallel/data.py).
    scatters = job.zero >= 2 or (job.zero == 1 and job.microbatches == 1 and stack.shard_apart)
    return Rates(
        (copy, gathered) if job.zero == 3 else (0, copy),
        (stack.gradient, 0) if scatters and job.pp == 1 else (0, stack.gradient),
        (optimizer, 0) if job.zero >= 1 else (0, optimizer),
    )


def _part_states(job: Job, padded: int, whole: int, degree: int, matrices: int, kept: int) -> States:
    """States of `padded` elements over `degree` ranks, `matrices` of them updated by Muon, with `kept` elements of
    compression; unsharded gradients have the `whole` elements, without padding."""
    of, own, split = rates(job, degree), -(-padded // degree), degree if job.zero else 1
    spared = job.stack.spared_moments * -(-matrices // split)
    each = kept_bytes(job.stack.reduce, job.stack.corrects_momentum)
    return States(
        of.parameters[0] * own + of.parameters[1] * padded,
        of.gradients[0] * own + of.gradients[1] * whole,
        of.optimizer[0] * own + of.optimizer[1] * padded - spared + each * -(-kept // split),
    )


class Groups(NamedTuple):
    """The buckets of a rank as (elements of all shards, number of such buckets): dense layers, the rest (embedding,
    norm, head) in one bucket, and experts."""

    dense_layers: tuple[tuple[int, int], ...]
    rest: int
    expert_layers: tuple[tuple[int, int], ...]


def groups(job: Job, contents: Sequence[StageContent], share: Share) -> Groups:
    """Of a rank with these stages and `share` parameters."""
    pad = job.dp_shard * job.cp if job.zero else 1
    part = parts(job.model, job.tp, job.ep, job.expert_width_split, pad)
    plain = sum(content.dense_layers for content in contents)
    experts = sum(content.expert_layers for content in contents)
    dense = ((part.dense_layer.dense, plain), (part.expert_layer.dense, experts))
    rest = share.dense - _elements(dense)
    return Groups(_present(dense), rest, _present(((part.expert_layer.expert, experts),)))


def _present(buckets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(item for item in buckets if item[0] and item[1])


def _elements(buckets: Sequence[tuple[int, int]]) -> int:
    return sum(size * count for size, count in buckets)


def rows(job: Job, groups: Groups, place: int = 0) -> list[Row]:
    """One step's gradient and parameter traffic of a rank; exactly what parallel/data.py does (tested).

    ZeRO 3 keeps the root bucket's parameters between forward and backward, so backward gathers layers only. The
    all-reduce over the replicas of a shard runs once, after the last micro-batch.

    Args:
        place: the rank among those of the data and context axes. With a program, ranks send different amounts.
    """
    found: list[Row] = []
    dense, expert = shard_degrees(job)
    if groups.dense_layers or groups.rest:
        found += _part_rows(job, "parameters", groups.dense_layers, groups.rest, dense, job.tp, place)
    if groups.expert_layers:
        stride = job.ep * job.expert_width_split
        found += _part_rows(
            job, "expert parameters", groups.expert_layers, 0, expert, stride, place // job.ep
        )
    return found


def _part_rows(
    job: Job,
    what: str,
    layers: tuple[tuple[int, int], ...],
    rest: int,
    shards: int,
    stride: int,
    place: int,
) -> list[Row]:
    """`place`: among the ranks that hold the same parameters before they are sharded."""
    stack = job.stack
    whole = layers + (((rest, 1),) if rest else ())
    if job.zero == 0:
        axis = "dp_replicate" if job.cp == 1 else "dp_shard_cp"
        over = _Over(job, what, axis, shards * job.dp_replicate, stride, place)
        return _replica_rows(over, whole)
    axis = "dp_shard" if job.cp == 1 else "dp_shard_cp"
    over = _Over(job, what, axis, shards, stride, place % shards)
    m = job.microbatches
    each = m if job.zero >= 2 and job.pp == 1 else 1  # reductions a step
    found: list[Row] = []
    if shards > 1:
        if job.zero == 3 and job.pp == 1:
            found.append(over.row("all_gather", "forward", whole, m, stack.gather))
            found.append(over.row("all_gather", "backward", layers, m, stack.gather))
        else:
            phase = "forward" if job.zero == 3 else "optimizer"
            found.append(over.row("all_gather", phase, whole, 1, stack.gather))
        found.append(over.row("reduce_scatter", "gradient", whole, each, stack.reduce))
    outer = job.tp * job.cp * job.dp_shard
    replicas = _Over(job, what, "dp_replicate", job.dp_replicate, outer, place // shards)
    return found + _replica_rows(replicas, tuple((size // shards, count) for size, count in whole))


class _Over(NamedTuple):
    """The ranks of one group, `stride` apart, of which the rank counted is number `place`."""

    job: Job
    what: str
    axis: str
    ranks: int
    stride: int
    place: int

    def row(
        self,
        primitive: Collective,
        phase: str,
        buckets: Sequence[tuple[int, int]],
        times: int,
        itemsize: int,
    ) -> Row:
        """A collective of each bucket, `times` a step: the backend's own, or the messages of a program."""
        job, group = self.job, self.job.spread(self.ranks, self.stride)
        if job.stack.algorithm != "backend":
            vectors = [(size, count * times) for size, count in buckets]
            return program_row(
                job,
                self.axis,
                primitive,
                phase,
                vectors=vectors,
                itemsize=itemsize,
                group=group,
                place=self.place,
            )
        count = times * sum(count for _, count in buckets)
        return self.bare(primitive, phase, count, times * _elements(buckets) * itemsize)

    def bare(self, primitive: Primitive, phase: str, count: int, size: float) -> Row:
        """`count` of the backend's collectives, of `size` bytes together."""
        each, group = size / count if count else 0.0, self.job.spread(self.ranks, self.stride)
        text = f"{self.what} of the rank · bytes on the wire"
        return row(self.job, self.axis, primitive, phase, count=count, size=each, group=group, formula=text)


def _replica_rows(over: _Over, buckets: Sequence[tuple[int, int]]) -> list[Row]:
    """The sum of gradients over replicas, in one piece a bucket or compressed (then in memory passes, too)."""
    job, ranks = over.job, over.ranks
    stack, how = job.stack, job.stack.compression
    if ranks == 1:
        return []
    if how.method == "none":
        return [over.row("all_reduce", "gradient", buckets, 1, stack.reduce)]
    sent: dict[Primitive, list[int]] = {}
    for bucket, count in buckets:
        for primitive, size in bucket_messages(how, job.model, bucket, stack.reduce, ranks):
            sent.setdefault(primitive, []).extend([size] * count)
    found = [over.bare(primitive, "gradient", len(sizes), sum(sizes)) for primitive, sizes in sent.items()]
    coding = stream_seconds(_elements(buckets) * touched_bytes(how), job.hardware.device, job.physics)
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
        if item.primitive == "send":  # of a program, which compute waits for
            result.append(item)
            continue
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
