"""How sequences are cut over the ranks of a context-parallel group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.nn.attention import Segments
from fivefold.spec.sequence import Kind, Span, most_tokens, spans

Core: TypeAlias = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
"""An attention core, as `nn.attention.causal_attention`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How sequences of `length` tokens lie on the ranks of a group. Ranks are those within the group."""

    group: dist.ProcessGroup
    kind: Kind
    length: int

    @property
    def cp(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def next(self) -> int:
        """The rank that this one sends to."""
        return (self.rank + 1) % self.cp

    def earlier(self) -> list[int]:
        """The other ranks in the order in which their blocks come by."""
        return [(self.rank - hop) % self.cp for hop in range(1, self.cp)]

    @property
    def most(self) -> int:
        """Tokens of the fullest rank."""
        return most_tokens(self.length, self.cp)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What a rank of the group holds."""
        return spans(self.length, self.cp, rank, self.kind)

    def tokens(self, rank: int) -> int:
        """How much that is."""
        return sum(stop - start for start, stop in self.spans(rank))

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's part of `whole` `[batch, length]`."""
        return torch.cat([whole[:, start:stop] for start, stop in self.spans(rank)], dim=1)
