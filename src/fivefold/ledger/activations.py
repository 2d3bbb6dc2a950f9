"""Bytes that one layer keeps for its backward, per micro-batch and rank, part by part.

Sources: Korthikanti 2022 table 2 for the fused stack with dropout (34 + 5as/h, reproduced to the last digit);
formulas.md §5 for the eager Llama block on torch 2.13 (two float32 copies per unfused RMSNorm, four
feed-forward tensors), measured against autograd's storages.
"""

from typing import NamedTuple

from fivefold.ledger.job import Job
from fivefold.ledger.operations import LOSS_ELEMENTS, Core, layer, routed_rows

BLOCK = 128  # queries of a block in nn/blocked_attention.py


class Kept(NamedTuple):
    """Bytes by part of a layer."""

    norms: float
    attention: float
    core: float  # scores, or flash attention's log-sum-exp
    feed_forward: float
    routing: float
    masks: float

    @property
    def total(self) -> float:
        return sum(self)


def kept(job: Job, expert: bool) -> Kept:
    """Everything a layer's forward saves when nothing is recomputed."""
    model, item, rows = job.model, job.itemsize, job.tokens
    core = layer(job, expert).core
    split = job.sequence_split
    streams = rows * model.hidden / split  # elements of the residual stream
    fused = not _eager(job)
    norm = item if fused else 8 if item < 4 else 2 * item  # its input; or two float32 copies
    norms = 2 * streams * (norm + item)
    if job.stack.keep_gathered:
        norms += 2 * rows * model.hidden * item * (1 - 1 / split)
    norms += 0 if fused else 2 * max(4, item) * rows / split
    masks = 2 * streams if job.stack.dropout else 0.0
    return Kept(
        norms,
        _projections(job, core),
        _scores(job, core),
        _feed_forward(job, expert, fused),
        _routing(job) if expert else 0.0,
        masks,
    )


