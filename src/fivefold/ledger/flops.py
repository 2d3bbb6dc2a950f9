"""FLOPs by convention. A multiply-add counts 2; a lookup counts 0."""

from typing import Literal, NamedTuple

from fivefold.config.tree import Model
from fivefold.spec.parameters import parameters

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
    weights = 0.0
    for parameter in parameters(model):
        if parameter.layer is not None and len(parameter.shape) > 1:
            part = model.experts.top_k / model.experts.count if parameter.role == "expert" else 1.0
            weights += parameter.numel * part
    pairs = (sequence_length + 1) / 2 if convention == "causal" else sequence_length
    core = 2.0 * model.heads * 2 * model.head_dim * pairs * model.layers
    return Forward(2.0 * weights, core, 2.0 * model.vocab * model.hidden)
