"""Context parallel: what one layer's micro-batch moves. Twin of parallel/context.py, ring.py and ulysses.py.

Ring attention (Liu 2023): every rank passes its keys and values c − 1 times forward; backward passes them
again, and their gradients as often. Ulysses (Jacobs 2023): all-to-all of q, k, v and of the output, and back.
Messages are as long as the fullest rank's tokens. An auxiliary loss is a matter of whole sequences: expert
layers sum each sequence's choices over the ranks.
"""

from fivefold.ledger.job import Job
from fivefold.ledger.network import Primitive
from fivefold.ledger.operations import Core
from fivefold.ledger.traffic import Row, row


def layer_rows(job: Job, core: Core, expert: bool) -> list[Row]:
    """One layer's traffic of one micro-batch."""
    if job.cp == 1:
        return []
    again = job.recompute in ("elementwise", "full") and job.stack.reruns_traffic
    found = _ring_rows(job, core, again) if job.context == "ring" else _ulysses_rows(job, core, again)
    if expert and job.model.experts.auxiliary_loss:
        size = float(job.micro_batch * job.model.experts.count * max(4, job.itemsize))
        text = "micro-batch · experts · itemsize: choices of each sequence"
        for phase in ("forward", "backward") if again else ("forward",):
            found.append(_row(job, "all_reduce", phase, 1, size, text))
    return found


def _ring_rows(job: Job, core: Core, again: bool) -> list[Row]:
    elements = job.tokens * core.kv_heads * (core.qk_dim + core.v_dim)
    hops = job.cp - 1
    keys = float(hops * elements * job.itemsize)
    gradients = float(hops * elements * (job.stack.ring_gradient or job.itemsize))
    text = "(cp − 1) · tokens/cp · KV heads · (d_k + d_v) · itemsize"
    repeats = 2 if again else 1
    return [
        _row(job, "send", "forward", hops, keys, text),
        _row(
            job,
            "send",
            "backward",
            (repeats + 1) * hops,
            repeats * keys + gradients,
            text + ", and their gradients",
        ),
    ]


def _ulysses_rows(job: Job, core: Core, again: bool) -> list[Row]:
    """A KV head that several ranks need is sent to each of them."""
    kv_heads = max(core.kv_heads, job.cp)
    per_token = (core.heads + kv_heads) * (core.qk_dim + core.v_dim)
    size = float(job.tokens * per_token * job.itemsize)
    text = "tokens/cp · (heads + KV heads) · (d_k + d_v) · itemsize"
    repeats = 2 if again else 1
    return [
        _row(job, "all_to_all", "forward", 2, size, text),
        _row(job, "all_to_all", "backward", 2 * repeats, size * repeats, text),
    ]


def _row(job: Job, primitive: Primitive, phase: str, count: int, size: float, formula: str) -> Row:
    """`count` collectives of `size` bytes together."""
    each = size / count
    return row(job, "cp", primitive, phase, count=count, size=each, group=job.group("cp"), formula=formula)
