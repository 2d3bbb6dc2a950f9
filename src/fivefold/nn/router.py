"""The router: which experts each token is sent to, with which weights, and the load-balancing loss."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fivefold.config.model import Experts, Model


class Routing(NamedTuple):
    """Statistics of a layer's router in a micro-batch.

    Attributes:
        imbalance: the load-balancing loss summed over the sequences, a scalar (see `imbalance`); 0 if not needed.
        counts: `[experts]`, int64, how often each expert was chosen.
    """

    imbalance: Tensor
    counts: Tensor


class Choice(NamedTuple):
    """The router's decision for each token.

    Attributes:
        experts: `[tokens, top_k]`, int64, the chosen experts.
        weights: `[tokens, top_k]`, the weights of their outputs.
        routing: statistics over the tokens.
    """

    experts: Tensor
    weights: Tensor
    routing: Routing


class Router(nn.Linear):
    """Scores of all experts, in at least float32; the top_k highest are chosen.

    A selection bias affects the choice only, not the weights (DeepSeek-V3 2024, §2.1.2).

    `sum_choices` sums the counts of each expert's choices per sequence, `[batch, experts]`, over the context-parallel
    ranks; it is called only if there is an auxiliary loss. `pick` selects experts by their scores.
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
    """The scores with −∞ outside each token's best groups (DeepSeek-V3 2024, §2.1.2).

    A group's score is the sum of its highest top_k / top_groups scores.

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
    """The load-balancing loss Σ_i f_i · P_i of each sequence, summed over the sequences; 1 per sequence if all experts
    are used equally.

    f_i is the share of the sequence's choices that expert i received, times the number of experts; P_i is the mean
    over the tokens of the score of i, with scores normalised to sum to one (DeepSeek-V3 2024, eq. 17-20). It is
    linear in the scores: context-parallel ranks each compute the part of their tokens, and parts and gradients sum to
    the whole.

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
