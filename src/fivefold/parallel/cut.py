"""How context parallel divides sequences: which tokens each rank of the group holds."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.nn.attention import Segments
from fivefold.spec.sequence import Kind, Span, most_tokens, spans


@dataclass(frozen=True, slots=True)
class Cut:
    """Sequences of `length` tokens divided over the ranks of a group; ranks are numbered within the group."""

    group: dist.ProcessGroup
    kind: Kind
    length: int

    @staticmethod
    def of_whole(group: dist.ProcessGroup, kind: Kind, query: Tensor, segments: Segments) -> "Cut | None":
        """The division of the sequences that `segments` describes; None if `query` `[batch, heads, tokens, head_dim]`
        has all their tokens (in generation every rank runs the whole text)."""
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
        """The next rank of the ring, to which this one sends."""
        return (self.rank + 1) % self.cp

    def earlier(self) -> list[int]:
        """The other ranks in the order in which their blocks arrive around the ring."""
        return [(self.rank - hop) % self.cp for hop in range(1, self.cp)]

    @property
    def most(self) -> int:
        """Tokens of the rank that has the most."""
        return most_tokens(self.length, self.cp)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of every sequence that a rank holds."""
        return spans(self.length, self.cp, rank, self.kind)

    def tokens(self, rank: int) -> int:
        """How many tokens of every sequence a rank holds."""
        return sum(stop - start for start, stop in self.spans(rank))

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's tokens out of `whole` `[batch, length]`."""
        return torch.cat([whole[:, start:stop] for start, stop in self.spans(rank)], dim=1)
