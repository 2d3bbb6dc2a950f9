"""Mixture of experts (Shazeer et al. 2017; shared experts: DeepSeekMoE 2024). No token is ever dropped."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fivefold.config.model import Model
from fivefold.nn.chain import Chain
from fivefold.nn.expert_swiglu import expert_swiglu
from fivefold.nn.feed_forward import make_feed_forward, swiglu
from fivefold.nn.grouped import GroupedLinear, copied_in_order, inverse, sorted_by_expert
from fivefold.nn.manual_backward import uses_manual_backward
from fivefold.nn.router import Choice, Router, Routing

Compute: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(rows `[rows, hidden]`, counts `[sources, experts]`) → the experts' results for these rows. Rows are ordered by
source rank, then by expert; counts say how many rows of each source each expert has."""


def here(compute: Compute, rows: Tensor, counts: Tensor) -> Tensor:
    """Without expert parallel: computes the rows of all experts on this rank."""
    return compute(rows, counts.unsqueeze(0))


class Experts(nn.Module):
    """The routed experts (SwiGLU), weighted by the router, and the shared experts that every token passes through.

    `exchange` sends rows to the ranks of their experts and the results back.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        options = model.experts
        self.router = Router(model)
        self.exchange: Callable[[Compute, Tensor, Tensor], Tensor] = here
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", torch.zeros(options.count) if options.router_bias else None)
        self.gate = GroupedLinear(options.count, model.hidden, options.ffn)
        self.up = GroupedLinear(options.count, model.hidden, options.ffn)
        self.down = GroupedLinear(options.count, options.ffn, model.hidden)
        self.activated = Chain(swiglu, rows_vary=True)
        self.shared = make_feed_forward(model, options.shared_ffn) if options.shared_ffn else None
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if options.shared_gate else None

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """`x` and the first result: `[batch, sequence, hidden]`."""
        choice = self.router.choose(x, self.selection_bias)
        out = self._routed(x.flatten(0, 1), choice).view_as(x)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)
        return out, choice.routing

    def _routed(self, x: Tensor, choice: Choice) -> Tensor:
        """`[tokens, hidden]` → `[tokens, hidden]`: rows are sorted by expert, computed, put back and weighted."""
        tokens, top_k = choice.experts.shape
        by_expert = choice.experts.flatten().argsort(stable=True)
        counts = choice.routing.counts
        back = inverse(by_expert)
        rows = copied_in_order(x, by_expert, back, top_k)
        rows = copied_in_order(self.exchange(self._compute, rows, counts), back, by_expert)
        weighted: Tensor = rows.view(tokens, top_k, x.shape[1]) * choice.weights.unsqueeze(-1)
        return weighted.sum(dim=1)

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """As `Compute`, for the experts that this rank has."""
        if uses_manual_backward(rows):
            weights = self.gate.weight, self.up.weight, self.down.weight
            return expert_swiglu(rows, *weights, counts.flatten().tolist())
        if len(counts) == 1:
            return self._projected(rows, counts[0])
        order, back = sorted_by_expert(counts)
        results = self._projected(copied_in_order(rows, order, back), counts.sum(0))
        return copied_in_order(results, back, order)

    def _projected(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.down(self.activated(self.gate(rows, counts), self.up(rows, counts)), counts)  # type: ignore[no-any-return]
