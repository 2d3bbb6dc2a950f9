"""Decoder layers that nn does not have yet, written out of the parameter list: latent attention and ALiBi."""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.model import Model
from fivefold.spec.parameters import parameters

Weights = dict[str, Tensor]


def layer_weights(model: Model) -> Weights:
    """The first layer's parameters, by their names within it."""
    prefix = "layers.0."
    return {
        parameter.name.removeprefix(prefix): torch.randn(parameter.shape, requires_grad=True)
        for parameter in parameters(model)
        if parameter.layer == 0
    }


def latent_attention(model: Model, weights: Weights, x: Tensor) -> Tensor:
    """DeepSeek-V2 (2024), eq. 9-19; `x` and the result: `[batch, sequence, hidden]`."""
    latent, shape = model.latent, (*x.shape[:2], model.heads, -1)
    if latent.q_rank:
        query = F.linear(_linear(weights, "query_down", x), weights["attention.query_up.weight"])
    else:
        query = _linear(weights, "query", x)
    compressed, rotary_key = _linear(weights, "kv_down", x).split([latent.kv_rank, latent.rope_dim], dim=-1)
    keys = _linear(weights, "kv_up", compressed).view(shape)
    key, value = keys.split([latent.nope_dim, latent.value_dim], dim=-1)
    key = torch.cat((key, rotary_key.unsqueeze(2).expand(-1, -1, model.heads, -1)), dim=-1)
    return _linear(weights, "output", _attend(query.view(shape), key, value, 0.0))


def alibi_attention(model: Model, weights: Weights, x: Tensor) -> Tensor:
    """Press 2022: each head's scores fall with distance at the head's own slope."""
    shape = (*x.shape[:2], model.heads, -1)
    query, key, value = (_linear(weights, name, x).view(shape) for name in ("query", "key", "value"))
    slopes = 2.0 ** (-8 * torch.arange(1, model.heads + 1) / model.heads)
    places = torch.arange(x.shape[1])
    bias = slopes.view(-1, 1, 1) * (places - places.unsqueeze(1))
    return _linear(weights, "output", _attend(query, key, value, bias))


def feed_forward(weights: Weights, x: Tensor) -> Tensor:
    """The dense feed-forward, gated if it has a gate."""
    inner = F.linear(x, weights["feed_forward.up.weight"])
    if "feed_forward.gate.weight" in weights:
        inner = F.silu(F.linear(x, weights["feed_forward.gate.weight"])) * inner
    else:
        inner = F.gelu(inner)
    return F.linear(inner, weights["feed_forward.down.weight"])


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"attention.{name}.weight"])


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | float) -> Tensor:
    """`[batch, sequence, heads, width]` → `[batch, sequence, heads · value width]`, all scores computed."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = query @ key.transpose(2, 3) / sqrt(query.shape[-1]) + bias
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (probabilities @ value).transpose(1, 2).flatten(2)
