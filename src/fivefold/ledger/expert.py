"""Expert parallel: what one layer's micro-batch moves. Twin of parallel/expert.py.

How many rows go to each expert, dispatch and combine forward, their transposes backward. Each token goes once per
chosen expert, so the sum over the group is tokens · k · hidden · itemsize exactly; a rank's own part depends on
routing.
"""

from math import comb

from fivefold.ledger.job import Job
from fivefold.ledger.operations import routed_rows
from fivefold.ledger.traffic import Row, row


def ranks_per_token(job: Job) -> float:
    """Distinct ranks that hold a token's experts, expected: e · (1 − C(E − E/e, k)/C(E, k)): choices without return."""
    count, k = job.model.experts.count, job.model.experts.top_k
    return job.ep * (1.0 - comb(count - count // job.ep, k) / comb(count, k))


def layer_rows(job: Job) -> list[Row]:
    """One expert layer's traffic of one micro-batch."""
    if job.ep == 1:
        return []
    rows = (
        routed_rows(job) * job.micro_batch * job.sequence_length / (job.cp * job.tokens)
    )  # the mean over cp
    size = rows * job.imbalance * job.model.hidden * job.itemsize
    if job.stack.dispatch_once:
        size *= ranks_per_token(job) / job.model.experts.top_k
    sizes = 8.0 * job.model.experts.count
    again = job.recompute in ("elementwise", "full") and job.stack.reruns_traffic
    text = "tokens · top_k · hidden · itemsize, dispatch and combine"
    return [
        _row(job, "forward", 3, 2 * size + sizes, text + "; 8 B an expert: how many rows"),
        _row(job, "backward", 5, 4 * size + sizes, text + ", and the forward again")
        if again
        else _row(job, "backward", 2, 2 * size, text),
    ]


def _row(job: Job, phase: str, count: int, size: float, formula: str) -> Row:
    """`count` all-to-alls of `size` bytes together."""
    group = job.expert_group()
    each = size / count
    return row(job, "ep", "all_to_all", phase, count=count, size=each, group=group, formula=formula)
