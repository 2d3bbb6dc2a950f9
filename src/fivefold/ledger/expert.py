"""Expert parallel: what one layer's micro-batch moves. Twin of parallel/expert.py.

Dispatch and combine forward, their transposes backward; each token goes once per chosen expert, so the sum
over the group is tokens · k · hidden · itemsize exactly, a rank's own part depends on routing.
"""

from fivefold.ledger.job import Job
from fivefold.ledger.operations import routed_rows
from fivefold.ledger.traffic import Row, row


def layer_rows(job: Job) -> list[Row]:
    """One expert layer's traffic of one micro-batch."""
    if job.ep == 1:
        return []
    size = routed_rows(job) * job.imbalance * job.model.hidden * job.itemsize
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
