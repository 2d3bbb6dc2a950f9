"""Mixture of experts (Shazeer et al. 2017; shared experts: DeepSeekMoE 2024). No token is ever dropped."""

import torch
from torch import Tensor, nn

from fivefold.config.tree import Model
from fivefold.nn.feed_forward import make_feed_forward, swiglu
from fivefold.nn.grouped import GroupedLinear, copied_in_order
from fivefold.nn.router import Choice, Router, Routing


class Experts(nn.Module):
    """The routed experts (SwiGLU), weighted by the router, and the shared ones that every token passes through."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        options = model.experts
        self.router = Router(model)
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", torch.zeros(options.count) if options.router_bias else None)
        self.gate = GroupedLinear(options.count, model.hidden, options.ffn)
        self.up = GroupedLinear(options.count, model.hidden, options.ffn)
        self.down = GroupedLinear(options.count, options.ffn, model.hidden)
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
        """`[tokens, hidden]` → the same: each token's rows are sorted by expert, computed, and put back."""
        tokens, top_k = choice.experts.shape
        by_expert = choice.experts.flatten().argsort(stable=True)
        counts = choice.routing.counts
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert), device=x.device)
        rows = copied_in_order(x, by_expert, back, top_k)
        rows = self.down(swiglu(self.gate(rows, counts), self.up(rows, counts)), counts)
        ordered = copied_in_order(rows, back, by_expert)
        weighted: Tensor = ordered.view(tokens, top_k, -1) * choice.weights.unsqueeze(-1)
        return weighted.sum(dim=1)
