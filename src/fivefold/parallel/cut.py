"""How sequences are cut over the ranks of a context-parallel group."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.nn.attention import Segments
from fivefold.spec.sequence import Kind, Span, most_tokens, spans


@dataclass(frozen=True, slots=True)
class Cut:
    """How sequences of `length` tokens lie on the ranks of a group. Ranks are those within the group."""

    group: dist.ProcessGroup
    kind: Kind
    length: int

    @staticmethod
    def of_whole(group: dist.ProcessGroup, kind: Kind, query: Tensor, segments: Segments) -> "Cut | None":
        """How the sequences that `segments` tells of are cut; None where `query` `[batch, heads, tokens, head_dim]`
        holds all of them (generation: every rank runs the whole text)."""
        batch, _, tokens, _ = query.shape
        length = sum(segments.lengths) // batch
        return Cut(group, kind, length) if tokens < length else None

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
