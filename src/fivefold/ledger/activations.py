"""Bytes that one layer keeps for its backward, per micro-batch and rank, part by part.

Sources: Korthikanti 2022 table 2 for the fused stack with dropout (34 + 5as/h, reproduced to the last digit);
the eager Llama block as torch 2.13 keeps it (two float32 copies per unfused RMSNorm, four
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
    fused = not _eager(job) or job.stack.manual_backward
    norms = 2 * (streams * (_norm_copies(job, model.norm) + item) + rows / split * _norm_statistics(job))
    if job.stack.keep_gathered:
        norms += 2 * rows * model.hidden * item * (1 - 1 / split)
    masks = 2 * (8 * rows / split if job.stack.compiled_chains else streams) if job.stack.dropout else 0.0
    return Kept(
        norms,
        _projections(job, core),
        _scores(job, core),
        _feed_forward(job, expert, fused),
        (_eager_routing if _eager(job) else _routing)(job) if expert else 0.0,
        masks,
    )


def _norm_copies(job: Job, norm: str) -> int:
    """Bytes a norm keeps per element of its input: the input itself; an eager RMSNorm two copies, in float32 at
    least."""
    if not _eager(job) or job.stack.manual_backward or norm == "layernorm":
        return job.itemsize
    return 2 * max(4, job.itemsize)


def _norm_statistics(job: Job) -> int:
    """Bytes a norm keeps per row: the reciprocal of the deviation, a LayerNorm the mean too."""
    if not _eager(job):
        return 0
    if job.model.norm == "layernorm":
        return 2 * (job.itemsize if job.hardware.device.is_cpu else 4)
    return max(4, job.itemsize)


def _projections(job: Job, core: Core) -> float:
    rows, item, latent = job.tokens, job.itemsize, job.model.latent
    queries, values = core.heads * core.qk_dim, core.heads * core.v_dim
    keys = core.kv_heads * (core.qk_dim + core.v_dim)
    found = float(rows * item * (queries + keys + values))
    if latent.kv_rank:
        found += rows * item * 2 * (latent.kv_rank + latent.q_rank)  # compressed, and normalised
    if _is_laid_anew(job):
        found += rows * item * values
    found += _cast_tables(job) * core.queries * (core.qk_dim // 2) * max(4, item)
    if job.model.qk_norm:
        heads = rows * (core.heads + core.kv_heads)
        found += heads * core.qk_dim * _norm_copies(job, "rmsnorm")
        found += heads * max(4, item) if _eager(job) else 0
    return found


def _cast_tables(job: Job) -> int:
    """Rotary's tables that each layer casts and keeps: cosines and sines, in eager code once for queries and once for
    keys. A backward by hand reads those that all layers share (`rotary_tables`), as does compiled code in float64, in
    which they are made."""
    if not _eager(job) or job.model.positions != "rotary":
        return 0
    if job.stack.compiled_chains:
        return 2 if job.itemsize < 8 else 0
    return 0 if job.stack.manual_backward else 4


def _is_laid_anew(job: Job) -> bool:
    """Whether the projection keeps a copy of attention's output: the kernel writes it in the layout of its
    queries, which rotary and norms of heads have made contiguous by head; blocked attention of whole rows does not."""
    if job.stack.attention == "blocked":
        return _eager(job) and job.cp > 1
    apart = job.model.positions == "rotary" or job.model.qk_norm
    return _eager(job) and apart


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
    each = 2 if _piecewise(job) else tensors
    routed = copies * item * each * (experts.ffn // job.expert_width_split)
    return routed + job.tokens * item * tensors * -(-experts.shared_ffn // job.tp)


def _piecewise(job: Job) -> bool:
    """Whether routed experts are nn/expert_swiglu.py: it keeps the products of gate and up, and takes rows as they
    arrive."""
    return _eager(job) and job.stack.manual_backward and job.hardware.device.is_cpu and job.itemsize >= 4


def _routing(job: Job) -> float:
    """Router scores in float32, the experts' input and output rows."""
    experts, item = job.model.experts, job.itemsize
    scores = 2 * 4.0 * job.tokens / job.sequence_split * experts.count
    return scores + 2 * routed_rows(job) * job.imbalance * item * job.model.hidden


def _eager_routing(job: Job) -> float:
    """What nn/router.py and nn/experts.py keep: scores and weights in float32 at least, choices and orders as
    int64, the rows that reach this rank's experts and those that come back, the shared experts' gate."""
    experts, item = job.model.experts, job.itemsize
    rows = float(job.tokens)  # whole also under sequence parallel
    exact, choices, copies = max(4, item), rows * experts.top_k, routed_rows(job) * job.imbalance
    found = exact * rows * experts.count
    if experts.auxiliary_loss:  # sums of scores, shares and numbers of choices
        found += exact * (rows + job.micro_batch * (experts.count + 1))
    if experts.normalize_top_k:
        found += exact * (choices + rows)
    found += (8 + 16 + item) * choices
    found += 16 * copies if job.ep > 1 and not _piecewise(job) else 0
    found += (copies + choices) * item * job.model.hidden
    if experts.shared_gate:
        found += job.tokens * item * (job.model.hidden + 1)
    return found


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
        return _matmul_outputs(job, expert) + _flash_output(job, full, expert) + boundary
    return full.total


