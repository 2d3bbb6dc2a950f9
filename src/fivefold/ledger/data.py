"""Data parallel and ZeRO: states of one rank, and what it reduces and gathers. Twin of parallel/data.py.

zero 1 splits optimizer state over dp_shard × cp, 2 gradients too, 3 parameters too (Rajbhandari 2020). What
the runtime does is what is counted: under a pipeline gradients stay whole until the end of the step, and
zero 3 gathers its parameters once a step; without one, zero 2 and 3 reduce-scatter every micro-batch and
zero 3 gathers before every forward and every backward. Experts split over the ranks that hold the same
experts.
"""

from typing import NamedTuple

from fivefold.ledger.job import Job
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


def states(job: Job, share: Share) -> States:
    """Bytes of parameters, gradients and optimizer state, each part split as zero says."""
    stack = job.stack
    optimizer = stack.moments + (stack.master if stack.compute_copy else 0)
    copy = stack.compute_copy or stack.master
    if stack.gradient < 4 <= stack.master:
        optimizer += 4  # the step's float32 copy of the gradient
    gathered = 0.0
    if job.zero == 3:  # the shard is the master copy; what matmuls read is gathered
        copy, optimizer = stack.master, stack.moments
        if job.pp > 1:
            gathered = _split(job, share, stack.gather, False)
    whole_gradients = job.pp > 1
    return States(
        _split(job, share, copy, job.zero == 3) + gathered,
        _split(job, share, stack.gradient, job.zero >= 2 and not whole_gradients),
        _split(job, share, optimizer, job.zero >= 1),
    )


def _split(job: Job, share: Share, itemsize: int, split: bool) -> float:
    dense, expert = shard_degrees(job) if split else (1, 1)
    return itemsize * (-(-share.dense // dense) + -(-share.expert // expert))


def gathers_per_step(job: Job) -> tuple[int, int]:
    """How often zero 3 gathers each parameter, and how often gradients are reduced, in one step."""
    if job.pp > 1:
        return 1, 1
    return 2 * job.microbatches, job.microbatches if job.zero >= 2 else 1


def rows(job: Job, share: Share, units: int) -> list[Row]:
    """One step's gradient and parameter traffic of a rank, in `units` pieces (layers, embedding, head)."""
    found: list[Row] = []
    shards = shard_degrees(job)
    for amount, degree, expert in ((share.dense, shards[0], False), (share.expert, shards[1], True)):
        if amount:
            found += _part_rows(job, amount, degree, units, expert)
    return found


def _part_rows(job: Job, amount: int, degree: int, units: int, expert: bool) -> list[Row]:
    gathers, reductions = gathers_per_step(job)
    what = "expert parameters" if expert else "parameters"
    inner = _group(job, degree, expert)
    found = []
    if job.zero == 0:
        ranks = degree * job.dp_replicate
        size = amount * job.stack.reduce / units
        axis = "dp_replicate" if job.cp == 1 else "world"
        if ranks > 1:
            group = _group(job, ranks, expert)
            found.append(_row(job, axis, "all_reduce", "gradient", units, size, group, what))
        return found
    if degree > 1:
        size = amount * job.stack.reduce / units
        axis = "dp_shard" if job.cp == 1 else "dp_shard_cp"
        found.append(_row(job, axis, "reduce_scatter", "gradient", units * reductions, size, inner, what))
        size = amount * job.stack.gather / units
        count, phase = (units * gathers, "forward") if job.zero == 3 else (units, "optimizer")
        found.append(_row(job, axis, "all_gather", phase, count, size, inner, what))
    if job.dp_replicate > 1:
        size = amount * job.stack.reduce / degree / units
        stride = job.tp * job.cp * job.dp_shard
        group = job.spread(job.dp_replicate, stride)
        found.append(
            _row(job, "dp_replicate", "all_reduce", "gradient", units * reductions, size, group, what)
        )
    return found


def _group(job: Job, ranks: int, expert: bool) -> tuple[int, int]:
    stride = job.ep * job.expert_width_split if expert else job.tp
    return job.spread(ranks, stride)


def _row(
    job: Job,
    axis: str,
    primitive: str,
    phase: str,
    count: int,
    size: float,
    group: tuple[int, int],
    what: str,
) -> Row:
    return row(
        job,
        axis,
        primitive,  # type: ignore[arg-type]
        phase,
        count=count,
        size=size,
        group=group,
        formula=f"{what} of the rank · bytes on the wire",
    )


def exposed(job: Job, found: list[Row], forward: float, backward: float) -> list[Row]:
    """What compute does not hide: gradients under one backward, parameters under one forward.

    `forward` and `backward` are a micro-batch's seconds on the rank. The last unit's gradients and the first
    unit's parameters have nothing to hide under. zero 3 without a pipeline has a window in every micro-batch.
    """
    windows = job.microbatches if job.zero >= 2 and job.pp == 1 else 1
    reach = job.physics.gradient_window
    result = []
    total = {"gradient": 0.0, "forward": 0.0, "optimizer": 0.0}
    for item in found:
        total[item.phase] += item.seconds
    for item in found:
        reducing = item.phase == "gradient"
        overlaps = job.stack.overlap_gradients if reducing else job.stack.overlap_parameters
        if not overlaps:
            result.append(item)
            continue
        both = item.phase == "forward"  # zero 3: half of the gathers run under the backward
        window = backward if reducing else forward + backward / 2 if both else forward
        if reducing and total["forward"]:
            window = backward / 2
        part = item.seconds / total[item.phase]
        edge = item.seconds / max(item.times, 1) * windows
        hidden = min(item.seconds - min(edge, item.seconds), reach * windows * window * part)
        result.append(item.exposing(item.seconds - (1 - job.physics.sharing) * hidden))
    return result
