"""Expert parallel: what one layer's micro-batch moves. Twin of parallel/expert.py.

Dispatch and combine forward, their transposes backward; each token goes once per chosen expert, so the sum
over the group is tokens · k · hidden · itemsize exactly, a rank's own part depends on routing.
"""

from math import comb

from fivefold.ledger.job import Job
from fivefold.ledger.operations import routed_rows
from fivefold.ledger.traffic import Row, row


def ranks_per_token(job: Job) -> float:
    """Distinct ranks that hold a token's experts, expected: e · (1 − C(E − E/e, k)/C(E, k)) (formulas.md §8)."""
    count, k = job.model.experts.count, job.model.experts.top_k
    return job.ep * (1.0 - comb(count - count // job.ep, k) / comb(count, k))


def layer_rows(job: Job) -> list[Row]:
    """One expert layer's traffic of one micro-batch."""
    if job.ep == 1:
        return []
    size = routed_rows(job) * job.imbalance * job.model.hidden * job.itemsize
    if job.stack.dispatch_once:
        size *= ranks_per_token(job) / job.model.experts.top_k
    return [
        row(
            job,
            "ep",
            "all_to_all",
            phase,
            count=2,
            size=size,
            group=job.expert_group(),
            formula="tokens · top_k · hidden · itemsize, dispatch and combine",
        )
        for phase in ("forward", "backward")
    ]
