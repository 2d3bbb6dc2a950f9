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
    plain = _with(job, Compression("none"))
    methods = [method for method in METHODS if method != "powersgd" or not job.zero]
    return [_line(_with(job, Compression(method)), plain) for method in methods]


def own_verdict(job: Job) -> str | None:
    """The line of the job's own method; None without."""
    if job.stack.compression.method == "none":
        return None
    return _line(job, _with(job, Compression("none")))


def _line(job: Job, plain: Job) -> str:
    step, without = estimate(job).time.step, estimate(plain).time.step
    verdict = "pays" if step < without else "does not pay"
    return (
        f"gradients compressed by {job.stack.compression.method}: {seconds_text(step)} a step instead of "
        f"{seconds_text(without)}, {verdict}"
    )


def _with(job: Job, how: Compression) -> Job:
    return replace(job, stack=replace(job.stack, compression=how))
