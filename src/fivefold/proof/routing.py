"""Records the top-k routing of one run and replays it in another. Below float64, rounding may change a router's choice,
and with it everything that follows: so layouts are compared under the reference's routing, and the choices that they
would have made differently are reported.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fivefold.nn.decoder import Decoder
from fivefold.nn.inputs import Inputs
from fivefold.nn.router import Router, highest

Choices = dict[tuple[int, str], Tensor]
"""By (step, layer): `[rows of the global batch, sequence, top_k]`; -1 where nothing is recorded yet."""
_Place = tuple[Tensor, Tensor]
"""The rows `[batch, 1]` and positions `[sequence]` of a micro-batch."""


@dataclass(slots=True)
class Flips:
    """Routing choices that would have been different.

    Attributes:
        choices: all choices made, top_k per token.
        margins: for each different choice, by how much the score of the replayed expert is below that of the expert
            that would have been chosen.
    """

    choices: int = 0
    margins: list[float] = field(default_factory=list)

    def add(self, other: "Flips") -> None:
        """Adds those of another rank."""
        self.choices += other.choices
        self.margins += other.margins

    def __str__(self) -> str:
        if not self.margins:
            return f"none of {self.choices:,} routing choices would have been another"
        return (
            f"{len(self.margins):,} of {self.choices:,} routing choices would have been others, by at most "
            f"{max(self.margins):.1e} of a score"
        )


class Routings:
    """Records the choices of a decoder's routers, or replaces them by `replayed`.

    Attributes:
        step: the current step; advanced by `next_step`.
        kept: recorded choices.
        flips: choices that `replayed` has changed.
    """

    def __init__(self, decoder: Decoder, rows: int, sequence: int, replayed: Choices | None = None) -> None:
        """
        Args:
            rows, sequence: of the global batch.
            replayed: choices to make instead; None = the router's own.
        """
        self.step = 0
        self.kept: Choices = {}
        self.flips = Flips()
        self._shape = rows, sequence
        self._replayed = replayed
        self._place: _Place | None = None
        self._ahead: dict[str, deque[_Place]] = {}
        decoder.register_forward_pre_hook(self._begin)
        decoder.register_forward_hook(self._end)
        for index, layer in decoder.layers.items():
            for module in layer.modules():
                if isinstance(module, Router):
                    module.pick = self._pick(index)

    def next_step(self) -> None:
        """Between two steps."""
        self.step += 1
        self._ahead.clear()

    def _begin(self, _module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs = arguments[0]
        assert isinstance(inputs, Inputs)
        self._place = inputs.row_numbers().unsqueeze(1), inputs.row_positions()

    def _end(self, _module: torch.nn.Module, _arguments: tuple[Any, ...], _output: Tensor) -> None:
        self._place = None

    def _pick(self, layer: str) -> Callable[[Tensor, int], Tensor]:
        """Replaces a router's `pick`. Recomputation in backward calls it again while other micro-batches are in flight;
        it meets them in the order of their forwards."""

        def pick(wanted: Tensor, count: int) -> Tensor:
            own = highest(wanted, count)
            is_forward, key = self._place is not None, (self.step, layer)
            places = self._ahead.setdefault(layer, deque())
            place = self._place or places.popleft()
            if is_forward:
                places.append(place)
            if self._replayed is not None:
                used = self._replayed[key][place].to(own.device)
                if is_forward:
                    self._compare(wanted.detach(), own, used)
                return used
            if key not in self.kept:
                self.kept[key] = torch.full((*self._shape, count), -1)
            self.kept[key][place] = own
            return own

        return pick

    def _compare(self, wanted: Tensor, own: Tensor, used: Tensor) -> None:
        self.flips.choices += own.numel()
        lost = _scores_of_others(wanted, own, used)  # chosen by itself and not used
        taken = _scores_of_others(wanted, used, own)  # used and not chosen by itself
        self.flips.margins += (lost - taken).tolist()


def _scores_of_others(wanted: Tensor, experts: Tensor, others: Tensor) -> Tensor:
    """Scores of those `experts` that are not among `others`, token by token, lowest first."""
    apart = ~(experts.unsqueeze(-1) == others.unsqueeze(-2)).any(dim=-1)
    placed = wanted.gather(-1, experts).masked_fill(~apart, float("inf"))
    scores = placed.sort(dim=-1).values
    return scores[scores < float("inf")]
