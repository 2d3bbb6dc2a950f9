"""Whether compressed gradients would pay on a layout, method by method, with numbers."""

from dataclasses import replace

from fivefold.ledger.compression import Compression, Method
from fivefold.ledger.job import Job
from fivefold.ledger.total import estimate
from fivefold.render.units import seconds_text

METHODS: tuple[Method, ...] = ("bf16", "int8", "topk", "powersgd")


def compression_verdicts(job: Job) -> list[str]:
    """One line a method; none where no sum over replicas exists to be compressed."""
    replicas = job.dp_replicate if job.zero else job.dp_replicate * job.dp_shard * job.cp
    if replicas == 1:
        return []
    plain = estimate(_with(job, Compression("none"))).time.step
    lines = []
    for method in METHODS:
        if method == "powersgd" and job.zero:
            continue
        step = estimate(_with(job, Compression(method))).time.step
        verdict = "pays" if step < plain else "does not pay"
        lines.append(
            f"gradients compressed by {method}: {seconds_text(step)} a step instead of {seconds_text(plain)}, {verdict}"
        )
    return lines


def _with(job: Job, how: Compression) -> Job:
    return replace(job, stack=replace(job.stack, compression=how))
