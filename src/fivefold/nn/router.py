"""Which experts a token goes to, with which weights, and how unbalanced that is."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fivefold.config.tree import Experts, Model


class Routing(NamedTuple):
    """What a layer's router did in a micro-batch.

    Attributes:
        imbalance: a scalar, summed over the sequences: see `imbalance`.
        counts: `[experts]`, int64, choices that fell on each expert.
    """

    imbalance: Tensor
    counts: Tensor


class Choice(NamedTuple):
    """What the router decides.

    Attributes:
        experts: `[tokens, top_k]`, int64, the chosen experts.
        weights: `[tokens, top_k]`, of their outputs.
        routing: the sums of it.
    """

    experts: Tensor
    weights: Tensor
    routing: Routing


class Router(nn.Linear):
    """Scores of all experts, in at least float32; the top_k highest are chosen.

    A selection bias is added for the choice and for nothing else (DeepSeek-V3 2024, §2.1.2).
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model.hidden, model.experts.count, bias=False)
        self.options = model.experts

    def choose(self, x: Tensor, selection_bias: Tensor | None = None) -> Choice:
        """`x`: `[batch, sequence, hidden]`; `selection_bias`: `[experts]`."""
        options = self.options
        logits = self(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(dim=-1) if options.router == "softmax" else logits.sigmoid()
        wanted = scores if selection_bias is None else scores + selection_bias
        if options.groups > 1:
            wanted = limited(wanted, options)
        experts = wanted.topk(options.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if options.normalize_top_k:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = (weights * options.scale).to(x.dtype)
        counts = torch.bincount(experts.flatten(), minlength=options.count)
        routing = Routing(imbalance(scores, experts), counts)
        return Choice(experts.flatten(0, 1), weights.flatten(0, 1), routing)


def limited(wanted: Tensor, options: Experts) -> Tensor:
    """The scores, −∞ outside of each token's best groups (DeepSeek-V3 2024, §2.1.2).

    A group counts for the sum of its highest top_k / top_groups scores.

    Args:
        wanted: `[..., experts]`, neighbouring experts in a group.
    """
    grouped = wanted.view(*wanted.shape[:-1], options.groups, -1)
    each = max(1, options.top_k // options.top_groups)
    best = grouped.topk(each, dim=-1).values.sum(dim=-1).topk(options.top_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view(wanted.shape)


def imbalance(scores: Tensor, experts: Tensor) -> Tensor:
    """Σ_i f_i · P_i of each sequence, summed over the sequences; 1 a sequence where all experts are used alike.

    f_i is the share of the sequence's choices that fell on expert i, times the number of experts; P_i is the
    mean over its tokens of the score of i, scores normalised to sum to one (DeepSeek-V3 2024, eq. 17-20).

    Args:
        scores: `[batch, sequence, experts]`.
        experts: `[batch, sequence, top_k]`, the chosen ones.
    """
    batch, _, count = scores.shape
    chosen = experts.flatten(1)  # [batch, sequence · top_k]
    chosen_counts = scores.new_zeros(batch, count).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=scores.dtype)
    )
    share = chosen_counts * (count / chosen.shape[1])
    probability = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=1)
    return (share * probability).sum()


def balanced(selection_bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias after one step: up by `rate` for experts chosen less than the mean, down for those chosen more."""
    return selection_bias + rate * (counts.mean() - counts).sign().to(selection_bias.dtype)
