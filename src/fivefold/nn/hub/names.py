"""Where each family's published files keep each parameter: names, orientation, what is fused, what is split."""

import re
from dataclasses import dataclass

from fivefold.spec.parameters import Parameter


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a published file that holds a parameter, or one expert's part of it.

    Attributes:
        name: in the file; in a table without ".weight" or ".bias", and with {layer} and {expert} to fill in.
        transposed: a matrix is kept as `[in, out]`.
        part, parts: it is this one of so many equal parts of the tensor's output rows.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1


_OUTSIDE = {
    "embedding": Place("model.embed_tokens"),
    "norm": Place("model.norm"),
    "head": Place("lm_head"),
}
_LAYER = {
    "attention_norm": Place("model.layers.{layer}.input_layernorm"),
    "attention.query": Place("model.layers.{layer}.self_attn.q_proj"),
    "attention.key": Place("model.layers.{layer}.self_attn.k_proj"),
    "attention.value": Place("model.layers.{layer}.self_attn.v_proj"),
    "attention.query_norm": Place("model.layers.{layer}.self_attn.q_norm"),
    "attention.key_norm": Place("model.layers.{layer}.self_attn.k_norm"),
    "attention.output": Place("model.layers.{layer}.self_attn.o_proj"),
    "feed_forward_norm": Place("model.layers.{layer}.post_attention_layernorm"),
}
_DENSE = {
    "feed_forward.gate": Place("model.layers.{layer}.mlp.gate_proj"),
    "feed_forward.up": Place("model.layers.{layer}.mlp.up_proj"),
    "feed_forward.down": Place("model.layers.{layer}.mlp.down_proj"),
}
_LLAMA = _OUTSIDE | _LAYER | _DENSE
_MIXTRAL = {
    "experts.router": Place("model.layers.{layer}.block_sparse_moe.gate"),
    "experts.gate": Place("model.layers.{layer}.block_sparse_moe.experts.{expert}.w1"),
    "experts.up": Place("model.layers.{layer}.block_sparse_moe.experts.{expert}.w3"),
    "experts.down": Place("model.layers.{layer}.block_sparse_moe.experts.{expert}.w2"),
}
_QWEN3_EXPERTS = {
    "experts.router": Place("model.layers.{layer}.mlp.gate"),
    "experts.gate": Place("model.layers.{layer}.mlp.experts.{expert}.gate_proj"),
    "experts.up": Place("model.layers.{layer}.mlp.experts.{expert}.up_proj"),
    "experts.down": Place("model.layers.{layer}.mlp.experts.{expert}.down_proj"),
}
_GPT2 = {
    "embedding": Place("transformer.wte"),
    "positions": Place("transformer.wpe"),
    "attention_norm": Place("transformer.h.{layer}.ln_1"),
    "attention.query": Place("transformer.h.{layer}.attn.c_attn", transposed=True, part=0, parts=3),
    "attention.key": Place("transformer.h.{layer}.attn.c_attn", transposed=True, part=1, parts=3),
    "attention.value": Place("transformer.h.{layer}.attn.c_attn", transposed=True, part=2, parts=3),
    "attention.output": Place("transformer.h.{layer}.attn.c_proj", transposed=True),
    "feed_forward_norm": Place("transformer.h.{layer}.ln_2"),
    "feed_forward.up": Place("transformer.h.{layer}.mlp.c_fc", transposed=True),
    "feed_forward.down": Place("transformer.h.{layer}.mlp.c_proj", transposed=True),
    "norm": Place("transformer.ln_f"),
    "head": Place("lm_head"),
}

TABLES: dict[str, dict[str, Place]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _OUTSIDE | _LAYER | _MIXTRAL,
    "qwen3_moe": _OUTSIDE | _LAYER | _DENSE | _QWEN3_EXPERTS,
    "gpt2": _GPT2,
}

NO_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names that old files hold and that are no parameters: frequencies and causal masks."""


def places(model_type: str, parameter: Parameter) -> list[Place]:
    """The tensors that hold `parameter`: one, or one an expert where experts are kept apart."""
    module, _, kind = re.sub(r"^layers\.\d+\.", "", parameter.name).rpartition(".")
    place = TABLES[model_type][module]
    count = parameter.shape[0] if "{expert}" in place.name else 1
    return [
        Place(
            f"{place.name}.{kind}".format(layer=parameter.layer, expert=expert),
            place.transposed and kind == "weight",
            place.part,
            place.parts,
        )
        for expert in range(count)
    ]