def _projections(job: Job, core: Core) -> float:
    rows, item, latent = job.tokens, job.itemsize, job.model.latent
    queries, values = core.heads * core.qk_dim, core.heads * core.v_dim
    keys = core.kv_heads * (core.qk_dim + core.v_dim)
    found = float(rows * item * (queries + keys + values))
    if latent.kv_rank:
        found += rows * item * 2 * (latent.kv_rank + latent.q_rank)  # compressed, and normalised
    if _eager(job):
        found += rows * item * values  # attention's output is laid out anew for the projection
        if job.model.positions == "rotary" and item < 8:  # cosine, sine, cast for queries and again for keys
            found += 4 * core.queries * (core.qk_dim // 2) * max(4, item)
    if job.model.qk_norm:
        found += rows * item * (core.heads + core.kv_heads) * core.qk_dim
    return found


def _scores(job: Job, core: Core) -> float:
    if job.stack.attention == "blocked" and job.cp > 1 and job.context == "ring":
        if job.recompute == "attention":
            return _normalizers(job, core)
        # Of a rank's own keys, and of half the keys (or half the queries) for every other rank's.
        others = (job.cp - 1) * core.queries * -(-core.queries // 2)
        pairs = _causal_pairs(core.queries) + others
        return float(core.batch * core.heads * pairs * job.itemsize) + (1 + job.cp) * _normalizers(job, core)
    if job.stack.attention == "blocked":
        heads, sequence = (core.heads / job.cp, core.keys) if job.cp > 1 else (core.heads, core.queries)
        return float(core.batch * heads * _causal_pairs(sequence) * job.itemsize)
    if job.stack.attention != "unfused":
        return 4.0 * core.batch * core.heads * core.queries
    pairs = float(core.batch * core.heads * core.queries * core.keys)
    return pairs * (2 * job.itemsize + 1 if job.stack.dropout else job.itemsize)


def _causal_pairs(sequence: int) -> float:
    """Probabilities of each block of queries up to its end."""
    if sequence % BLOCK == 0:
        return sequence * (sequence + BLOCK) / 2
    ends = [*range(BLOCK, sequence, BLOCK), sequence]
    starts = range(0, sequence, BLOCK)
    return float(sum((end - start) * end for start, end in zip(starts, ends, strict=True)))


def _normalizers(job: Job, core: Core) -> float:
    """log Σ exp(score) of every query, where it is kept besides probabilities or instead of them."""
    return float(core.batch * core.heads * core.queries * max(4, job.itemsize))


def _feed_forward(job: Job, expert: bool, fused: bool) -> float:
    model, item = job.model, job.itemsize
    gated = model.activation == "swiglu"
    tensors = (3 if fused else 4) if gated else 2
    if not expert:
        return float(job.tokens * item * tensors * -(-model.ffn // job.tp))
    experts = model.experts
    copies = routed_rows(job) * job.imbalance
    routed = copies * item * tensors * (experts.ffn // job.expert_width_split)
    return routed + job.tokens * item * tensors * -(-experts.shared_ffn // job.tp)


def _routing(job: Job) -> float:
    """Router scores in float32, the experts' input and output rows."""
    experts, item = job.model.experts, job.itemsize
    scores = 2 * 4.0 * job.tokens / job.sequence_split * experts.count
    return scores + 2 * routed_rows(job) * job.imbalance * item * job.model.hidden


def saved(job: Job, expert: bool) -> float:
    """Bytes a layer holds between forward and backward under the job's recompute mode."""
    full = kept(job, expert)
    boundary = job.tokens * job.model.hidden * job.itemsize / job.sequence_split
    if job.recompute == "full":
        return boundary
    if job.recompute == "attention" and job.cp > 1 and job.context == "ring":
        return full.total  # the ring is not run again: see `_scores`
    if job.recompute == "attention":
        return full.total - full.core - _core_output(job, expert)
    if job.recompute == "elementwise":
        return _matmul_outputs(job, expert) + full.core + boundary
    return full.total


def _core_output(job: Job, expert: bool) -> float:
    """The attention core's own output, where the projection keeps a copy of it besides."""
    core = layer(job, expert).core
    return float(job.tokens * job.itemsize * core.heads * core.v_dim) if _eager(job) else 0.0


def _eager(job: Job) -> bool:
    return not (job.stack.fused or job.stack.compiled)


def _matmul_outputs(job: Job, expert: bool) -> float:
    work = layer(job, expert)
    outputs = sum(op.m * op.n * op.batch for op in work.matmuls) / job.stack.keep_every
    return job.itemsize * (outputs + job.tokens * work.core.heads * work.core.v_dim)


def live(job: Job, expert: bool) -> float:
    """What recomputation brings back while one layer's backward runs."""
    return max(0.0, kept(job, expert).total - saved(job, expert)) if job.recompute != "none" else 0.0


def loss(job: Job) -> float:
    """Logits and what the loss makes of them, of one micro-batch; chunked, what is kept for backward."""
    vocab = -(-job.model.vocab // job.tp)
    if job.stack.chunked_loss:
        return float(job.model.hidden * (job.tokens * job.itemsize + vocab * job.itemsize))
    return job.tokens * vocab * job.stack.loss_bytes


def loss_chunk(job: Job) -> float:
    """The live chunk of logits: at most 4 Mi, in the compute type and float32, and the head's gradient there."""
    if not job.stack.chunked_loss:
        return 0.0
    vocab = -(-job.model.vocab // job.tp)
    wide = max(4, job.itemsize)
    return float(min(LOSS_ELEMENTS, job.tokens * vocab) * (job.itemsize + 2 * wide) + vocab * job.model.hidden * wide)


def embedding(job: Job) -> float:
    """The embedding's output mask and the token ids, per micro-batch."""
    mask = job.tokens * job.model.hidden / job.sequence_split if job.stack.dropout else 0.0
    return mask + 8.0 * job.tokens


def head_input(job: Job) -> float:
    """The final norm's input and output."""
    split = job.sequence_split
    norm = job.itemsize if (job.stack.fused or job.stack.compiled) else 8
    return float(job.tokens * job.model.hidden * (norm + job.itemsize) / split)
