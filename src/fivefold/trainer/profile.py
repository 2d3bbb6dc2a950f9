"""Memory by category in one step, each category at its peak."""

from __future__ import annotations

from dataclasses import asdict
from typing import Self

from fivefold.observe.memory import MemoryByCategory, SavedActivations, memory_by_category
from fivefold.parallel.apply import ParallelModel
from fivefold.trainer.optimizer import LocalOptimizer


class StepProfile:
    """Measures one step of a model on this rank; a context manager around it.

        with StepProfile(model, optimizer) as profile:
            stepper.step(..., inspect=profile.inspect)
        profile.memory

    Gradients, and parameters gathered for a pipeline, peak when a backward has ended and none of its reductions has
    finished; buffers of reductions in progress count as messages, not as gradients. Activations are the tensors that
    autograd and selective recomputation save for backward.
    """

    def __init__(self, model: ParallelModel, optimizer: LocalOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._activations = SavedActivations(
            [*model.module.parameters(), *model.data.master_tensors(), *model.module.buffers()]
        )
        self._samples: list[MemoryByCategory] = []

    @property
    def memory(self) -> MemoryByCategory:
        """Peak bytes of each category."""
        samples = [asdict(sample) for sample in self._samples]
        return MemoryByCategory(**{name: max(sample[name] for sample in samples) for name in samples[0]})

    def inspect(self, _model: ParallelModel) -> None:
        """For `Stepper.step`: gradients are whole and parameters still the old ones."""
        self._sample()

    def __enter__(self) -> Self:
        self._model.data.after_backward = self._sample
        self._model.module.recomputing.kept = self._activations.hold
        self._activations.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._activations.__exit__(*exception)
        self._model.data.after_backward = self._model.module.recomputing.kept = None

    def _sample(self) -> None:
        model, data = self._model, self._model.data
        self._samples.append(
            memory_by_category(
                parameters=data.parameter_tensors(),
                gradients=data.gradient_tensors(),
                optimizer=[
                    *data.master_tensors(),
                    *self._optimizer.state_tensors(),
                    *data.compression_tensors(),
                ],
                buffers=model.module.buffers(),
                activations=self._activations.peak_bytes,
            )
        )
