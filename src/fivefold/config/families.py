"""Model families as Hugging Face's config.json describes them: which of its keys say what ours say.

Defaults are those of the configuration classes of `transformers`: a config.json may leave them out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Table = dict[str, Any]
REQUIRED = object()
"""The default of a key that must be there."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of ours ("experts.count") and theirs.

    Attributes:
        theirs: the name written, then older ones that are read, too.
        default: what an absent or null key means, or how it follows from the sizes the file gives.
        values: their values that mean something here, and what; the first one of a meaning is written.
    """

    ours: str
    theirs: tuple[str, ...]
    default: Any | Callable[[Table], Any] = REQUIRED
    values: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        implied: keys of ours that the family itself decides.
        accepted: keys of theirs that change the mathematics, and the values of them that the decoder computes.
        alike: pairs of their switches of which the decoder computes both or neither.
        rope_theta: base of the rotary frequencies where the file does not say; 0 = not rotary.
        rope_types: kinds of frequency scaling that are understood (yarn: planned with, as if there were none).
    """

    architecture: str
    keys: tuple[Key, ...]
    implied: Table = field(default_factory=dict)
    accepted: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    alike: tuple[tuple[str, str], ...] = ()
    rope_theta: float = 10000.0
    rope_types: tuple[str, ...] = ("default", "llama3")


_SIZES = (
    Key("layers", ("num_hidden_layers",)),
    Key("hidden", ("hidden_size",)),
    Key("heads", ("num_attention_heads",)),
    Key("vocab", ("vocab_size",)),
    Key("max_positions", ("max_position_embeddings",)),
    Key("norm_eps", ("rms_norm_eps",), 1e-6),
    Key("tied", ("tie_word_embeddings",), False),
    Key("init_std", ("initializer_range",), 0.02),
)
_KV_HEADS = Key("kv_heads", ("num_key_value_heads",), 0)
_HEAD_DIM = Key("head_dim", ("head_dim",), 0)
_FFN = Key("ffn", ("intermediate_size",))
_LLAMA = (*_SIZES, _KV_HEADS, _HEAD_DIM, _FFN)
_TOP_K = Key("experts.top_k", ("num_experts_per_tok",))
_AUXILIARY_LOSS = Key("experts.auxiliary_loss", ("router_aux_loss_coef",), 0.001)
_PLAIN = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}
_FULL_ATTENTION = {"use_sliding_window": (False,)}
_GPT2_BIASES = {"norm": "layernorm", "qkv_bias": True, "output_bias": True}


def _four_times(*names: str) -> Callable[[Table], Any]:
    """Four times the size that the first of the names has which is there."""
    return lambda theirs: 4 * theirs[next((name for name in names if name in theirs), names[0])]


FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        (
            *_LLAMA,
            Key("qkv_bias", ("attention_bias",), False),
            Key("output_bias", ("mlp_bias",), False),
        ),
        accepted={"hidden_act": ("silu",)},
        alike=(("attention_bias", "mlp_bias"),),  # attention_bias: of its output projection, too
    ),
    "mistral": Family("MistralForCausalLM", _LLAMA, accepted=_PLAIN | {"sliding_window": (None,)}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _LLAMA,
        implied={"qkv_bias": True},
        accepted={"hidden_act": ("silu",)} | _FULL_ATTENTION,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        (*_SIZES, _KV_HEADS, Key("head_dim", ("head_dim",), 128), _FFN),
        implied={"qk_norm": True},
        accepted=_PLAIN | _FULL_ATTENTION,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (
            *_SIZES,
            _KV_HEADS,
            _HEAD_DIM,
            Key("experts.count", ("num_local_experts", "num_experts")),
            Key("experts.ffn", ("intermediate_size",)),
            _TOP_K,
            _AUXILIARY_LOSS,
        ),
        accepted=_PLAIN | {"sliding_window": (None,)},
        rope_theta=1e6,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (
            *_SIZES,
            _KV_HEADS,
            _HEAD_DIM,
            _FFN,
            Key("experts.count", ("num_experts", "num_local_experts")),
            Key("experts.ffn", ("moe_intermediate_size",)),
            _TOP_K,
            Key("experts.normalize_top_k", ("norm_topk_prob",), False),
            _AUXILIARY_LOSS,
        ),
        implied={"qk_norm": True},
        accepted=_PLAIN | _FULL_ATTENTION | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        (
            Key("layers", ("n_layer",)),
            Key("hidden", ("n_embd",)),
            Key("heads", ("n_head",)),
            Key("ffn", ("n_inner",), _four_times("n_embd")),
            Key("vocab", ("vocab_size",)),
            Key("max_positions", ("n_positions", "n_ctx"), 1024),
            Key(
                "activation",
                ("activation_function",),
                "gelu_tanh",
                {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
            ),
            Key("norm_eps", ("layer_norm_epsilon",), 1e-5),
            Key("tied", ("tie_word_embeddings",), True),
            Key("init_std", ("initializer_range",), 0.02),
        ),
        implied=_GPT2_BIASES | {"positions": "learned"},
        accepted={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        rope_theta=0.0,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        (
            Key("layers", ("n_layer", "num_hidden_layers")),
            Key("hidden", ("hidden_size", "n_embed")),
            Key("heads", ("n_head", "num_attention_heads")),
            Key(
                "ffn",
                ("ffn_hidden_size",),
                _four_times("hidden_size", "n_embed"),
            ),
            Key("vocab", ("vocab_size",)),
            Key("max_positions", ("seq_length",), 2048),
            Key("norm_eps", ("layer_norm_epsilon",), 1e-5),
            Key("tied", ("tie_word_embeddings",), True),
            Key("init_std", ("initializer_range",), 0.02),
        ),
        implied=_GPT2_BIASES | {"activation": "gelu_tanh", "positions": "alibi", "embedding_norm": True},
        accepted={"apply_residual_connection_post_layernorm": (False,)},
        rope_theta=0.0,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (
            *_SIZES,
            _FFN,
            Key("latent.q_rank", ("q_lora_rank",), 0),
            Key("latent.kv_rank", ("kv_lora_rank",)),
            Key("latent.nope_dim", ("qk_nope_head_dim",)),
            Key("latent.rope_dim", ("qk_rope_head_dim",)),
            Key("latent.value_dim", ("v_head_dim",)),
            Key("experts.count", ("n_routed_experts",)),
            _TOP_K,
            Key("experts.ffn", ("moe_intermediate_size",)),
            Key(
                "experts.shared_ffn",
                ("shared_expert_intermediate_size",),
                lambda theirs: theirs["n_shared_experts"] * theirs["moe_intermediate_size"],
            ),
            Key("experts.dense_layers", ("first_k_dense_replace",), 0),
            Key("experts.normalize_top_k", ("norm_topk_prob",), True),
            Key("experts.scale", ("routed_scaling_factor",), 1.0),
            Key("experts.groups", ("n_group",), 1),
            Key("experts.top_groups", ("topk_group",), 1),
            Key("experts.auxiliary_loss", ("aux_loss_alpha",), 0.0001),
        ),
        implied={"experts.router": "sigmoid", "experts.router_bias": True},
        accepted=_PLAIN | {"moe_layer_freq": (1,)},
        rope_types=("default", "llama3", "yarn"),
    ),
}
