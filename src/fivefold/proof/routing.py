"""Top-k routing of one run repeated in another: below float64 a rounding may turn a choice over, and everything after
it with it. So a layout is compared with the reference's choices, and what it would have chosen is told.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fivefold.nn.decoder import Decoder
from fivefold.nn.inputs import Inputs
from fivefold.nn.router import Router, highest

Choices = dict[tuple[int, str], Tensor]
"""By step and layer, `[rows of the global batch, sequence, top_k]`; -1 where no rank has been asked yet."""


@dataclass(slots=True)
class Flips:
    """Choices that would have been others.

    Attributes:
        choices: made, one for each of a token's experts.
        margins: of those that fell on another expert, how far the score of the expert used lay below that of the
            expert that would have been chosen.
    """

    choices: int = 0
    margins: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.margins:
            return f"none of {self.choices:,} routing choices would have been another"
        return (
            f"{len(self.margins):,} of {self.choices:,} routing choices would have been others, by at most "
            f"{max(self.margins):.1e} of a score"
        )


class Routings:
    """Watches the routers of a decoder: keeps their choices, or puts others in their place.

    Attributes:
        step: of the run; the caller counts.
        kept: choices made.
        flips: choices turned over by `replayed`.
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
        self._place: tuple[Tensor, Tensor] | None = None
        decoder.register_forward_pre_hook(self._note_place)
        for index, layer in decoder.layers.items():
            for module in layer.modules():
                if isinstance(module, Router):
                    module.pick = self._pick(index)

    def _note_place(self, _module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs = arguments[0]
        assert isinstance(inputs, Inputs)
        self._place = inputs.row_numbers().unsqueeze(1), inputs.row_positions()

    def _pick(self, layer: str) -> Callable[[Tensor, int], Tensor]:
        def pick(wanted: Tensor, count: int) -> Tensor:
            own = highest(wanted, count)
            assert self._place is not None
            key = self.step, layer
            if self._replayed is not None:
                used = self._replayed[key][self._place]
                self._compare(wanted.detach(), own, used)
                return used
            if key not in self.kept:
                self.kept[key] = torch.full((*self._shape, count), -1)
            self.kept[key][self._place] = own
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
