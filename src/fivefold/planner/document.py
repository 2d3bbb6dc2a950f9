"""A ledger as the JSON document that `fivefold estimate` and `fivefold plan` print (design page, contracts)."""

from dataclasses import replace
from typing import Any

from fivefold.config.tree import Config
from fivefold.ledger import flops, muon
from fivefold.ledger.job import Job
from fivefold.ledger.total import Ledger, RankClass, estimate
from fivefold.planner.ranges import beyond_fitted
from fivefold.render.units import bytes_text
from fivefold.spec.batch import BatchPlan
from fivefold.spec.ramp import BatchCourse, plan_course

LAYOUT = (
    "pp",
    "dp_replicate",
    "dp_shard",
    "cp",
    "tp",
    "ep",
    "zero",
    "sequence_parallel",
    "schedule",
    "chunks",
    "recompute",
)


PEAK_ERROR = 0.05
"""Of predicted peaks, the median of the sources' medians: `fivefold validate`."""


def title_of(config: Config) -> str:
    """What a page is about: the model on the cluster."""
    model = config.model.preset or f"{config.model.layers} layers of {config.model.hidden}"
    return f"{model} on {config.cluster.preset or config.cluster.path or 'CPU ranks'}"


def layout_text(job: Job) -> str:
    """The layout and the batch in a line."""
    chunks = f", {job.chunks} chunks a rank" if job.chunks > 1 else ""
    parts = [
        f"pp {job.pp} ({job.schedule}{chunks})" if job.pp > 1 else "pp 1",
        f"dp {job.dp_replicate} × {job.dp_shard} (replicas × shards), zero {job.zero}",
        f"cp {job.cp}",
        f"tp {job.tp}" + (" with sequence parallel" if job.sequence_parallel else ""),
        *([f"ep {job.ep}"] if job.ep > 1 else []),
        f"recompute {job.recompute}",
    ]
    batch = job.micro_batch * job.microbatches * job.data_parallel
    return (
        f"{'; '.join(parts)}. Batch of {batch:,} sequences of {job.sequence_length:,} tokens in {job.precision}: "
        f"micro-batch {job.micro_batch} × {job.microbatches} × {job.data_parallel} replicas"
    )


def layout_of(job: Job) -> dict[str, Any]:
    """The keys of `[parallel]` that make this job."""
    return {key: getattr(job, key) for key in LAYOUT}


def reason(ledger: Ledger) -> str:
    """Whether it fits, in one line with numbers."""
    full, capacity = ledger.fullest, ledger.job.hardware.device.memory
    need = full.memory.peak / 2**30
    have = capacity / 2**30
    where = f"pipeline rank {full.rank} ({full.layers} layers) needs {need:.2f} GiB of {have:.2f} GiB"
    if ledger.fits:
        near = (
            f"; closer than peaks are predicted, {PEAK_ERROR:.0%} in the median"
            if have < need * (1 + PEAK_ERROR)
            else ""
        )
        return f"fits: {where}{near}"
    return f"does not fit: {where}; {bytes_text(full.memory.peak - capacity)} are missing"


def document(ledger: Ledger) -> dict[str, Any]:
    """The estimate, as the contract has it; units: bytes, seconds, FLOPs."""
    job, time = ledger.job, ledger.time
    full = ledger.fullest
    memory = full.memory
    communication = sum(row.seconds for row in ledger.traffic)
    hardware = flops.hardware_flops(job)
    return {
        "fits": ledger.fits,
        "reason": reason(ledger),
        "world_size": job.world_size,
        "parameters": {
            "total": ledger.parameters,
            "active": ledger.active_parameters,
            "per_rank_max": max(item.share.total for item in ledger.ranks),
        },
        "memory": {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "buffers": memory.buffers,
            "overhead": memory.overhead,
            "peak": memory.peak,
            "capacity": job.hardware.device.memory,
            "rank": full.rank * (job.world_size // job.pp),
        },
        "rank_classes": [_rank_class(item, job.imbalance) for item in ledger.ranks],
        "mean_load_classes": _at_mean_load(job),
        "traffic": [
            {
                "axis": row.axis,
                "primitive": row.primitive,
                "phase": row.phase,
                "count": row.times,
                "bytes_per_rank": row.bytes_per_rank,
                "wire_bytes": row.wire_bytes,
                "seconds": row.seconds,
                "exposed_seconds": row.exposed_seconds,
                "link": row.link,
                "experts": "expert parameters" in row.formula,
            }
            for row in ledger.traffic
        ],
        "flops": {
            "model_per_step": flops.model_flops(job),
            "hardware_per_step": hardware,
            "optimizer_per_step": muon.flops(job),
        },
        "flops_convention": "causal attention; model = 3 × forward; hardware adds what is recomputed; optimizer = the "
        "products of Muon",
        "bubble_fraction": ledger.timeline.bubble / ledger.timeline.makespan,
        "communication_compute_ratio": communication / max(time.compute, 1e-12),
        "time": {
            "step": time.step,
            "compute": time.compute,
            "exposed_communication": time.exposed_communication,
            "bubble": time.bubble,
            "optimizer": time.optimizer,
            "other": time.other,
        },
        "tokens_per_second_per_gpu": ledger.tokens_per_second_per_gpu,
        "tflops_per_gpu": flops.model_flops(job) / time.step / job.world_size / 1e12,
        "mfu": ledger.utilization("causal"),
        "mfu_full_attention": ledger.utilization("full"),
        "hfu": ledger.utilization("causal", hardware=True),
        "notes": beyond_fitted(ledger),
    }


def _rank_class(item: RankClass, load: float) -> dict[str, Any]:
    return {
        "pp_rank": item.rank,
        "layers": item.layers,
        "parameters": item.share.total,
        "expert_parameters": item.share.expert,
        "expert_load": load,
        "memory": {**item.memory._asdict(), "peak": item.memory.peak},
    }


def _at_mean_load(job: Job) -> list[dict[str, Any]]:
    """With expert parallel, the ranks whose experts get the mean load; the ledger's are the busiest ones."""
    if job.ep == 1 or job.imbalance == 1.0:
        return []
    return [_rank_class(item, 1.0) for item in estimate(replace(job, imbalance=1.0)).ranks]


def course_of(config: Config, job: Job) -> BatchCourse:
    """The batch of every step of a run with the layout of `job`."""
    unit = job.micro_batch * job.data_parallel
    last = BatchPlan(
        unit * job.microbatches, job.micro_batch, job.microbatches, job.data_parallel, job.sequence_length
    )
    return plan_course(config.batch.ramp, last)


def run_cost(ledger: Ledger, tokens: float, course: BatchCourse) -> dict[str, float]:
    """Days, device-hours and price of training on `tokens`, the smaller batches of a ramp included."""
    seconds, left = 0.0, tokens
    for plan, steps in course.stages():
        size = plan.global_batch_tokens
        own = left if steps is None else min(left, float(steps * size))
        last = plan.accumulation == ledger.job.microbatches
        step = ledger if last else estimate(replace(ledger.job, microbatches=plan.accumulation))
        seconds += own / size * step.time.step
        left -= own
    hours = seconds / 3600 * ledger.job.world_size
    return {
        "tokens": tokens,
        "days": seconds / 86400,
        "device_hours": hours,
        "price_per_hour": ledger.job.hardware.price,
        "price": hours * ledger.job.hardware.price,
    }
