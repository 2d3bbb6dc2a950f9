"""Quantised sums: every rank receives its share of all ranks' quantised gradients, adds them in full precision, and
sends the sum quantised to all. Quantised values are never added, so nothing overflows and the error does not grow
with the ranks.

The error feedback of a rank contains both quantisation errors: of its own gradient, and of its share of the sum.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.collectives.compression.flat import Parts, joined, split
from fivefold.collectives.compression.state import Memory
from fivefold.ledger.compression import BLOCK


class Codec(Protocol):
    """Rows of numbers as rows of bytes; a row's length is a multiple of BLOCK."""

    def encode(self, rows: Tensor) -> Tensor: ...

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor: ...


class HalfCodec:
    """bf16 or fp16; what is too large for fp16 becomes the largest it has, and the rest is fed back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: Tensor) -> Tensor:
        most = torch.finfo(self._dtype).max
        clamped = torch.where(rows.isfinite(), rows.clamp(-most, most), rows)
        return clamped.to(self._dtype).view(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(self._dtype).to(dtype)


class Int8Codec:
    """Eight bits with one float32 scale for every BLOCK numbers, symmetric around zero.

    A block that is not finite decodes to NaN: an overflow on one rank must be seen by all.
    """

    def encode(self, rows: Tensor) -> Tensor:
        blocks = rows.view(len(rows), -1, BLOCK)
        scales = (blocks.abs().amax(-1, keepdim=True) / 127).float()
        finite = scales.isfinite()
        safe = torch.where(finite & (scales > 0), scales, 1.0).to(rows.dtype)
        codes = (blocks / safe).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
        told = torch.where(finite, scales, torch.nan)
        return torch.cat([codes.flatten(1).view(torch.uint8), told.flatten(1).view(torch.uint8)], dim=1)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        length = codes.shape[1] * BLOCK // (BLOCK + 4)
        numbers = codes[:, :length].view(torch.int8).view(len(codes), -1, BLOCK).to(dtype)
        scales = codes[:, length:].contiguous().view(torch.float32).to(dtype)
        return (numbers * scales[:, :, None]).flatten(1)


class Quantised:
    """Sums gradients with a codec both ways: 2(n−1)/n of the codes' bytes on the wire."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.memory = Memory()

    def prepare(self, parts: Parts) -> None:
        """Makes the state of parameters of these shapes."""
        for name, tensor in parts:
            self.memory.set_own("error", name, torch.zeros_like(tensor))
        self.memory.settle(True)

    def reduce(self, parts: Parts, group: dist.ProcessGroup) -> None:
        """Sums the tensors over the group, in place. Collective."""
        ranks, rank = group.size(), group.rank()
        errors = [self.memory.own("error", name, tensor) for name, tensor in parts]
        vector = joined([tensor for _, tensor in parts]) + joined(errors)
        share = -(-len(vector) // (ranks * BLOCK)) * BLOCK
        padded = torch.nn.functional.pad(vector, (0, ranks * share - len(vector))).view(ranks, share)
        codes = self._codec.encode(padded)
        theirs = torch.empty_like(codes)
        dist.all_to_all_single(theirs, codes, group=group)
        total = self._codec.decode(theirs, vector.dtype).sum(0, keepdim=True)  # of this rank's share
        told = self._codec.encode(total)
        everyone = told.new_empty(ranks, told.shape[1])
        dist.all_gather_single(everyone, told, group=group)
        missed = padded - self._codec.decode(codes, vector.dtype)
        missed[rank] += (total - self._codec.decode(told, vector.dtype))[0]
        reduced = self._codec.decode(everyone, vector.dtype).view(-1)[: len(vector)]
        missed = missed.view(-1)[: len(vector)]
        for (name, tensor, piece), (_, _, left) in zip(
            split(reduced, parts), split(missed, parts), strict=True
        ):
            tensor.copy_(piece)
            self.memory.set_own("error", name, left.clone())
