"""The error metric: what it forgives and what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.proof.error import errors, parameter_errors

GENERATOR = torch.Generator().manual_seed(0)
BIG, BIAS = torch.randn(100, 10, generator=GENERATOR).double(), torch.zeros(12, dtype=torch.float64)


def test_a_tensor_that_cancels_is_judged_by_an_average_one() -> None:
    reference = {"big": BIG, "none": torch.full((12,), 1e-17, dtype=torch.float64)}
    found = {"big": BIG, "none": reference["none"] * -3}
    assert errors(found, reference)["none"] < 1e-13
    assert errors({"big": BIG, "none": torch.full((12,), 1e-3)}, reference)["none"] > 0.5


def after(bias: Tensor, gradient: float, found: Tensor) -> float:
    """Error of a bias that started at zero, in a model whose other gradients are about 1."""
    return parameter_errors(
        {"big": BIG, "bias": found},
        {"big": BIG, "bias": bias},
        initial={"big": BIG, "bias": BIAS},
        gradients={"big": BIG, "bias": torch.full_like(BIAS, gradient)},
        learning_rate=1e-3,
        eps=1e-8,
    )["bias"]


def test_parameters_that_started_at_zero_are_measured_against_the_learning_rate() -> None:
    moved = torch.full_like(BIAS, 1e-6)  # it has come and gone: its own size says nothing
    assert after(moved, 0.5, moved + 1e-5) == pytest.approx(1e-2, rel=0.05)
    assert after(moved, 0.5, moved + 1e-3) == pytest.approx(1.0, rel=0.05)


def test_a_step_made_of_rounding_is_measured_against_what_rounding_may_do() -> None:
    """A gradient of 1e-17 where 1e-3 would be forgiven: AdamW makes 1e-12 of the rate of it, and may make all."""
    step = torch.full_like(BIAS, 1e-12)
    assert after(step, 1e-17, -step) < 1e-13
    assert after(step, 1e-17, step + 1e-3) == pytest.approx(1e-5, rel=0.1)
    assert after(step, 0.5, step + 1e-3) == pytest.approx(
        1.0, rel=0.05
    )  # a true gradient is forgiven nothing


def test_a_parameter_that_did_not_start_at_zero_is_measured_by_itself() -> None:
    found = {"big": BIG * (1 + 1e-6), "bias": BIAS}
    reference = {"big": BIG, "bias": BIAS}
    judged = parameter_errors(
        found, reference, initial=reference, gradients=reference, learning_rate=1.0, eps=1e-8
    )
    assert judged["big"] == pytest.approx(1e-6) == errors(found, reference)["big"]
