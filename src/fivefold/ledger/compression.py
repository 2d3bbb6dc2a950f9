"""What compressed sums of gradients put on the wire. Twin of collectives/compression/."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

from fivefold.config.model import Model
from fivefold.config.tree import Config, Parallel
from fivefold.ledger.network import Primitive
from fivefold.spec.parameters import parameters

Method = Literal["none", "bf16", "fp16", "int8", "topk", "threshold", "powersgd"]
BLOCK = 256  # numbers that share an int8 scale
LEAST_RATIO = 2.0  # PowerSGD: a matrix whose factors are not this much smaller is summed as it is


@dataclass(frozen=True, slots=True)
class Compression:
    """How gradients are summed over the data-parallel ranks.

    Attributes:
        density: topk: part of a bucket's elements that a rank sends.
        rank: powersgd: columns of the factors.
        threshold: threshold: how many root mean squares an element must reach.
    """

    method: Method
    density: float = 0.01
    rank: int = 4
    threshold: float = 3.0


UNCOMPRESSED = Compression("none")


def compression_of(parallel: Parallel) -> Compression:
    """What a layout asks for."""
    return Compression(
        parallel.compression,
        parallel.compression_density,
        parallel.compression_rank,
        parallel.compression_threshold,
    )


def corrected_momentum(config: Config) -> float:
    """The momentum that sparse compression applies before it selects, in place of the optimizer (SGD only)."""
    sparse = config.parallel.compression in ("topk", "threshold")
    return config.optimizer.momentum if sparse and config.optimizer.name == "sgd" else 0.0


# Bytes of memory traffic an element in coding, decoding and feeding back, which run pass by pass while backward waits:
# between the passes over float32 counted in collectives/compression/ and the 7 (powersgd) to 16 (topk) ns an element
# that one busy CPU core took.
_TOUCHED = {"none": 0, "bf16": 160, "fp16": 160, "int8": 200, "topk": 240, "threshold": 160, "powersgd": 110}


def touched_bytes(how: Compression) -> int:
    """Bytes of memory traffic that compressing an element costs a rank."""
    return _TOUCHED[how.method]


def kept_bytes(itemsize: int, momentum: bool) -> int:
    """Bytes of an element that is kept between steps and, while one is under way, for the state after it; with
    `momentum` also as a velocity, less the momentum that the optimizer then does not keep."""
    return (2 * 2 - 1 if momentum else 2) * itemsize


def kept_elements(how: Compression, shape: Sequence[int], *, is_copy: bool) -> int:
    """Elements that compression keeps of a gradient of this shape. Copies under tensor parallel are summed as they are
    (parallel/apply.py), and so is all that PowerSGD does not send as factors; of a matrix it keeps a factor, too."""
    if how.method == "none" or is_copy:
        return 0
    if how.method != "powersgd":
        return prod(shape)
    return prod(shape) + prod(shape[1:]) * how.rank if low_rank(shape, how.rank) else 0


@lru_cache
def powersgd_shares(model: Model, rank: int) -> tuple[float, float]:
    """Elements in PowerSGD's first message (left factors, all that is not compressed) and in its second, each as a
    part of the model's parameters; matrices whole."""
    specs = parameters(model)
    whole = sum(spec.numel for spec in specs)
    first = sum(spec.shape[0] * rank if low_rank(spec.shape, rank) else spec.numel for spec in specs)
    second = sum(prod(spec.shape[1:]) * rank for spec in specs if low_rank(spec.shape, rank))
    return first / whole, second / whole


def bucket_messages(
    how: Compression, model: Model, elements: int, itemsize: int, ranks: int
) -> list[tuple[Primitive, int]]:
    """As `messages`, for a bucket of which only the size is known: PowerSGD's is taken for a share of the model."""
    if how.method == "powersgd":
        shares = powersgd_shares(model, how.rank)
        return [("all_reduce", round(share * elements) * itemsize) for share in shares if share]
    return messages(how, [(elements,)], itemsize, ranks)


def low_rank(shape: Sequence[int], rank: int) -> bool:
    """Whether PowerSGD sends a tensor as two factors."""
    if len(shape) < 2:
        return False
    rows, columns = shape[0], prod(shape[1:])
    return (rows + columns) * rank * LEAST_RATIO < rows * columns


def messages(
    how: Compression, shapes: Sequence[Sequence[int]], itemsize: int, ranks: int
) -> list[tuple[Primitive, int]]:
    """(primitive, bytes as the ledger counts them) of one sum of a bucket of tensors of these shapes.

    A threshold sends as many elements as the gradient has beyond it: three root mean squares leave about 1 % of a
    heavy-tailed one; `density` is taken for it.
    """
    elements = sum(map(prod, shapes))
    if how.method in ("bf16", "fp16", "int8"):
        share = -(-elements // (ranks * BLOCK)) * BLOCK
        coded = share * 2 if how.method != "int8" else share + 4 * share // BLOCK
        return [("all_to_all", ranks * coded), ("all_gather", ranks * coded)]
    if how.method in ("topk", "threshold"):
        count = max(1, min(elements, round(how.density * elements)))
        if how.density * ranks >= 1 or count * ranks >= elements:
            return [("all_reduce", elements * itemsize)]
        return [("all_gather", ranks * count * (itemsize + 4))]
    if how.method == "powersgd":
        low = [shape for shape in shapes if low_rank(shape, how.rank)]
        left = sum(shape[0] * how.rank for shape in low)
        right = sum(prod(shape[1:]) * how.rank for shape in low)
        whole = sum(prod(shape) for shape in shapes if not low_rank(shape, how.rank))
        found: list[tuple[Primitive, int]] = [("all_reduce", (left + whole) * itemsize)]
        return [*found, ("all_reduce", right * itemsize)] if low else found
    return [("all_reduce", elements * itemsize)]
