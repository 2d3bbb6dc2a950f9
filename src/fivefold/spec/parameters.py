"""Every parameter of a model: name, shape, role, layer, initial value.

The single source for counts, initial values, checkpoint shapes and stage costs; `nn` is tested equal to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

from fivefold.config.model import Model, Role


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the whole model, as if on one device.

    Attributes:
        name: global name; layers are numbered over the whole model.
        shape: `[out, in]` for matrices, `[experts, out, in]` for expert matrices.
        layer: the decoder layer, or None outside of them.
        std: standard deviation of the initial value; 0.0 starts at the constant `fill`.
        trained: False for values that the optimizer does not own (the router's selection bias).
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    std: float = 0.0
    fill: float = 0.0
    trained: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)


def parameters(model: Model) -> list[Parameter]:
    """All parameters of `model` in forward order. A tied head has none of its own."""
    found = [Parameter("embedding.weight", (model.vocab, model.hidden), "embedding", std=model.init_std)]
    if model.positions == "learned":
        shape = (model.max_positions, model.hidden)
        found.append(Parameter("positions.weight", shape, "embedding", std=model.init_std))
    if model.embedding_norm:
        found += _norm(model, "embedding_norm", None)
    for layer in range(model.layers):
        found += _layer(model, layer)
    found += _norm(model, "norm", None)
    if not model.tied:
        found.append(Parameter("head.weight", (model.vocab, model.hidden), "head", std=model.init_std))
    return found


def total(model: Model) -> int:
    """Trained parameters of the whole model."""
    return sum(parameter.numel for parameter in parameters(model) if parameter.trained)


def active(model: Model) -> int:
    """Trained parameters one token passes through: top_k / count of the routed experts; embeddings in."""
    experts = sum(parameter.numel for parameter in parameters(model) if _routed(parameter))
    return total(model) - (experts - experts * model.experts.top_k // max(model.experts.count, 1))


def _routed(parameter: Parameter) -> bool:
    return parameter.role == "expert" and len(parameter.shape) == 3


def _layer(model: Model, layer: int) -> Iterator[Parameter]:
    prefix = f"layers.{layer}"
    yield from _norm(model, f"{prefix}.attention_norm", layer)
    attention = _latent_attention if model.latent.kv_rank else _attention
    yield from attention(model, f"{prefix}.attention", layer)
    yield from _norm(model, f"{prefix}.feed_forward_norm", layer)
    if model.experts.count and layer >= model.experts.dense_layers:
        yield from _experts(model, f"{prefix}.experts", layer)
    else:
        yield from _feed_forward(model, f"{prefix}.feed_forward", model.ffn, "ffn", layer)


def _norm(model: Model, name: str, layer: int | None) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden,), "norm", layer, fill=1.0)
    if model.norm == "layernorm":
        yield Parameter(f"{name}.bias", (model.hidden,), "norm", layer)


def _linear(
    name: str, shape: tuple[int, ...], role: Role, layer: int, std: float, bias: bool = False
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", shape, role, layer, std=std)
    if bias:
        yield Parameter(f"{name}.bias", shape[:-1], "bias", layer)


def _residual_std(model: Model) -> float:
    """Projections that write to the residual stream start smaller (GPT-2, Radford et al. 2019, §2.3)."""
    return model.init_std / sqrt(2 * model.layers)


def _attention(model: Model, name: str, layer: int) -> Iterator[Parameter]:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for projection, width in (("query", queries), ("key", keys), ("value", keys)):
        shape = (width, model.hidden)
        yield from _linear(f"{name}.{projection}", shape, "attention", layer, model.init_std, model.qkv_bias)
    if model.qk_norm:
        yield Parameter(f"{name}.query_norm.weight", (model.head_dim,), "norm", layer, fill=1.0)
        yield Parameter(f"{name}.key_norm.weight", (model.head_dim,), "norm", layer, fill=1.0)
    shape = (model.hidden, queries)
    yield from _linear(f"{name}.output", shape, "attention", layer, _residual_std(model), model.output_bias)


def _latent_attention(model: Model, name: str, layer: int) -> Iterator[Parameter]:
    """DeepSeek-V2 (2024), eq. 9-19."""
    latent, std = model.latent, model.init_std
    queries = model.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        yield from _linear(f"{name}.query_down", (latent.q_rank, model.hidden), "attention", layer, std)
        yield Parameter(f"{name}.query_down_norm.weight", (latent.q_rank,), "norm", layer, fill=1.0)
        yield from _linear(f"{name}.query_up", (queries, latent.q_rank), "attention", layer, std)
    else:
        yield from _linear(f"{name}.query", (queries, model.hidden), "attention", layer, std)
    shape = (latent.kv_rank + latent.rope_dim, model.hidden)
    yield from _linear(f"{name}.kv_down", shape, "attention", layer, std)
    yield Parameter(f"{name}.kv_down_norm.weight", (latent.kv_rank,), "norm", layer, fill=1.0)
    shape = (model.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    yield from _linear(f"{name}.kv_up", shape, "attention", layer, std)
    shape = (model.hidden, model.heads * latent.value_dim)
    yield from _linear(f"{name}.output", shape, "attention", layer, _residual_std(model))


def _feed_forward(model: Model, name: str, width: int, role: Role, layer: int) -> Iterator[Parameter]:
    names = ("gate", "up") if model.activation == "swiglu" else ("up",)
    for projection in names:
        shape = (width, model.hidden)
        yield from _linear(f"{name}.{projection}", shape, role, layer, model.init_std, model.output_bias)
    shape = (model.hidden, width)
    yield from _linear(f"{name}.down", shape, role, layer, _residual_std(model), model.output_bias)


def _experts(model: Model, name: str, layer: int) -> Iterator[Parameter]:
    experts = model.experts
    yield from _linear(f"{name}.router", (experts.count, model.hidden), "router", layer, model.init_std)
    if experts.router_bias:
        yield Parameter(f"{name}.selection_bias", (experts.count,), "router", layer, trained=False)
    for projection in ("gate", "up"):
        shape = (experts.count, experts.ffn, model.hidden)
        yield from _linear(f"{name}.{projection}", shape, "expert", layer, model.init_std)
    shape = (experts.count, model.hidden, experts.ffn)
    yield from _linear(f"{name}.down", shape, "expert", layer, _residual_std(model))
    if experts.shared_ffn:
        yield from _feed_forward(model, f"{name}.shared", experts.shared_ffn, "ffn", layer)
    if experts.shared_gate:
        yield from _linear(f"{name}.shared_gate", (1, model.hidden), "ffn", layer, model.init_std)
