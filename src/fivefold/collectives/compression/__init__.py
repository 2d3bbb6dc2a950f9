"""Compressed sums of gradients over data-parallel ranks, for links that are slower than the compression.

Every method keeps, per parameter, what it did not send, and adds it to the next gradient (error feedback), so that at
every step, for every parameter,

    Σ over steps of what was applied + Σ over ranks of what they keep = Σ over steps and ranks of the true gradients.

A skipped step (an overflow) must not change this balance: what `reduce` wants to keep becomes effective only when
`settle` confirms that the step was applied.
"""

from typing import Protocol

import torch
import torch.distributed as dist

from fivefold.collectives.compression.flat import Parts
from fivefold.collectives.compression.powersgd import PowerSGD
from fivefold.collectives.compression.quantised import HalfCodec, Int8Codec, Quantised
from fivefold.collectives.compression.sparse import Sparse
from fivefold.collectives.compression.state import Memory
from fivefold.ledger.compression import Compression


class Compressor(Protocol):
    """Sums buckets of gradients over a group; `memory` is its state."""

    memory: Memory

    def prepare(self, parts: Parts) -> None:
        """Makes the state of parameters of these shapes: nothing kept yet."""

    def reduce(self, parts: Parts, group: dist.ProcessGroup) -> None:
        """Sums the tensors over the group, in place. Collective."""


def compressor(how: Compression, momentum: float = 0.0, seed: int = 0) -> Compressor | None:
    """The compressor of that method; None for "none".

    Args:
        momentum: of the optimizer, which then must have none itself; used by topk and threshold.
        seed: PowerSGD's first factors follow from it.
    """
    match how.method:
        case "bf16":
            return Quantised(HalfCodec(torch.bfloat16))
        case "fp16":
            return Quantised(HalfCodec(torch.float16))
        case "int8":
            return Quantised(Int8Codec())
        case "topk":
            return Sparse(how.density, momentum)
        case "threshold":
            return Sparse(how.density, momentum, how.threshold)
        case "powersgd":
            return PowerSGD(how.rank, seed)
        case _:
            return None
