"""What one decoder layer, and the head, compute on one rank for one micro-batch: matmuls, attention, bytes
moved.

FLOPs, seconds and the tests against FlopCounterMode all read this one list.
"""

from typing import NamedTuple

from fivefold.ledger.job import Job


class Matmul(NamedTuple):
    """`batch` products of [m, k] by [k, n], as one kernel. Forward; backward does two of the same size."""

    name: str
    m: float
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class Core(NamedTuple):
    """softmax(QKᵀ)V of one rank: `batch` sequences of `queries` rows against `keys`, causal."""

    batch: int
    heads: int
    queries: int
    keys: int
    qk_dim: int
    v_dim: int
    kv_heads: int

    @property
    def full_flops(self) -> float:
        """All pairs of query and key."""
        return 2.0 * self.batch * self.heads * self.queries * self.keys * (self.qk_dim + self.v_dim)

    @property
    def causal_flops(self) -> float:
        """Only keys up to the query: (s + 1)/(2s) of all pairs."""
        return self.full_flops * (self.keys + 1) / (2 * self.keys)


class Layer(NamedTuple):
    """A layer's work in the forward pass."""

    matmuls: tuple[Matmul, ...]
    core: Core
    streamed: float  # bytes read and written by memory-bound kernels
    kernels: float  # launches


def _core(job: Job) -> Core:
    model, latent = job.model, job.model.latent
    heads = -(-model.heads // job.tp)
    kv_heads = -(-model.kv_heads // min(job.tp, model.kv_heads))
    qk, v = model.head_dim, model.head_dim
    if latent.kv_rank:
        qk, v, kv_heads = latent.nope_dim + latent.rope_dim, latent.value_dim, heads
    queries = -(-job.sequence_length // job.cp)
    return Core(job.micro_batch, heads, queries, job.sequence_length, qk, v, kv_heads)


def _attention_matmuls(job: Job, core: Core) -> list[Matmul]:
    model, latent, rows = job.model, job.model.latent, job.tokens
    if not latent.kv_rank:
        width = (core.heads + 2 * core.kv_heads) * model.head_dim
        found = [Matmul("query, key, value", rows, width, model.hidden)]
    else:
        found = [Matmul("kv_down", rows, latent.kv_rank + latent.rope_dim, model.hidden)]
        up = core.heads * (latent.nope_dim + latent.value_dim)
        found.append(Matmul("kv_up", rows, up, latent.kv_rank))
        if latent.q_rank:
            found.append(Matmul("query_down", rows, latent.q_rank, model.hidden))
        found.append(Matmul("query", rows, core.heads * core.qk_dim, latent.q_rank or model.hidden))
    return [*found, Matmul("output", rows, model.hidden, core.heads * core.v_dim)]


def _feed_forward(job: Job, rows: float, width: int, prefix: str, count: int = 1) -> list[Matmul]:
    hidden = job.model.hidden
    wide = width * (2 if job.model.activation == "swiglu" or count > 1 or prefix == "expert" else 1)
    return [
        Matmul(f"{prefix} up", rows, wide, hidden, count),
        Matmul(f"{prefix} down", rows, hidden, width, count),
    ]


def routed_rows(job: Job) -> float:
    """Token copies one rank's experts work on, on average: tokens · k, split where tp ranks own experts."""
    return job.tokens * job.model.experts.top_k * job.expert_width_split / job.tp


def layer(job: Job, expert: bool) -> Layer:
    """The forward work of a dense or an expert layer."""
    core = _core(job)
    matmuls = _attention_matmuls(job, core)
    model, experts = job.model, job.model.experts
    if not expert:
        matmuls += _feed_forward(job, job.tokens, -(-model.ffn // job.tp), "feed-forward")
    else:
        local = experts.count // job.ep
        routed = job.tokens / (1 if job.stack.keep_gathered else job.sequence_split)  # ours gathers before it
        matmuls.append(Matmul("router", routed, experts.count, model.hidden))
        rows = routed_rows(job) * job.imbalance / local
        matmuls += _feed_forward(job, rows, experts.ffn // job.expert_width_split, "expert", local)
        if experts.shared_ffn:
            matmuls += _feed_forward(job, job.tokens, -(-experts.shared_ffn // job.tp), "shared")
        if experts.shared_gate:
            matmuls.append(Matmul("shared gate", job.tokens, 1, model.hidden))
    return Layer(tuple(matmuls), core, _streamed(job, core, expert), _kernels(job, expert))


def _kernels(job: Job, expert: bool) -> float:
    """Launches of a forward: a dense layer's norms, matmuls, attention, residuals; an expert layer routes,
    sorts,
    exchanges and calls every local expert, with host synchronisations counted as the launches they cost."""
    dense = 24 if job.stack.fused or job.stack.compiled else 45
    if not expert:
        return dense
    physics, local = job.physics, job.model.experts.count // job.ep
    return dense + physics.expert_kernels + physics.local_expert_kernels * local


def _streamed(job: Job, core: Core, expert: bool) -> float:
    """Bytes of norms, residuals, rotary, activation and routing, each input read and output written once.

    An eager RMSNorm upcasts and makes seven passes (torch-facts §1: pow, mean, rsqrt, mul allocate), an eager
    LayerNorm one and a cast; an unfused activation writes silu and product apart, unfused rotary its halves.
    """
    model, item, fused = job.model, job.itemsize, job.stack.fused or job.stack.compiled
    rows, split = job.tokens, job.sequence_split
    norm = 2 * item if fused else 28 if model.norm == "rmsnorm" else 10
    mask = 2 if job.stack.dropout else 0
    residual = 3 * item + mask
    total = 2.0 * rows * model.hidden / split * (norm + residual)
    if model.positions == "rotary":
        width = (core.heads + core.kv_heads) * core.qk_dim
        total += rows * width * item * (2 if fused else 6)
    if model.qk_norm:
        total += rows * (core.heads + core.kv_heads) * core.qk_dim * norm
    gated = model.activation == "swiglu"
    passes = (3 if fused else 5) if gated else 2 if fused else 4
    width = -(-model.ffn // job.tp)
    if expert:
        copies = routed_rows(job) * job.imbalance
        width = job.model.experts.ffn // job.expert_width_split
        total += copies * width * item * passes
        # Permute and restore, here and at the experts, each read and written.
        total += copies * model.hidden * item * (3 if job.stack.dispatch_once else 6)
        width = -(-job.model.experts.shared_ffn // job.tp)
    return total + rows * width * item * passes


def head(job: Job) -> Matmul:
    """The output projection of one micro-batch; the vocabulary is padded to a multiple of tp."""
    return Matmul("head", job.tokens, -(-job.model.vocab // job.tp), job.model.hidden)


LOSS_ELEMENTS = 1 << 22
"""Logits that nn/loss.py holds at once."""


def loss_chunks(job: Job) -> int:
    """Chunks of a micro-batch's logits where the loss is computed chunk by chunk, alike on all tp ranks."""
    tokens = max(1, LOSS_ELEMENTS // -(-job.model.vocab // job.tp))
    return -(-job.tokens // tokens)
