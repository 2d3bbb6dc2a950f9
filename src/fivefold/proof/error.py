"""The error metric: how far a tensor is from its reference, judged as a whole and never element by element."""

from collections.abc import Mapping
from math import sqrt

from torch import Tensor


def errors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """error(t) = ‖t − ref‖₂ / max(‖ref‖₂, 10⁻³ · ‖all‖₂ · √(numel(t) / numel(all))), for each tensor.

    The floor keeps a tensor that is zero up to rounding (a gradient that cancels) from being judged by its own
    size: it may be as wrong as a thousandth of an average tensor.

    Args:
        found, reference: tensors of one kind (all gradients, all parameters, …) by the same names.
    """
    if found.keys() != reference.keys():
        raise ValueError(f"different tensors: {sorted(found.keys() ^ reference.keys())}")
    total_norm = sqrt(sum(tensor.double().square().sum().item() for tensor in reference.values()))
    total_numel = sum(tensor.numel() for tensor in reference.values())
    return {
        name: _difference(found[name], tensor)
        / max(
            tensor.double().norm().item(),
            1e-3 * total_norm * sqrt(tensor.numel() / total_numel),
            1e-300,
        )
        for name, tensor in reference.items()
    }


def _difference(found: Tensor, reference: Tensor) -> float:
    return float((found.detach().double() - reference.detach().double()).norm())
