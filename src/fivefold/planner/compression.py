"""Whether compressed gradients would pay on a layout, method by method, with numbers."""

from dataclasses import replace

from fivefold.ledger.compression import Compression, Method
from fivefold.ledger.job import Job
from fivefold.ledger.total import estimate
from fivefold.render.units import seconds_text
from fivefold.spec.synchronisation import can_sum

METHODS: tuple[Method, ...] = ("bf16", "int8", "topk", "powersgd")


def compression_verdicts(job: Job) -> list[str]:
    """One line a method; none where no sum over replicas exists to be compressed."""
    plain = _with(job, Compression("none"))
    methods = [method for method in METHODS if _is_legal(job, method)]
    return [_line(_with(job, Compression(method)), plain) for method in methods]


def _is_legal(job: Job, method: Method) -> bool:
    is_apart, ranks = job.model.tied and job.pp > 1, job.data_parallel * job.cp
    sums = can_sum(job.stack.algorithm, method, job.zero, ranks, job.dp_replicate, is_apart)
    return sums and job.precision != "fp16"


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
