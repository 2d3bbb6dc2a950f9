"""Notes, which ranks leave each other: in one word what a rank does in a step.

That is the primitive, the reduction, the root, the type of what is reduced, and the bytes (modulo a tebibyte).
"""

from collections.abc import Sequence
from typing import get_args

import torch

from fivefold.collectives.record import Primitive
from fivefold.collectives.shared_memory.reduction import Kind

PRIMITIVES: tuple[Primitive, ...] = get_args(Primitive)
ROOTED = ("broadcast", "reduce", "gather", "scatter")
_TYPE_BIT, _ROOT_BIT, _KIND_BIT, _PRIMITIVE_BIT = 40, 44, 56, 60
_BYTES = (1 << _TYPE_BIT) - 1
_NUMBERS = {primitive: number << _PRIMITIVE_BIT for number, primitive in enumerate(PRIMITIVES)}
_TYPES = (
    None,
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_TYPE_NUMBERS = {dtype: number << _TYPE_BIT for number, dtype in enumerate(_TYPES)}


def note_of(
    primitive: Primitive, size: int, kind: Kind = Kind.SUM, root: int = 0, dtype: torch.dtype | None = None
) -> int:
    """The note of a call; `root` counts within the segment."""
    numbers = _NUMBERS[primitive] | _TYPE_NUMBERS.get(dtype, 0)
    return numbers | kind << _KIND_BIT | root << _ROOT_BIT | size & _BYTES


def read(note: int, names: Sequence[int]) -> str:
    """The note in words; `names`: what the segment's ranks are called."""
    primitive, kind = PRIMITIVES[note >> _PRIMITIVE_BIT], Kind(note >> _KIND_BIT & 15)
    reduction = "" if kind == Kind.SUM else f" ({kind.name})"
    dtype = _TYPES[note >> _TYPE_BIT & 15]
    root = f" with root {names[note >> _ROOT_BIT & 4095]}" if primitive in ROOTED else ""
    return f"{primitive}{reduction} of {note & _BYTES} bytes{f' of {dtype}' if dtype else ''}{root}"
