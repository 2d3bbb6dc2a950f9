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


def parameter_errors(
    found: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    *,
    initial: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    learning_rate: float,
    eps: float,
) -> dict[str, float]:
    """As `errors`, of parameters after a few AdamW steps; those that started at zero against lr · √numel at least.

    AdamW divides a gradient by its own size plus eps. One that is zero up to rounding (of key biases without rotary
    positions: softmax does not see them) so becomes a step of any size up to lr, whose digits mean nothing. What
    counts is the gradient's error, which has a floor (see `errors`): an error of that size moves the parameter by
    lr · floor / (|g| + eps) per element, and where that is above lr, it is what the parameter is measured against.

    Args:
        found, reference: parameters by name.
        initial, gradients: of the reference, by the same names: before the first step, and of it.
        learning_rate: the largest of the steps.
        eps: AdamW's.
    """
    plain = errors(found, reference)
    total_norm = sqrt(sum(tensor.double().square().sum().item() for tensor in gradients.values()))
    floor = 1e-3 * total_norm / sqrt(sum(tensor.numel() for tensor in gradients.values()))
    for name, start in initial.items():
        if name in reference and not bool(start.any()):
            size = sqrt(start.numel())
            own = gradients[name].double().norm().item() / size if name in gradients else 0.0
            scale = learning_rate * size * max(1.0, floor / (own + eps))
            plain[name] = min(plain[name], _difference(found[name], reference[name]) / scale)
    return plain


def _difference(found: Tensor, reference: Tensor) -> float:
    return float((found.detach().double() - reference.detach().double()).norm())
