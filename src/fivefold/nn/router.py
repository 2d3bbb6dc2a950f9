"""Which experts a token goes to, with which weights, and how unbalanced that is."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fivefold.config.model import Experts, Model


class Routing(NamedTuple):
    """What a layer's router did in a micro-batch.

    Attributes:
        imbalance: a scalar, summed over the sequences: see `imbalance`; 0 where it costs nothing.
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

    `sum_choices` adds up how often each expert was chosen in each sequence, `[batch, experts]`, over the ranks that
    hold parts of these sequences; asked only where there is an auxiliary loss. `pick` chooses by the scores.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model.hidden, model.experts.count, bias=False)
        self.options = model.experts
        self.sum_choices: Callable[[Tensor], Tensor] = unchanged
        self.pick: Callable[[Tensor, int], Tensor] = highest

    def choose(self, x: Tensor, selection_bias: Tensor | None = None) -> Choice:
        """`x`: `[batch, sequence, hidden]`; `selection_bias`: `[experts]`."""
        options = self.options
        logits = self(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(dim=-1) if options.router == "softmax" else logits.sigmoid()
        wanted = scores if selection_bias is None else scores + selection_bias
        if options.groups > 1:
            wanted = limited(wanted, options)
        experts = self.pick(wanted, options.top_k)
        weights = scores.gather(-1, experts)
        if options.normalize_top_k:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = (weights * options.scale).to(x.dtype)
        counts = torch.bincount(experts.flatten(), minlength=options.count)
        counted = options.auxiliary_loss > 0 and torch.is_grad_enabled()
        unbalanced = imbalance(scores, experts, self.sum_choices) if counted else scores.new_zeros(())
        routing = Routing(unbalanced, counts)
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


def highest(wanted: Tensor, count: int) -> Tensor:
    """The `count` experts of highest score, `[..., experts]` → `[..., count]`."""
    return wanted.topk(count, dim=-1).indices


def unchanged(choices: Tensor) -> Tensor:
    """The sum of choices on the one rank that holds whole sequences."""
    return choices


def imbalance(scores: Tensor, experts: Tensor, sum_choices: Callable[[Tensor], Tensor] = unchanged) -> Tensor:
    """Σ_i f_i · P_i of each sequence, summed over the sequences; 1 a sequence where all experts are used alike.

    f_i is the share of the sequence's choices that fell on expert i, times the number of experts; P_i is the
    mean over its tokens of the score of i, scores normalised to sum to one (DeepSeek-V3 2024, eq. 17-20).
    It is linear in the scores: where ranks hold parts of the sequences, each has the part of its tokens, and these
    add up to the whole, and so do their gradients.

    Args:
        scores: `[batch, tokens, experts]`.
        experts: `[batch, tokens, top_k]`, the chosen ones.
        sum_choices: see `Router`.
    """
    batch, _, count = scores.shape
    chosen = experts.flatten(1)  # [batch, tokens · top_k]
    choices = sum_choices(
        scores.new_zeros(batch, count).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=scores.dtype))
    )
    everything = choices.sum(dim=1, keepdim=True)  # tokens of the whole sequence · top_k
    share = choices * (count / everything)
    probability = (scores / scores.sum(dim=-1, keepdim=True)).sum(dim=1) * (experts.shape[2] / everything)
    return (share * probability).sum()


def balanced(selection_bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias after one step: up by `rate` for experts chosen less than the mean, down for those chosen more."""
    return selection_bias + rate * (counts.mean() - counts).sign().to(selection_bias.dtype)