def _core_output(job: Job, expert: bool) -> float:
    """The attention core's own output, where the projection keeps a copy of it besides."""
    return _attention_output(job, expert) if _is_laid_anew(job) else 0.0


def _attention_output(job: Job, expert: bool) -> float:
    core = layer(job, expert).core
    return float(job.tokens * job.itemsize * core.heads * core.v_dim)


def _flash_output(job: Job, full: Kept, expert: bool) -> float:
    """What "elementwise" keeps of attention: a fused kernel's results; blocked attention is computed again."""
    return 0.0 if job.stack.attention == "blocked" else full.core + _attention_output(job, expert)


def _eager(job: Job) -> bool:
    return not (job.stack.fused or job.stack.compiled)


def _matmul_outputs(job: Job, expert: bool) -> float:
    work = layer(job, expert)
    return job.itemsize * sum(op.m * op.n * op.batch for op in work.matmuls) / job.stack.keep_every


def live(job: Job, expert: bool) -> float:
    """What recomputation brings back while one layer's backward runs."""
    return max(0.0, kept(job, expert).total - saved(job, expert)) if job.recompute != "none" else 0.0


def backward_buffers(job: Job) -> float:
    """What a layer's backward holds besides what was kept, at its fullest: gradients of the feed-forward's inner
    tensors and of the residual stream; with tensor parallel the gathered input and its gradient, before it is
    summed over the ranks."""
    model, item = job.model, job.itemsize
    width = -(-model.ffn // job.tp) if not model.experts.count or model.experts.dense_layers else 0
    inner = job.tokens * width * item * (3 if model.activation == "swiglu" else 2)
    stream = job.tokens * model.hidden * item
    return float(inner + stream / job.sequence_split + (2 * stream if job.sequence_parallel else 0))


def loss(job: Job) -> float:
    """Logits and what the loss makes of them, of one micro-batch; chunked, what is kept for backward."""
    vocab = -(-job.model.vocab // job.tp)
    if job.stack.chunked_loss:
        return float(job.model.hidden * (job.tokens * job.itemsize + vocab * max(4, job.itemsize)))
    return job.tokens * vocab * job.stack.loss_bytes


def outputs(job: Job) -> float:
    """Logits of every micro-batch that the last stage returns at the end of a step, in pieces and joined."""
    if not job.stack.returns_logits or job.pp == 1:
        return 0.0
    return 2.0 * job.microbatches * job.tokens * -(-job.model.vocab // job.tp) * job.itemsize


def loss_chunk(job: Job) -> float:
    """The live chunk of logits: at most 4 Mi, in the compute type and float32, and the head's gradient there."""
    if not job.stack.chunked_loss:
        return 0.0
    vocab = -(-job.model.vocab // job.tp)
    wide = max(4, job.itemsize)
    return float(
        min(LOSS_ELEMENTS, job.tokens * vocab) * (job.itemsize + 2 * wide) + vocab * job.model.hidden * wide
    )


def embedding(job: Job) -> float:
    """The embedding's output mask and the token ids, per micro-batch; of a part of the vocabulary, which ids are in
    it; of learned positions their numbers, under sequence parallel every token's."""
    mask = job.tokens * job.model.hidden / job.sequence_split if job.stack.dropout else 0.0
    numbers = 0
    if job.model.positions == "learned":
        split = job.sequence_split
        numbers = job.tokens // job.micro_batch if split == 1 else -(-job.tokens // split) * split
    return mask + (8.0 + (job.tp > 1)) * job.tokens + 8.0 * numbers


def head_input(job: Job) -> float:
    """The final norm's input, and its output unless the loss makes that's gradient at once."""
    rows = job.tokens / job.sequence_split
    each = _norm_copies(job, job.model.norm) + job.itemsize * (not job.stack.chunked_loss)
    return rows * (job.model.hidden * each + _norm_statistics(job))


def rotary_tables(job: Job) -> float:
    """Cosines and sines of a micro-batch's positions in float64, which all layers share, where they do not cast them.
    What is recomputed as a whole keeps none."""
    if (
        not job.stack.manual_backward
        or _cast_tables(job)
        or job.model.positions != "rotary"
        or job.recompute in ("elementwise", "full")
    ):
        return 0.0
    core = layer(job, bool(job.model.experts.count)).core
    return 2.0 * 8 * core.queries * (core.qk_dim // 2)
