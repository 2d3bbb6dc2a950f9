"""One optimizer step, the same function for every layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from fivefold.collectives.record import Recorder
from fivefold.observe.clock import StepClock
from fivefold.parallel.apply import ParallelModel
from fivefold.parallel.local import LocalParameter
from fivefold.trainer.agree import Agreement
from fivefold.trainer.batches import MicroBatch
from fivefold.trainer.diagnose import first_non_finite
from fivefold.trainer.loss_scale import LossScale
from fivefold.trainer.optimizer import LocalOptimizer

NORM_PIECE = 1 << 14  # elements: an error of some 1e-6 in float32


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did, the same numbers on every rank.

    Attributes:
        loss: nats per counted token of the global batch.
        loss_tokens: tokens counted.
        grad_norm: norm of the whole gradient before clipping.
        skipped: why nothing was updated (the gradient was not finite), or None.
        loss_scale: the factor on the loss in this step.
        flags: sums over the ranks of the flags handed in.
        expert_load: choices of the busiest expert over the mean of its layer; None without experts.
    """

    loss: float
    loss_tokens: int
    grad_norm: float
    skipped: str | None
    loss_scale: float
    flags: list[float]
    expert_load: float | None


@dataclass(frozen=True, slots=True)
class Stepper:
    """What a step works on."""

    model: ParallelModel
    optimizer: LocalOptimizer
    agreement: Agreement
    recorder: Recorder
    clock: StepClock
    loss_scale: LossScale
    clip: float

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        learning_rate: float,
        flags: Sequence[float] = (),
        inspect: Callable[[ParallelModel], None] | None = None,
    ) -> StepResult:
        """Accumulate, reduce, agree, clip, update.

        The gradient is that of Σ loss / Σ counted tokens over the whole global batch, so it does not depend on
        how the batch is cut into ranks and micro-batches.

        Args:
            micro_batches: this rank's share of the global batch, on its device.
            learning_rate: of this update.
            flags: this rank's flags (stop asked for, save done, …), summed over the ranks with the token count.
            inspect: sees the model when gradients are whole and parameters still the old ones.
        """
        with self.recorder.phase("step"), self.clock.measure("communication"):
            counted = sum(batch.loss_tokens for batch in micro_batches) * self.model.counts_tokens
            loss_tokens, *agreed = self.agreement.sum(counted, *flags)
        with self.recorder.phase("forward"), self.clock.measure("communication"):
            self.model.data.begin_step(self.recorder)
        loss_sum = self._forward_backward(micro_batches, max(loss_tokens, 1.0))
        with self.recorder.phase("gradient"), self.clock.measure("communication"):
            self.model.reduce_gradients()
        with self.recorder.phase("step"), self.clock.measure("communication"):
            square = local_square_norm(self.model.parameters)
            counts = self.model.module.take_counts()
            once = self.model.counts_results
            loss_sum, square, *counts = self.agreement.sum(
                loss_sum if once else 0.0, square, *(count * once for count in counts)
            )
        grad_norm = sqrt(square) / self.loss_scale.value
        if inspect is not None:
            inspect(self.model)
        skipped = None
        if isfinite(loss_sum) and isfinite(grad_norm):
            exposed = self.recorder.exposed_seconds
            with self.recorder.phase("optimizer"), self.clock.measure("compute"):
                scale = clip_coefficient(grad_norm, self.clip) / self.loss_scale.value
                self.optimizer.step(learning_rate, scale)
                self.model.module.balance(counts)
            self.clock.move(self.recorder.exposed_seconds - exposed, "compute", "communication")
            with self.recorder.phase("optimizer"), self.clock.measure("communication"):
                self.model.data.updated()
        else:
            with self.recorder.paused():
                skipped = first_non_finite(self.model, micro_batches)
        self.model.data.clear_gradients()
        loss = loss_sum / max(loss_tokens, 1.0)
        expert_load = busiest_over_mean(counts, self.model.module.model.experts.count)
        result = StepResult(
            loss, int(loss_tokens), grad_norm, skipped, self.loss_scale.value, agreed, expert_load
        )
        self.loss_scale.update(skipped is not None)
        return result

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], loss_tokens: float) -> float:
        """Adds the micro-batches' gradients; returns their summed loss, as far as this rank has it."""
        model, exposed = self.model, self.recorder.exposed_seconds
        per_sequence, factor = loss_tokens / micro_batches[0].sequences, self.loss_scale.value / loss_tokens
        with self.clock.measure("compute"):
            if model.pipeline is not None:
                loss_sum = model.pipeline.step(micro_batches, per_sequence, factor, self.recorder)
            else:
                loss_sum = 0.0
                for index, batch in enumerate(micro_batches):
                    model.data.begin_micro_step(last=index == len(micro_batches) - 1)
                    loss_sum += self._one(batch, per_sequence, factor)
        self.clock.move(self.recorder.exposed_seconds - exposed, "compute", "communication")
        return loss_sum

    def _one(self, batch: MicroBatch, per_sequence: float, factor: float) -> float:
        """Adds one micro-batch's gradient; returns its summed loss."""
        with self.recorder.phase("forward"):
            loss: Tensor = self.model.module(batch.inputs, per_sequence)
        with self.recorder.phase("backward"):
            (loss * factor).backward()  # type: ignore[no-untyped-call]
            self.model.data.end_micro_step()
        return loss.item()


def local_square_norm(parameters: Sequence[LocalParameter]) -> float:
    """This rank's share of the squared norm of the whole gradient: summed over the ranks, each element counts
    once, because a part that several ranks hold counts for 1 / copies on each.

    On CPUs torch adds the squares of a tensor one by one, in float32 too: of 20 million elements the norm comes out a
    thousandth too small. So it is asked for pieces, which are added up in float64.
    """
    held = [
        (piece, p.copies)
        for p in parameters
        if (gradient := p.gradient()) is not None
        for piece in (
            torch.split(gradient.flatten(), NORM_PIECE) if gradient.device.type == "cpu" else [gradient]
        )
    ]
    if not held:
        return 0.0
    norms = torch.stack(torch._foreach_norm([piece for piece, _ in held])).double()
    copies = torch.tensor([copies for _, copies in held], dtype=torch.float64, device=norms.device)
    return (norms.square() / copies).sum().item()


def busiest_over_mean(counts: Sequence[float], experts: int) -> float | None:
    """The greatest, over the layers, of max / mean of the choices of its experts; None if nothing was chosen.

    Args:
        counts: of the experts of every layer, layer by layer; zeros of layers without experts.
    """
    layers = [counts[start : start + experts] for start in range(0, len(counts), max(experts, 1))]
    return max((max(layer) * experts / sum(layer) for layer in layers if sum(layer)), default=None)


def clip_coefficient(grad_norm: float, limit: float) -> float:
    """The factor that brings a gradient of norm `grad_norm` down to `limit` (0 = no limit).

    min(1, limit / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it, so that results compare.
    """
    return min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
