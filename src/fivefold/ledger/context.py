"""Context parallel: what one layer's micro-batch moves. Twin of parallel/context.py.

Ring attention (Liu 2023): every rank passes its keys and values c − 1 times forward; backward passes them
again together with their gradients. Ulysses (Jacobs 2023): all-to-all of q, k, v and of the output, and back.
"""

from fivefold.ledger.job import Job
from fivefold.ledger.operations import Core
from fivefold.ledger.traffic import Row, row


def layer_rows(job: Job, core: Core) -> list[Row]:
    """One layer's traffic of one micro-batch."""
    if job.cp == 1:
        return []
    group = job.group("cp")
    keys = float(job.tokens * core.kv_heads * (core.qk_dim + core.v_dim) * job.itemsize)
    if job.context == "ring":
        hops = job.cp - 1
        text = "(cp − 1) · tokens/cp · KV heads · (d_k + d_v) · itemsize"
        return [
            row(job, "cp", "send", "forward", count=hops, size=keys, group=group, formula=text),
            row(
                job,
                "cp",
                "send",
                "backward",
                count=2 * hops,
                size=keys,
                group=group,
                formula=text + ", and its gradient",
            ),
        ]
    queries = float(job.tokens * core.heads * (core.qk_dim + core.v_dim) * job.itemsize)
    size = keys + queries
    text = "tokens/cp · (heads + KV heads) · (d_k + d_v) · itemsize"
    return [
        row(job, "cp", "all_to_all", phase, count=1, size=size, group=group, formula=text)
        for phase in ("forward", "backward")
    ]
