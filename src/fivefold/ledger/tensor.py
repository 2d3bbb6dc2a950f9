"""Tensor parallel (and sequence parallel): what one layer's micro-batch moves. Twin of parallel/tensor.py.

Without sequence parallel: 2 all-reduces of the residual stream forward, 2 backward (Shoeybi 2019). With it:
the same bytes as all-gather + reduce-scatter, and 2 all-gathers more in backward to rebuild the saved inputs
(Korthikanti 2022). All numbers are per micro-batch; a stage counts its layers, a step its micro-batches.
"""

from fivefold.ledger.job import Job
from fivefold.ledger.traffic import Row, row


def layer_rows(job: Job, expert: bool) -> list[Row]:
    """One layer's traffic, forward and backward. Experts owned whole by tp ranks have none of their own."""
    if job.tp == 1:
        return []
    regions = 1 if expert and job.expert_width_split == 1 and not job.model.experts.shared_ffn else 2
    size = float(job.tokens * job.model.hidden * job.itemsize)
    formula = "tokens · hidden · itemsize, per region (attention, feed-forward)"
    if not job.sequence_parallel:
        return [_row(job, "all_reduce", phase, regions, size, formula) for phase in ("forward", "backward")]
    return [
        _row(job, "all_gather", "forward", regions, size, formula),
        _row(job, "reduce_scatter", "forward", regions, size, formula),
        _row(job, "all_gather", "backward", 2 * regions, size, formula + ", and to rebuild its input"),
        _row(job, "reduce_scatter", "backward", regions, size, formula),
    ]


def edge_rows(job: Job, first: bool, last: bool) -> list[Row]:
    """The embedding's and the head's traffic of one micro-batch on the stages that hold them."""
    if job.tp == 1:
        return []
    size = float(job.tokens * job.model.hidden * job.itemsize)
    found = []
    if first:
        primitive = "reduce_scatter" if job.sequence_parallel else "all_reduce"
        found.append(_row(job, primitive, "forward", 1, size, "embedding rows summed"))
    if last:
        if job.sequence_parallel:
            found.append(_row(job, "all_gather", "forward", 1, size, "head input"))
            found.append(_row(job, "reduce_scatter", "backward", 1, size, "head input gradient"))
        else:
            found.append(_row(job, "all_reduce", "backward", 1, size, "head input gradient"))
        found.append(_row(job, "all_reduce", "forward", 3, job.tokens * 4.0, "loss: max, target, sum"))
    return found


def _row(job: Job, primitive: str, phase: str, count: int, size: float, formula: str) -> Row:
    return row(
        job,
        "tp",
        primitive,  # type: ignore[arg-type]
        phase,
        count=count,
        size=size,
        group=job.group("tp"),
        formula=formula,
    )
