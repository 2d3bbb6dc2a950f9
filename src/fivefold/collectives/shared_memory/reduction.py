"""Sums, means and the like over the parts of all ranks, always taken in the order of the ranks."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_SUM = dist.ReduceOp.SUM


class Kind(IntEnum):
    """torch's reductions, by its names."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


_KINDS = tuple(Kind)
_COMBINE: dict[Kind, Callable[..., Tensor]] = {
    Kind.SUM: torch.add,
    Kind.AVG: torch.add,
    Kind.PRODUCT: torch.mul,
    Kind.MIN: torch.minimum,
    Kind.MAX: torch.maximum,
    Kind.BAND: torch.bitwise_and,
    Kind.BOR: torch.bitwise_or,
    Kind.BXOR: torch.bitwise_xor,
}


def kind_of(options: Any) -> Kind:
    """The kind of reduction that torch's options, or its ReduceOp, name.

    Raises:
        RuntimeError: one that is not defined between processes of a CPU.
    """
    operation = getattr(options, "reduceOp", options)
    if operation == _SUM:  # the usual one, found with fewer conversions
        return Kind.SUM
    number = int(getattr(operation, "op", operation))
    if number >= len(_KINDS):
        raise RuntimeError(f"reduction {operation.op.name} is not supported on CPUs")
    return _KINDS[number]


def reduce_into(out: Tensor, parts: list[Tensor], kind: Kind) -> None:
    """Reduces equally long vectors, first to last, into `out`, which may be one of the first two.

    More than two parts of bf16 or fp16 are accumulated in float32 and rounded once. A mean of integers is rounded
    towards zero.
    """
    combine = _COMBINE[kind]
    if kind == Kind.SUM and len(parts) == 2 and (out is parts[0] or out is parts[1]):
        out.add_(parts[1] if out is parts[0] else parts[0])  # the fast way: no output to be looked at
        return
    if len(parts) == 1:
        if out is not parts[0]:
            out.copy_(parts[0])
    elif len(parts) == 2 or out.dtype not in _HALF:
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            if combine is torch.add:
                out.add_(part)
            else:
                combine(out, part, out=out)
    else:
        total = parts[0].float()
        for part in parts[1:]:
            combine(total, part, out=total)
        if kind == Kind.AVG:
            total.div_(len(parts))
        out.copy_(total)
        return
    if kind == Kind.AVG:
        if out.is_floating_point() or out.is_complex():
            out.div_(len(parts))
        else:
            out.div_(len(parts), rounding_mode="trunc")
