"""The [model] section: sizes, attention, experts. The parameters follow from it (`spec.parameters`)."""

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import force_setattr

from fivefold.config.section import Section

Role = Literal["embedding", "norm", "bias", "attention", "ffn", "expert", "router", "head"]
"""What a parameter does in the model (see `spec.parameters`)."""


class RopeScaling(Section, frozen=True):
    """Stretching of rotary frequencies for contexts longer than the model was first trained on (Llama 3)."""

    factor: Annotated[float, Meta(ge=1.0, description="How much longer low frequencies are stretched.")] = 8.0
    low_freq_factor: Annotated[
        float, Meta(gt=0.0, description="Wavelengths above original_context / this are stretched fully.")
    ] = 1.0
    high_freq_factor: Annotated[
        float, Meta(gt=0.0, description="Wavelengths below original_context / this are left alone.")
    ] = 4.0
    original_context: Annotated[
        int, Meta(ge=1, description="Sequence length the model was first trained on, in tokens.")
    ] = 8192


class Experts(Section, frozen=True):
    """Mixture of experts. `count = 0` is a dense model."""

    count: Annotated[int, Meta(ge=0, le=65536, description="Routed experts per layer; 0 = dense.")] = 0
    top_k: Annotated[int, Meta(ge=1, description="Experts each token is sent to.")] = 2
    ffn: Annotated[int, Meta(ge=0, description="Feed-forward width of one routed expert.")] = 0
    shared_ffn: Annotated[
        int, Meta(ge=0, description="Total feed-forward width of the shared experts; 0 = none.")
    ] = 0
    shared_gate: Annotated[bool, Meta(description="A sigmoid gate scales the shared experts' output.")] = (
        False
    )
    dense_layers: Annotated[
        int, Meta(ge=0, description="First layers that keep a dense feed-forward (DeepSeek).")
    ] = 0
    router: Annotated[
        Literal["softmax", "sigmoid"], Meta(description="How router scores become probabilities.")
    ] = "softmax"
    router_bias: Annotated[
        bool,
        Meta(description="Selection bias per expert, balanced without a loss (not a trained parameter)."),
    ] = False
    normalize_top_k: Annotated[
        bool, Meta(description="Probabilities of the chosen experts are renormalised to sum to one.")
    ] = True
    scale: Annotated[float, Meta(gt=0.0, description="Factor on the routed experts' output.")] = 1.0
    groups: Annotated[int, Meta(ge=1, description="Expert groups for device-limited routing (DeepSeek).")] = 1
    top_groups: Annotated[int, Meta(ge=1, description="Groups a token may choose experts from.")] = 1
    auxiliary_loss: Annotated[
        float, Meta(ge=0.0, description="Coefficient of the load-balancing loss, per sequence.")
    ] = 0.0
    bias_update_rate: Annotated[
        float, Meta(ge=0.0, description="Step of the selection bias per optimizer step.")
    ] = 0.0


class LatentAttention(Section, frozen=True):
    """DeepSeek's multi-head latent attention. `kv_rank = 0` is ordinary attention."""

    q_rank: Annotated[int, Meta(ge=0, description="Rank of the query compression; 0 = none.")] = 0
    kv_rank: Annotated[int, Meta(ge=0, description="Rank of the key/value compression; 0 = not latent.")] = 0
    nope_dim: Annotated[int, Meta(ge=0, description="Head width without rotary positions.")] = 0
    rope_dim: Annotated[int, Meta(ge=0, description="Head width with rotary positions.")] = 0
    value_dim: Annotated[int, Meta(ge=0, description="Head width of the values.")] = 0


class Model(Section, frozen=True):
    """The decoder. A preset or a Hugging Face model gives the sizes; single keys override them."""

    preset: Annotated[str, Meta(description="Name of a model preset (`fivefold config presets`).")] = ""
    path: Annotated[
        str,
        Meta(
            description="A Hugging Face model directory, whose weights training starts from, or a config.json: "
            "its sizes only."
        ),
    ] = ""
    layers: Annotated[int, Meta(ge=1, le=10000, description="Decoder layers.")] = 4
    hidden: Annotated[int, Meta(ge=1, description="Width of the residual stream.")] = 256
    heads: Annotated[int, Meta(ge=1, le=65536, description="Query heads.")] = 8
    kv_heads: Annotated[int, Meta(ge=0, description="Key/value heads; 0 = as many as query heads.")] = 0
    head_dim: Annotated[int, Meta(ge=0, description="Width of a head; 0 = hidden / heads.")] = 0
    ffn: Annotated[int, Meta(ge=0, description="Feed-forward width of a dense layer.")] = 688
    vocab: Annotated[int, Meta(ge=2, description="Vocabulary size, never padded outside the run.")] = 4096
    max_positions: Annotated[
        int, Meta(ge=1, description="Longest sequence; rows of a learned position table.")
    ] = 131072
    tied: Annotated[bool, Meta(description="The output head is the embedding table.")] = False
    activation: Annotated[
        Literal["swiglu", "gelu", "gelu_tanh"], Meta(description="Feed-forward nonlinearity.")
    ] = "swiglu"
    norm: Annotated[Literal["rmsnorm", "layernorm"], Meta(description="Normalisation.")] = "rmsnorm"
    norm_eps: Annotated[float, Meta(gt=0.0, description="Added to the variance in every norm.")] = 1e-5
    qkv_bias: Annotated[bool, Meta(description="Biases on the query, key and value projections.")] = False
    output_bias: Annotated[
        bool, Meta(description="Biases on the attention output and feed-forward projections.")
    ] = False
    qk_norm: Annotated[bool, Meta(description="RMSNorm on each head's queries and keys (Qwen3).")] = False
    embedding_norm: Annotated[bool, Meta(description="A norm right after the embedding (BLOOM).")] = False
    positions: Annotated[Literal["rotary", "learned", "alibi"], Meta(description="Position encoding.")] = (
        "rotary"
    )
    rope_theta: Annotated[float, Meta(gt=0.0, description="Base of the rotary frequencies.")] = 10000.0
    rope_scaling: Annotated[
        RopeScaling | None, Meta(description="Llama-3 frequency scaling; absent = none.")
    ] = None
    experts: Annotated[Experts, Meta(description="Mixture of experts.")] = Experts()
    latent: Annotated[LatentAttention, Meta(description="Latent attention.")] = LatentAttention()
    dropout: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="On embedding and residual branches, never on attention.")
    ] = 0.0
    init_std: Annotated[
        float, Meta(gt=0.0, description="Standard deviation of initial weights (GPT-2, Llama: 0.02).")
    ] = 0.02

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            force_setattr(self, "kv_heads", self.heads)
        if self.head_dim == 0:
            force_setattr(self, "head_dim", self.hidden // self.heads)
