"""FLOPs of one optimizer step, by convention. A multiply-add counts 2; a lookup counts 0.

Model FLOPs are what the mathematics needs: 3 × forward, as PaLM (Chowdhery 2022) counts. Hardware FLOPs add what
is computed again: full recompute the layers' forward, attention recompute the core, fused attention's backward its
scores (5 matmuls against 4). Attention is counted causally (s(s+1)/2 pairs) or fully.
"""

from typing import Literal, NamedTuple

from fivefold.config.model import Model
from fivefold.ledger.job import Job
from fivefold.spec.stages import layer_costs

Convention = Literal["causal", "full"]


class Forward(NamedTuple):
    """Forward FLOPs of one token, averaged over the sequence."""

    layers: float  # matmuls with weights in the layers
    core: float  # attention
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.core + self.head


def forward_per_token(model: Model, sequence_length: int, convention: Convention) -> Forward:
    """2 FLOPs per active matmul parameter, 2·a·(d_qk + d_v) per pair of query and key."""
    latent = model.latent
    widths = latent.nope_dim + latent.rope_dim + latent.value_dim if latent.kv_rank else 2 * model.head_dim
    pairs = (sequence_length + 1) / 2 if convention == "causal" else sequence_length
    core = 2.0 * model.heads * widths * pairs * model.layers
    return Forward(2.0 * sum(layer_costs(model)), core, 2.0 * model.vocab * model.hidden)


def model_flops(job: Job, convention: Convention = "causal") -> float:
    """Of one step, over all ranks."""
    return 3.0 * forward_per_token(job.model, job.sequence_length, convention).total * job.step_tokens


def hardware_flops(job: Job, convention: Convention = "causal") -> float:
    """Of one step, over all ranks: what the devices execute."""
    return model_flops(job, convention) + sum(repeated(job, convention)) * job.step_tokens


def repeated(job: Job, convention: Convention = "causal") -> tuple[float, float, float]:
    """FLOPs per token that are computed again: the layers' matmuls and attention by recomputation, scores in fused
    attention's backward. A split backward recomputes once: the core has no weights, and where whole layers are
    recomputed the runtime does not split (parallel/pipeline.py)."""
    forward = forward_per_token(job.model, job.sequence_length, convention)
    layers = core = 0.0
    if job.recompute == "full":
        layers, core = forward.layers - _not_repeated(job), forward.core
    elif job.recompute == "attention" or (
        job.recompute == "elementwise" and job.stack.attention == "blocked"
    ):
        core = forward.core
    return layers, core, forward.core / 2 if job.stack.attention in ("flash", "fused") else 0.0


def _not_repeated(job: Job) -> float:
    """FLOPs per token of the dense layers' last product, which an early stop leaves out of recomputation."""
    model = job.model
    dense = model.experts.dense_layers if model.experts.count else model.layers
    return 2.0 * model.hidden * model.ffn * dense if job.stack.early_stop else 0.0
