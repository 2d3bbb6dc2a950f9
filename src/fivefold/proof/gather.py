"""Assembles whole tensors from the parts that the ranks hold."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.local import Piece
from fivefold.spec.parts import Part


class Sent(NamedTuple):
    """A piece that can travel between processes."""

    part: Part
    shape: tuple[int, ...]
    local: Tensor


class Wholes(NamedTuple):
    """Tensors put together.

    Attributes:
        tensors: by name, complete.
        disagreeing: names of which two ranks hold a common element with different bits.
    """

    tensors: dict[str, Tensor]
    disagreeing: list[str]


def sent(held: Mapping[str, Tensor | Piece]) -> dict[str, Sent]:
    """Copies of what this rank holds."""
    found = {}
    for name, tensor in held.items():
        local = (tensor.local if isinstance(tensor, Piece) else tensor).detach().cpu().clone()
        part = tensor.part if isinstance(tensor, Piece) else Part((0,) * local.dim(), tuple(local.shape))
        found[name] = Sent(part, tuple(tensor.shape), local)
    return found


def wholes(held: Mapping[str, Tensor | Piece]) -> Wholes:
    """Every tensor that any rank holds a part of, on every rank. Collective over all ranks."""
    mine = sent(held)
    everyone = [mine]
    if dist.is_initialized():
        everyone = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return assemble(everyone)


def assemble(everyone: Iterable[Mapping[str, Sent]]) -> Wholes:
    """Whole tensors from what all ranks hold.

    Raises:
        ValueError: some element of a tensor is held by no rank.
    """
    tensors: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    disagreeing: dict[str, None] = {}
    for of_rank in everyone:
        for name, (part, shape, local) in of_rank.items():
            if name not in tensors:
                tensors[name] = torch.zeros(shape, dtype=local.dtype)
                filled[name] = torch.zeros(shape, dtype=torch.bool)
            box = tuple(slice(start, start + size) for start, size in zip(*part, strict=True))
            same = (tensors[name][box] == local) | (local != local) | ~filled[name][box]
            if not bool(same.all()):
                disagreeing[name] = None
            tensors[name][box] = local
            filled[name][box] = True
    holes = [name for name, mask in filled.items() if not bool(mask.all())]
    if holes:
        raise ValueError(f"no rank holds all of {', '.join(holes)}")
    return Wholes(tensors, list(disagreeing))
