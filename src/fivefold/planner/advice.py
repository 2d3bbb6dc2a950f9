"""Why the best layout's neighbours are worse, and what would have to change where nothing fits; with numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from fivefold.config.errors import ConfigError, nearest_multiples
from fivefold.config.tree import Parallel
from fivefold.ledger.job import Job
from fivefold.ledger.total import Ledger, counts, estimate
from fivefold.planner.compression import compression_verdicts
from fivefold.planner.document import layout_of
from fivefold.planner.search import SAME, Outcome, Ranked, least_excess, search
from fivefold.planner.space import RECOMPUTE, SCHEDULES, Request, divisors, nearest_batches
from fivefold.render.units import bytes_text, change_text, seconds_text
from fivefold.spec import schedules
from fivefold.spec.legal import check_layout
from fivefold.spec.mesh import Mesh
from fivefold.spec.synchronisation import can_sum


def neighbours(
    best: Job, seconds: float, smaller: range = range(0), fixed: Mapping[str, Any] | None = None
) -> list[str]:
    """One line for every layout one step away on one axis; `smaller` are the batches of a ramp, `fixed` the keys that
    may not move: what moves one of them may be better than the best."""
    ledger = estimate(best)
    lines = [
        f"{name}: {_verdict(ledger, changes, seconds, smaller, fixed or {})}"
        for name, changes in _steps(best)
    ]
    return lines + compression_verdicts(best)


def _steps(best: Job) -> Iterator[tuple[str, dict[str, Any]]]:
    world = best.world_size
    for axis in ("tp", "pp", "cp"):
        own = int(getattr(best, axis))
        for degree in (own // 2, own * 2):
            others = best.pp * best.cp * best.tp // own
            if degree and world % (degree * others) == 0:
                yield f"{axis} {degree} instead of {own}", {axis: degree}
    share = divisors(best.micro_batch * best.microbatches)
    at = share.index(best.micro_batch)
    for micro in share[max(0, at - 1) : at + 2]:
        if micro != best.micro_batch:
            yield f"micro-batch {micro} instead of {best.micro_batch}", {"micro_batch": micro}
    for mode in RECOMPUTE:
        if mode != best.recompute:
            yield f"recompute {mode} instead of {best.recompute}", {"recompute": mode}
    for zero in range(4):
        if zero != best.zero:
            yield f"zero {zero} instead of {best.zero}", {"zero": zero}
    if best.tp > 1:
        on = best.sequence_parallel
        name = "sequence parallel off instead of on" if on else "sequence parallel on instead of off"
        yield name, {"sequence_parallel": not on}
    if best.pp > 1:
        for name in SCHEDULES:
            if name != best.schedule:
                yield f"schedule {name} instead of {best.schedule}", {"schedule": name}


def _verdict(
    old: Ledger, changes: dict[str, Any], seconds: float, smaller: range, fixed: Mapping[str, Any]
) -> str:
    """What one change does: slower by so much, too large by so much, or why it cannot be."""
    try:
        job = _changed(old.job, changes)
        _check_ramp(job, smaller)
    except ConfigError as error:
        return f"cannot be: {error}"
    also = _also(old.job, job, changes)
    bound = _bound(job, fixed)
    excess, rank = least_excess(job)
    if excess > 0:
        return f"{also}does not fit, at least {bytes_text(excess)} too much on pipeline rank {rank}"
    found = estimate(job)
    excess = found.fullest.memory.peak - job.hardware.device.memory
    if excess > 0:
        return f"{also}does not fit, {bytes_text(excess)} too much on pipeline rank {found.fullest.rank}"
    change = found.time.step / seconds - 1
    if abs(change) < SAME:
        more = found.fullest.memory.peak - old.fullest.memory.peak
        memory = f"memory {more / 2**30:+.2f} GiB" if abs(more) >= 2**30 / 200 else "and the same memory"
        return f"{also}the same step within {SAME:.1%}; {memory}{bound}"
    parts = {
        name: getattr(found.time, name) - getattr(old.time, name)
        for name in ("compute", "exposed_communication", "bubble", "optimizer")
    }
    cause = max(parts, key=lambda name: parts[name] if change >= 0 else -parts[name])
    return (
        f"{also}{seconds_text(found.time.step)} a step ({change:+.1%}); {cause.replace('_', ' ')} "
        f"{change_text(parts[cause])}{bound}"
    )


def _bound(job: Job, fixed: Mapping[str, Any]) -> str:
    """Which fixed keys would have to move for `job`. With zero 0 replicas and shards are one; without a pipeline
    schedules are; a schedule whose chunks are given counts as one chunk, too."""
    free = {"dp_replicate", "dp_shard"} if job.zero == 0 else set()
    free |= {"schedule"} if job.pp == 1 else set()
    free |= {"chunks"} if fixed.get("chunks") == 1 and not job.schedule.startswith("interleaved") else set()
    own = {**layout_of(job), "micro_batch": job.micro_batch}
    moved = [f"{key} = {value}" for key, value in fixed.items() if key not in free and own[key] != value]
    return f", but {' and '.join(moved)} is fixed" if moved else ""


def _check_ramp(job: Job, smaller: range) -> None:
    unit = job.micro_batch * job.data_parallel
    for batch in smaller:
        if batch % unit:
            raise ConfigError(f"batch.ramp reaches {batch} sequences, no multiple of {unit}")
        if job.pp > 1 and not schedules.is_legal(job.schedule, job.pp, batch // unit):
            raise ConfigError(f"batch.ramp reaches {batch // unit} micro-batches, and {job.schedule} cannot")


def _also(best: Job, job: Job, changes: dict[str, Any]) -> str:
    """What had to change besides."""
    found = []
    if best.sequence_parallel != job.sequence_parallel and "sequence_parallel" not in changes:
        found.append("sequence parallel off")
    if best.zero != job.zero and "zero" not in changes:
        found.append(f"zero {job.zero}")
    return f"with {' and '.join(found)} " if found else ""


def _changed(best: Job, changes: dict[str, Any]) -> Job:
    """`best` with the changes; the data-parallel axes take what is left, the shards first. What a degree of one
    leaves nothing to split goes."""
    job = replace(best, **changes)
    if job.tp == 1:
        job = replace(job, sequence_parallel=False)
    ranks = best.world_size // (job.pp * job.cp * job.tp)
    if ranks * job.cp == 1 and "zero" not in changes:
        job = replace(job, zero=0)
    shard = ranks if job.zero else 1
    if ranks % best.dp_shard == 0 and job.zero and best.zero and best.dp_shard * job.cp > 1:
        shard = min(best.dp_shard, ranks)
    job = replace(job, dp_shard=shard, dp_replicate=ranks // shard)
    batch = best.micro_batch * best.microbatches * best.data_parallel
    if batch % (ranks * job.micro_batch):
        raise ConfigError(
            f"global batch {batch} is no multiple of {ranks} replicas × micro-batch {job.micro_batch}"
        )
    job = replace(job, microbatches=batch // ranks // job.micro_batch)
    chunks = schedules.chunks_of(job.schedule, max(2, best.chunks))
    job = replace(job, chunks=chunks if job.pp > 1 else 1)
    if job.pp > 1 and not schedules.is_legal(job.schedule, job.pp, job.microbatches):
        near = schedules.nearest_legal(job.schedule, job.pp, job.microbatches)
        raise ConfigError(
            f"{job.schedule} needs {' or '.join(map(str, near))} micro-batches, not {job.microbatches}"
        )
    if job.zero == 3 and job.pp > 1 and job.schedule in schedules.SPLITS_BACKWARD:
        raise ConfigError(
            f"schedule {job.schedule} keeps parameters gathered, so zero 3 is zero 2; use zero = 2"
        )
    _check_sums(job)
    try:
        parallel = msgspec.convert(layout_of(job), Parallel)
    except msgspec.ValidationError as error:  # more ranks than an axis can have
        raise ConfigError(f"{ranks} replicas: {error}") from None
    check_layout(job.model, parallel, Mesh(job.pp, job.dp_replicate, job.dp_shard, job.cp, job.tp))
    return job


def _check_sums(job: Job) -> None:
    stack, ranks = job.stack, job.data_parallel * job.cp
    method, is_apart = stack.compression.method, job.model.tied and job.pp > 1
    if not can_sum(stack.algorithm, method, job.zero, ranks, job.dp_replicate, is_apart):
        raise ConfigError(
            f"gradients summed by {stack.algorithm}, compression {method}, with zero {job.zero} on {ranks} ranks"
        )


def unfit(request: Request, outcome: Outcome) -> list[str]:
    """Why nothing fits and what would: bytes missing, free axes, more devices."""
    lines = []
    if outcome.tightest is None:
        lines.append("no legal layout: " + _no_layout(request))
    else:
        job, missing = outcome.tightest
        keys = ", ".join(
            f"{key} {value}" for key, value in layout_of(job).items() if value not in (1, 0, False)
        )
        lines.append(f"the nearest layout ({keys}) misses at least {bytes_text(missing)} a device")
    if request.smaller:
        steady = search(replace(request, smaller=range(0)), keep=1)
        if steady.ranking:
            lines.append(_ramp_request(request, steady.ranking[0]))
    if request.fixed:
        freed = search(replace(request, fixed={}), keep=1)
        if freed.ranking:
            best = freed.ranking[0]
            lines.append(f"it fits with {_moved(request, best.job)} ({seconds_text(best.seconds)} a step)")
            return lines
    return [*lines, _wider(request)]


def _wider(request: Request) -> str:
    """The fewest devices, by doubling, on which something fits: with the fixed keys, else without them, else with a
    sequence for each device."""
    stack, capacity = request.stack, request.hardware.device.memory
    states = counts(request.model)[0] * (stack.master + stack.moments - stack.spared_moments + stack.gradient)
    least = -(-states // int(capacity))
    free = replace(request, fixed={})
    for tried, grows in ((request, False), (free, False), (free, True)):
        for factor in (2, 4, 8, 16, 32, 64):
            on = msgspec.structs.replace(request.hardware, nodes=request.hardware.nodes * factor)
            if on.devices < least:
                continue
            wider = replace(tried, hardware=on)
            if grows:
                wider = replace(wider, global_batch=on.devices, smaller=range(0))
            if found := search(wider, keep=1).ranking:
                how = [_moved(request, found[0].job)] if request.fixed and tried is free else []
                how += [f"global_batch = {on.devices}"] if grows else []
                text = f" with {', '.join(filter(None, how))}" if any(how) else ""
                return f"it fits on {on.devices} devices{text} ({seconds_text(found[0].seconds)} a step)"
    return f"its states alone are {states / 2**30:,.0f} GiB: it takes {least:,} such devices or more"


def _moved(request: Request, job: Job) -> str:
    """The fixed keys that are other in `job`, as it has them."""
    own = {**layout_of(job), "micro_batch": job.micro_batch}
    return ", ".join(
        f"{key} = {value}" for key, value in own.items() if request.fixed.get(key, value) != value
    )


def _ramp_request(request: Request, ranked: Ranked) -> str:
    """What the ramp would have to be for the best layout without one."""
    job = ranked.job
    unit = job.micro_batch * job.data_parallel
    asked = {"start": request.smaller.start, "increment": request.smaller.step}
    wrong = [
        f"batch.ramp.{key} = {value} is no multiple of micro-batch {job.micro_batch} × data-parallel "
        f"{job.data_parallel}; nearest legal: {nearest_multiples(value, unit)}"
        for key, value in asked.items()
        if value % unit
    ] or [f"schedule {job.schedule} on {job.pp} ranks does not exist for every batch of the ramp"]
    return f"without batch.ramp it fits ({seconds_text(ranked.seconds)} a step): {'; '.join(wrong)}"


def _no_layout(request: Request) -> str:
    keys = dict(request.fixed)
    if request.stack.algorithm != "backend":
        keys["algorithm"] = request.stack.algorithm
    if request.stack.compression.method != "none":
        keys["compression"] = request.stack.compression.method
    fixed = ", ".join(f"{key} = {value}" for key, value in keys.items()) or "none"
    batches = [str(batch) for batch in nearest_batches(request) if batch != request.global_batch]
    near = f"; nearest legal global batch: {' or '.join(batches)}" if batches else ""
    return (
        f"{request.hardware.devices} devices, global batch {request.global_batch}, {request.model.layers} layers, "
        f"{request.model.heads} heads; fixed: {fixed}{near}"
    )
