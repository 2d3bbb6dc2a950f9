"""Token embedding and head, whole or sharded by vocabulary rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's contiguous vocabulary rows.

    Attributes:
        first: the first row.
        count: rows of this rank; may be 0.
        most: the most rows that any rank holds.
        vocab: rows of all ranks together.
        gather: gathers tensors of equal shape from all ranks into one `[ranks, ...]`; not differentiated.
    """

    first: int
    count: int
    most: int
    vocab: int
    gather: Callable[[Tensor], Tensor]

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers within this rank's shard (0 for rows of other ranks), and whether they are in it."""
        rows = tokens - self.first
        mine = (rows >= 0) & (rows < self.count)
        return rows.where(mine, 0), mine

    def check(self, weight: Tensor) -> None:
        """Raises ValueError for a matrix of other rows than this rank's."""
        if weight.shape[0] != self.count:
            raise ValueError(
                f"a matrix of {weight.shape[0]} vocabulary rows; expected rows {self.first} to "
                f"{self.first + self.count} of {self.vocab}, which this tensor-parallel rank holds"
            )


class Embedding(nn.Embedding):
    """Token embedding.

    Attributes:
        shard: the rows that this rank holds; None = all. The sum of the ranks' results is the embedding.
    """

    shard: VocabularyShard | None = None

    def forward(self, input: Tensor) -> Tensor:
        """`[batch, sequence]` → `[batch, sequence, hidden]`, zero where the row is another rank's."""
        if self.shard is None:
            return F.embedding(input, self.weight)
        self.shard.check(self.weight)
        if not self.shard.count:  # zeros with a gradient, so that backward reaches the weight
            return self.weight.new_zeros(*input.shape, self.weight.shape[1]) + self.weight.sum()
        rows, mine = self.shard.local(input)
        return F.embedding(rows, self.weight).masked_fill(~mine.unsqueeze(-1), 0.0)


def head_logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard | None) -> Tensor:
    """`[..., hidden]` → the whole vocabulary's logits, `[..., vocabulary]`; of a shard, without gradients."""
    if shard is None:
        return F.linear(hidden, weight)
    shard.check(weight)
    with torch.no_grad():
        mine = F.pad(F.linear(hidden, weight), (0, shard.most - shard.count))
        return torch.cat(list(shard.gather(mine)), dim=-1)[..., : shard.vocab]
