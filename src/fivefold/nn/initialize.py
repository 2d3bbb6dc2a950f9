"""Initial weights that do not depend on the layout: a function of (seed, parameter name, flat index).

Values come in blocks of fixed size, each drawn by its own generator, so that a rank that holds a shard draws
only the blocks the shard touches. Drawn in float32 and then cast: a float64 draw is another sequence.
"""

from hashlib import blake2b

import torch
from torch import Tensor

from fivefold.spec.parameters import Parameter

BLOCK = 4096
"""Elements drawn by one generator: large enough that seeding it costs little."""


def initial_values(parameter: Parameter, seed: int, start: int, stop: int) -> Tensor:
    """Elements `start` to `stop` of the flattened initial value.

    Returns:
        float32 tensor `[stop - start]` on the CPU.
    """
    values = torch.full((stop - start,), parameter.fill)
    if parameter.std == 0.0:
        return values
    generator = torch.Generator()
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first = block * BLOCK
        low, high = max(start, first), min(stop, first + BLOCK)
        if low < high:
            generator.manual_seed(_block_seed(seed, parameter.name, block))
            drawn = torch.empty(BLOCK).normal_(0.0, parameter.std, generator=generator)
            values[low - start : high - start] = drawn[low - first : high - first]
    return values


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
