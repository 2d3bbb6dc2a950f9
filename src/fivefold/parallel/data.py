"""Data parallel: replicas (zero 0), ZeRO (zero 1, 2, 3; Rajbhandari 2020), and replicas of shards (hybrid).

One bucket per decoder layer and one for embedding, final norm and head (of experts, one more each): fixed before
the first step and never rebuilt, so a gradient is summed in the same order in every step. Gradients are plain
sums over the data and context ranks: the loss is already divided by the token count of the whole global batch.

Reductions start while backward goes on, as soon as a bucket's last gradient is there. Parameters are gathered one
layer ahead: in forward and in backward (zero 3), or after the update (zero 1 and 2), waited for where they are used.
What carries out both, the backend or a program (`parallel.algorithm`): synchronise.py.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.collectives.record import Recorder
from fivefold.config.tree import Precision
from fivefold.parallel.bucket import Bucket

MOST_UNDER_WAY = 4
"""Buckets whose gradients may be on their way to their shards at once: two layers' with experts."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """The type of the parameters that forward and backward see."""
    return DTYPES[precision.dtype]


def master_dtype(precision: Precision) -> torch.dtype:
    """The type of parameters, gradients' sums and optimizer state: float32, or float64 under float64."""
    return torch.promote_types(DTYPES[precision.dtype], torch.float32)


class Unit:
    """A module whose parameters are gathered, dropped and reduced together."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.module = module
        self.buckets = buckets

    def start_gather(self) -> None:
        for bucket in self.buckets:
            bucket.start_gather()

    def ready(self) -> None:
        for bucket in self.buckets:
            bucket.ready()

    def drop(self) -> None:
        for bucket in self.buckets:
            bucket.drop()


class DataParallel:
    """The data axes around a rank's part of the model, and when they communicate.

    Args:
        units: the root first (what is needed from the beginning to the end of a pass), then the layers in
            forward order.
        overlap: communicate from within forward and backward. Under a pipeline it is False: parameters are gathered
            before the step and kept, gradients are whole until its end.
    """

    def __init__(self, units: Sequence[Unit], zero: int, overlap: bool) -> None:
        self.units = units
        self.zero = zero
        self.overlap = overlap
        # Who is told of it, before anything is reduced or dropped.
        self.after_backward: Callable[[], None] | None = None
        self._last = True
        self._under_way: deque[Bucket] = deque()
        self._recorder = Recorder()  # until a step brings its own
        self.buckets = [bucket for unit in units for bucket in unit.buckets]
        if not overlap:
            return
        for bucket in self.buckets:
            bucket.on_complete(self._complete)
        if any(bucket.gathers for bucket in self.buckets):
            for index, unit in enumerate(units):
                self._watch(index, unit)

    def begin_step(self, recorder: Recorder) -> None:
        """Without overlap: gathers what the step needs. `recorder` is told what backward reduces."""
        self._recorder = recorder
        if not self.overlap:
            self.begin_micro_step(last=True)
            self._gather()

    def begin_micro_step(self, last: bool) -> None:
        """Before a backward: says whether it is the step's last."""
        self._last = last
        for bucket in self.buckets:
            bucket.begin()

    def end_micro_step(self) -> None:
        """After a backward: waits for what it has started."""
        if self.after_backward is not None:
            self.after_backward()
        for bucket in self.buckets:
            self._reduce_if_due(bucket)
        for bucket in self.buckets:
            bucket.accumulate()
        self._under_way.clear()

    def end_step(self) -> None:
        """After the last backward: gradients become sums over all data ranks, in the values' `grad`."""
        if not self.overlap:
            self.end_micro_step()
            self.drop()
        for bucket in self.buckets:
            bucket.reduce_replicas()
        for bucket in self.buckets:
            bucket.finish()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Forwards of a pipeline outside a step: parameters are there inside the block."""
        self._gather()
        try:
            yield
        finally:
            self.drop()

    def updated(self) -> None:
        """After the values have changed: what forward sees follows. zero 1 and 2 gather, zero 3 waits for its use."""
        for bucket in self.buckets:
            bucket.refresh(gather=self.zero < 3)

    def drop(self) -> None:
        """Frees the gathered parameters that zero 3 does not keep."""
        for unit in self.units:
            unit.drop()

    def clear_gradients(self) -> None:
        """Drops all gradients."""
        for bucket in self.buckets:
            bucket.clear()

    def parameter_tensors(self) -> list[Tensor]:
        """The parameters this rank holds: with zero 3 its shards (under a pipeline what is gathered for the step, too),
        else what forward sees."""
        return [tensor for bucket in self.buckets for tensor in self._kept(bucket)]

    def master_tensors(self) -> list[Tensor]:
        """The shards or master copies this rank holds besides."""
        return [value for bucket in self.buckets for value in bucket.values]

    def _kept(self, bucket: Bucket) -> list[nn.Parameter]:
        if self.zero < 3 or not bucket.gathers:
            return bucket.parameters
        return bucket.values if self.overlap else [*bucket.values, *bucket.parameters]

    def gradient_tensors(self) -> list[Tensor]:
        """The gradients this rank holds; what a reduction has on its way is a message."""
        return [tensor for bucket in self.buckets for tensor in bucket.gradient_tensors()]

    def compression_tensors(self) -> Iterator[Tensor]:
        """What compression keeps for the next step."""
        for bucket in self.buckets:
            if bucket.compressor is not None:
                yield from bucket.compressor.memory.tensors()

    def _gather(self) -> None:
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.ready()

    def _complete(self, bucket: Bucket) -> None:
        """A bucket's last gradient of this backward is there."""
        self._reduce_if_due(bucket)
        bucket.drop()

    def _reduce_if_due(self, bucket: Bucket) -> None:
        if not bucket.is_due(self._last):
            return
        # Else gradients that zero splits would pile up whole.
        if self.zero and len(self._under_way) == MOST_UNDER_WAY:
            self._under_way.popleft().accumulate()
        with self._recorder.phase("gradient"):
            bucket.reduce()
        self._under_way.append(bucket)

    def _watch(self, index: int, unit: Unit) -> None:
        """Gathers a unit's parameters before its forward and before its backward, the neighbour's meanwhile."""
        following, preceding = self.units[index + 1 : index + 2], self.units[index - 1 : index]
        is_root = index == 0

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            unit.ready()
            for neighbour in following:
                neighbour.start_gather()

        def before_backward(_gradient: Tensor) -> None:
            unit.ready()
            if index > 1:
                for neighbour in preceding:
                    neighbour.start_gather()

        def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if is_root and torch.is_grad_enabled():
                return
            unit.drop()
            if torch.is_grad_enabled():
                hidden = output if isinstance(output, Tensor) else output[0]
                hidden.register_hook(before_backward)

        unit.module.register_forward_pre_hook(before_forward)
        unit.module.register_forward_hook(after_forward)
