"""Expert parallel: what one layer's micro-batch moves. Twin of parallel/expert.py.

How many rows go to each expert, dispatch and combine forward, their transposes backward. Each token goes once per
chosen expert, so the sum over the group is tokens · k · hidden · itemsize exactly; a rank's own part depends on
routing.
"""

from math import comb

from fivefold.ledger.job import Job
from fivefold.ledger.network import collective_seconds
from fivefold.ledger.operations import routed_rows
from fivefold.ledger.traffic import Row, row


def holders_per_token(job: Job, parts: int) -> float:
    """Of `parts` that experts are dealt over (ranks, nodes), how many hold some of a token's, expected:
    p · (1 − C(E − E/p, k)/C(E, k)): choices without return. A router limited to some groups of experts chooses among
    their parts only."""
    experts = job.model.experts
    count, each = experts.count, experts.count // parts
    if parts % experts.groups == 0:
        parts = parts // experts.groups * experts.top_groups
        count = parts * each
    return parts * (1.0 - comb(count - each, experts.top_k) / comb(count, experts.top_k))


def layer_rows(job: Job) -> list[Row]:
    """One expert layer's traffic of one micro-batch."""
    if job.ep == 1:
        return []
    sequences = job.micro_batch * job.sequence_length
    rows = routed_rows(job) * sequences / (job.cp * job.tokens)  # the mean over cp
    size = rows * job.imbalance * job.model.hidden * job.itemsize
    if job.stack.dispatch_once:
        size *= holders_per_token(job, job.ep) / job.model.experts.top_k
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
    local, domains = job.expert_group()
    each = size / count
    found = row(
        job, "ep", "all_to_all", phase, count=count, size=each, group=(local, domains), formula=formula
    )
    if not job.stack.dispatch_once or domains == 1:
        return found
    seconds = count * _two_hops(job, each, local, domains)
    return found._replace(seconds=seconds, exposed_seconds=seconds)


def _two_hops(job: Job, size: float, local: int, domains: int) -> float:
    """Seconds where a token crosses the network once for each node that holds some of its experts and is handed on
    over the node's own links (DeepSeek-V3 report, section 3.2.2); pieces flow through, the slower hop counts."""
    on = job.wires
    across = size * holders_per_token(job, domains) / holders_per_token(job, job.ep)
    return max(
        collective_seconds("all_to_all", across, 1, domains, on),
        collective_seconds("all_to_all", size, local, 1, on),
    )
