"""One optimizer step, the same function for every layout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from fivefold.collectives.record import Phase, Recorder
from fivefold.observe.clock import StepClock
from fivefold.parallel.apply import ParallelModel
from fivefold.parallel.local import LocalParameter
from fivefold.trainer.agreement import Agreement
from fivefold.trainer.batches import MicroBatch
from fivefold.trainer.diagnose import first_non_finite
from fivefold.trainer.loss_scale import LossScale
from fivefold.trainer.optimizer import LocalOptimizer

NORM_PIECE = 1 << 14  # elements; a float32 norm of so many is off by about 1e-6


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
    """Takes optimizer steps. `step` is the algebra; what follows it is how each line is carried out and timed."""

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
        how the batch is divided into ranks and micro-batches.

        Args:
            micro_batches: this rank's share of the global batch, on its device.
            learning_rate: of this update.
            flags: this rank's flags (stop requested, save finished, …), summed over the ranks with the token count.
            inspect: called when gradients are reduced and the parameters not updated yet.
        """
        loss_tokens, *agreed = self._count_tokens(micro_batches, flags)
        loss_sum = self._accumulate(micro_batches, max(loss_tokens, 1.0))
        self._reduce()
        loss_sum, grad_norm, expert_counts = self._agree(loss_sum)
        if inspect is not None:
            inspect(self.model)
        skipped = None
        if isfinite(loss_sum) and isfinite(grad_norm):
            self._update(learning_rate, clip_coefficient(grad_norm, self.clip), expert_counts)
        else:
            with self.recorder.paused():
                skipped = first_non_finite(self.model, micro_batches)
        self.model.data.clear_gradients()
        result = StepResult(
            loss=loss_sum / max(loss_tokens, 1.0),
            loss_tokens=int(loss_tokens),
            grad_norm=grad_norm,
            skipped=skipped,
            loss_scale=self.loss_scale.value,
            flags=agreed,
            expert_load=busiest_over_mean(expert_counts, self.model.module.model.experts.count),
        )
        self.loss_scale.update(skipped is not None)
        return result

    def _count_tokens(self, micro_batches: Sequence[MicroBatch], flags: Sequence[float]) -> list[float]:
        """The counted tokens of the global batch, and each flag, summed over the ranks."""
        tokens = sum(batch.loss_tokens for batch in micro_batches) * self.model.counts_tokens
        with self._communicating("step"):
            return self.agreement.sum(tokens, *flags)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], loss_tokens: float) -> float:
        """Adds the gradients of all micro-batches; returns their summed loss, on the ranks that compute it."""
        with self._communicating("forward"):
            self.model.data.begin_step(self.recorder)
        model = self.model
        per_sequence, factor = loss_tokens / micro_batches[0].sequences, self.loss_scale.value / loss_tokens
        with self._computing():
            if model.pipeline is not None:
                return model.pipeline.step(micro_batches, per_sequence, factor, self.recorder)
            loss_sum = 0.0
            for index, batch in enumerate(micro_batches):
                model.data.begin_micro_step(last=index == len(micro_batches) - 1)
                loss_sum += self._forward_backward(batch, per_sequence, factor)
            return loss_sum

    def _forward_backward(self, batch: MicroBatch, per_sequence: float, factor: float) -> float:
        """Adds the gradient of one micro-batch; returns its summed loss."""
        with self.recorder.phase("forward"):
            loss: Tensor = self.model.module(batch.inputs, per_sequence)
        with self.recorder.phase("backward"):
            (loss * factor).backward()  # type: ignore[no-untyped-call]
            self.model.data.end_micro_step()
        return loss.item()

    def _reduce(self) -> None:
        """Gradients become those of the whole global batch, times the loss scale."""
        with self._communicating("gradient"):
            self.model.reduce_gradients(self.loss_scale.value)

    def _agree(self, loss_sum: float) -> tuple[float, float, list[float]]:
        """The summed loss, the gradient norm and the choices of each expert, of the whole global batch."""
        with self._communicating("step"):
            square = local_square_norm(self.model.parameters)
            counts = self.model.module.take_counts()
            once = self.model.counts_results
            loss_sum, square, *counts = self.agreement.sum(
                loss_sum if once else 0.0, square, *(count * once for count in counts)
            )
        return loss_sum, sqrt(square) / self.loss_scale.value, counts

    def _update(self, learning_rate: float, clip: float, expert_counts: list[float]) -> None:
        """Steps the optimizer and the routers' biases; then gathers the parameters that the next forward reads."""
        with self.recorder.phase("optimizer"):
            with self._computing():
                self.optimizer.step(learning_rate, clip / self.loss_scale.value)
                self.model.unsent.clear()
                self.model.module.balance(expert_counts)
            with self.clock.measure("communication"):
                self.model.data.updated()

    @contextmanager
    def _communicating(self, phase: Phase) -> Iterator[None]:
        """Time inside is communication; its traffic is recorded under `phase`."""
        with self.recorder.phase(phase), self.clock.measure("communication"):
            yield

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Time inside is compute, except for what communication exposes of it."""
        exposed = self.recorder.exposed_seconds
        with self.clock.measure("compute"):
            yield
        self.clock.move(self.recorder.exposed_seconds - exposed, "compute", "communication")


def local_square_norm(parameters: Sequence[LocalParameter]) -> float:
    """This rank's share of the squared norm of the whole gradient. Summed over the ranks each element counts once:
    a part that several ranks hold counts 1 / copies on each of them.

    On CPUs torch accumulates a tensor's norm in the tensor's own type: in float32, over 20 million elements, the result
    is a thousandth too small. So norms are taken of pieces of `NORM_PIECE` elements and accumulated in float64.
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
    """Choices of the busiest expert over the mean of its layer, for the most unbalanced layer; None without choices.

    Args:
        counts: choices of every expert, layer by layer; zeros for layers without experts.
    """
    layers = [counts[start : start + experts] for start in range(0, len(counts), max(experts, 1))]
    return max((max(layer) * experts / sum(layer) for layer in layers if sum(layer)), default=None)


def clip_coefficient(grad_norm: float, limit: float) -> float:
    """The factor that brings a gradient of norm `grad_norm` down to `limit` (0 = no limit).

    min(1, limit / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it, so that results compare.
    """
    return min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
