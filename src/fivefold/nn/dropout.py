"""Dropout (Srivastava et al. 2014) whose masks do not depend on the layout or on the state of a random generator.

Whether a feature of a token is dropped is a function of (seed, step, site, token, feature); a token is identified by
its row in the step's global batch and its position in the row. Any rank can compute the mask of any tokens and
features, and recomputation in backward reproduces it.

The function is SplitMix64 (Steele, Lea & Flood 2014): a counter, stepped by an odd constant, through a mixing
function of 64 bits. Each (step, site, token) has a stream of its own, started at a mixed key; every number of it
decides on four neighbouring features, sixteen bits each.
"""

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
# With the shifts 30, 27, 31: "variant 13" of Stafford.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 1 << 64
_FEATURES = 4
"""Features decided by one number."""
_LEVELS = 1 << 16


def step_key(seed: int, step: int) -> int:
    """The key of a step's masks, in the range of int64."""
    return _signed(_mixed(_mixed(seed * _GAMMA) + step * _GAMMA))


def token_keys(key: int, rows: Tensor, positions: Tensor) -> Tensor:
    """Keys of the tokens of a step.

    Args:
        key: `step_key`.
        rows: `[batch]`, int64, numbers of rows in the step's global batch.
        positions: `[sequence]`, int64, below 2^32.

    Returns:
        `[batch, sequence]`, int64.
    """
    numbers = (rows << 32).unsqueeze(1) + positions
    return _mix(numbers.mul_(_signed(_GAMMA)).add_(key))


def site_number(layer: int, branch: int) -> int:
    """The number of a layer's residual branch; the embedding is site 0.

    Args:
        layer: its number in the whole model.
        branch: 0 = attention, 1 = feed-forward.
    """
    return 1 + 2 * layer + branch


def site_keys(keys: Tensor, site: int) -> Tensor:
    """Keys of the tokens at one site, of their keys in the step; of any shape, int64."""
    return _mix(keys + _signed(site * _GAMMA))


def dropped(keys: Tensor, probability: float, start: int, stop: int) -> Tensor:
    """Which of the features `start` … `stop` of the tokens are dropped at a site.

    Args:
        keys: `site_keys`, `[...]`.
        probability: taken to the nearest multiple of 2^-16.

    Returns:
        `[..., stop - start]`, bool.
    """
    first, last = start // _FEATURES, -(-stop // _FEATURES)
    counter = torch.arange(first + 1, last + 1, device=keys.device).mul_(_signed(_GAMMA))
    numbers = _mix(keys.unsqueeze(-1) + counter)  # [..., last - first]
    levels = numbers.view(torch.int16)[..., start - first * _FEATURES : stop - first * _FEATURES]
    return levels < _threshold(probability) - _LEVELS // 2


def drop(x: Tensor, keys: Tensor | None, probability: float) -> Tensor:
    """`x` with features dropped and the others scaled up by what is kept on average; `x` itself without keys.

    Args:
        x: `[..., features]`, all features.
        keys: `site_keys`, `[...]`, or None.
    """
    if keys is None:
        return x
    scale = _LEVELS / (_LEVELS - _threshold(probability))
    return (x * scale).masked_fill(dropped(keys, probability, 0, x.shape[-1]), 0.0)


def _threshold(probability: float) -> int:
    """How many of the 2^16 levels are dropped; never all of them."""
    return min(round(probability * _LEVELS), _LEVELS - 1)


def _mix(z: Tensor) -> Tensor:
    """The mixing function on int64, in place. Multiplication wraps; a shift of a signed number repeats its sign,
    which the mask takes away."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z ^= (z >> shift).bitwise_and_((1 << 64 - shift) - 1)
        z *= _signed(multiplier)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


def _mixed(z: int) -> int:
    """The same of one number."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z %= _WORD
        z = (z ^ z >> shift) * multiplier
    z %= _WORD
    return z ^ z >> 31


def _signed(word: int) -> int:
    """The int64 with the bits of `word`."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
