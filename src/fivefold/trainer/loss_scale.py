"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, §3.2)."""

from dataclasses import dataclass

from fivefold.config.tree import Precision

BACKOFF, GROWTH = 0.5, 2.0


@dataclass(slots=True)
class LossScale:
    """The factor on the loss that keeps small gradients from vanishing in fp16; 1 for other types.

    It follows only from what all ranks agree on (whether a step was skipped), so it is the same on all.

    Attributes:
        value: the factor now.
        good_steps: updates since the factor last changed.
        growth_steps: updates after which it doubles; 0 = it never changes.
        floor: it never falls below; an overflow there is a fault of the model, not of the scale.
        backoff: what an overflow multiplies it by.
    """

    value: float = 1.0
    good_steps: int = 0
    growth_steps: int = 0
    floor: float = 1.0
    backoff: float = BACKOFF

    @staticmethod
    def of(precision: Precision) -> "LossScale":
        """The scale a run of this precision starts with."""
        if precision.dtype != "fp16":
            return LossScale()
        return LossScale(
            precision.initial_loss_scale,
            growth_steps=precision.loss_scale_growth_steps,
            floor=precision.min_loss_scale,
        )

    def update(self, skipped: bool) -> None:
        """After each step: an overflow halves the factor, many steps without one double it."""
        if not self.growth_steps:
            return
        if skipped:
            self.value, self.good_steps = max(self.value * self.backoff, self.floor), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.value, self.good_steps = self.value * GROWTH, 0
