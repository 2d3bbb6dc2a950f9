"""Whole tensors from the pieces that the ranks hold."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.local import Piece
from fivefold.spec.parts import Part


class Wholes(NamedTuple):
    """Tensors put together, the same on every rank.

    Attributes:
        tensors: by name, complete.
        disagreeing: names of which two ranks hold a common element with different bits.
    """

    tensors: dict[str, Tensor]
    disagreeing: list[str]


def wholes(held: Mapping[str, Tensor | Piece]) -> Wholes:
    """Every tensor that any rank holds a part of. Collective over all ranks.

    Raises:
        ValueError: some element of a tensor is held by no rank.
    """
    mine = {name: _place(tensor) for name, tensor in held.items()}
    everyone: list[dict[str, tuple[Part, torch.Size, Tensor]]] = [mine]
    if dist.is_initialized():
        everyone = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    tensors: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    disagreeing: dict[str, None] = {}
    for of_rank in everyone:
        for name, (part, shape, local) in of_rank.items():
            if name not in tensors:
                tensors[name] = torch.zeros(shape, dtype=local.dtype)
                filled[name] = torch.zeros(shape, dtype=torch.bool)
            box = tuple(slice(start, start + size) for start, size in zip(*part, strict=True))
            known = filled[name][box]
            if not bool(((tensors[name][box] == local) | (local != local) | ~known).all()):
                disagreeing[name] = None
            tensors[name][box] = local
            filled[name][box] = True
    holes = [name for name, mask in filled.items() if not bool(mask.all())]
    if holes:
        raise ValueError(f"no rank holds all of {', '.join(holes)}")
    return Wholes(tensors, list(disagreeing))


def _place(tensor: Tensor | Piece) -> tuple[Part, torch.Size, Tensor]:
    if isinstance(tensor, Piece):
        return tensor.part, tensor.shape, tensor.local.cpu().clone()
    local = tensor.detach().cpu().clone()
    return Part((0,) * local.dim(), tuple(local.shape)), local.shape, local
