"""Data parallel: replicas (zero 0), ZeRO (zero 1, 2, 3; Rajbhandari 2020), and hybrid sharding (replicas of shards).

Each decoder layer has a bucket, embedding, final norm and head share one, and experts have buckets of their own. They
are fixed before the first step, so gradients are summed in the same order in every step. Gradients are plain sums over
the data and context ranks: the loss is already divided by the token count of the whole global batch.

Reductions overlap backward: one starts as soon as a bucket's last gradient is there. Parameters are gathered one layer
ahead, in forward and in backward (zero 3) or after the update (zero 1 and 2), and waited for where they are used.
The collectives are the backend's or a program's (`parallel.algorithm`): synchronise.py. Twin: ledger/data.py.
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
"""Reduce-scatters under way at once, in buckets: two layers with experts. Each holds a bucket's unsharded gradients."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of the parameters that forward and backward read."""
    return DTYPES[precision.dtype]


def master_dtype(precision: Precision) -> torch.dtype:
    """The dtype of master weights, gradient sums and optimizer state: float32, or float64 under float64."""
    return torch.promote_types(DTYPES[precision.dtype], torch.float32)


class Unit:
    """A module (the root or a layer) whose parameters are gathered, resharded and reduced together."""

    def __init__(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        self.module = module
        self.buckets = buckets

    def start_gather(self) -> None:
        for bucket in self.buckets:
            bucket.start_gather()

    def finish_gather(self) -> None:
        for bucket in self.buckets:
            bucket.finish_gather()

    def reshard(self) -> None:
        for bucket in self.buckets:
            bucket.reshard()


class DataParallel:
    """Data parallel around a rank's part of the model: what communicates when.

    Args:
        units: the root first (its parameters are needed throughout a pass), then the layers in forward order.
        overlap: communicate from hooks in forward and backward. False under a pipeline: parameters are gathered before
            the step and kept, gradients stay unsharded until its end.
    """

    def __init__(self, units: Sequence[Unit], zero: int, overlap: bool) -> None:
        self.units = units
        self.zero = zero
        self.overlap = overlap
        # Called after each backward, before anything is reduced or resharded.
        self.after_backward: Callable[[], None] | None = None
        self._last = True
        self._under_way: deque[Bucket] = deque()
        self._recorder = Recorder()  # until `begin_step` gives the run's
        self.buckets = [bucket for unit in units for bucket in unit.buckets]
        if not overlap:
            return
        for bucket in self.buckets:
            bucket.on_complete(self._complete)
        if any(bucket.gathers for bucket in self.buckets):
            for index, unit in enumerate(units):
                self._hook_gathers(index, unit)

    def begin_step(self, recorder: Recorder) -> None:
        """Before the first forward; without overlap, gathers the parameters. `recorder` counts the reductions."""
        self._recorder = recorder
        if not self.overlap:
            self.begin_micro_step(last=True)
            self._gather()

    def begin_micro_step(self, last: bool) -> None:
        """Before each micro-batch; `last`: it is the step's last."""
        self._last = last
        for bucket in self.buckets:
            bucket.begin_backward()

    def end_micro_step(self) -> None:
        """After each backward: waits for the reductions it has started."""
        if self.after_backward is not None:
            self.after_backward()
        for bucket in self.buckets:
            self._reduce_if_due(bucket)
        for bucket in self.buckets:
            bucket.accumulate()
        self._under_way.clear()

    def end_step(self) -> None:
        """After the last backward: sums gradients over all data ranks, into `grad` of the buckets' values."""
        if not self.overlap:
            self.end_micro_step()
            self.reshard()
        for bucket in self.buckets:
            bucket.reduce_replicas()
        for bucket in self.buckets:
            bucket.finish()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keeps parameters gathered inside the block: for forwards of a pipeline outside a step."""
        self._gather()
        try:
            yield
        finally:
            self.reshard()

    def updated(self) -> None:
        """After the values have changed: refreshes the parameters (zero 3 gathers them when they are used)."""
        for bucket in self.buckets:
            bucket.refresh(gather=self.zero < 3)

    def reshard(self) -> None:
        """Frees the gathered parameters under zero 3."""
        for unit in self.units:
            unit.reshard()

    def clear_gradients(self) -> None:
        """Drops all gradients."""
        for bucket in self.buckets:
            bucket.clear()

    def parameter_tensors(self) -> list[Tensor]:
        """The parameters this rank holds: its shards under zero 3 (with a pipeline also the gathered ones), else those
        that forward reads."""
        return [tensor for bucket in self.buckets for tensor in self._kept(bucket)]

    def master_tensors(self) -> list[Tensor]:
        """The shards or master copies that the optimizer updates."""
        return [value for bucket in self.buckets for value in bucket.values]

    def _kept(self, bucket: Bucket) -> list[nn.Parameter]:
        if self.zero < 3 or not bucket.gathers:
            return bucket.parameters
        return bucket.values if self.overlap else [*bucket.values, *bucket.parameters]

    def gradient_tensors(self) -> list[Tensor]:
        """The gradients this rank holds, except those in a reduction under way."""
        return [tensor for bucket in self.buckets for tensor in bucket.gradient_tensors()]

    def compression_tensors(self) -> Iterator[Tensor]:
        """The error feedback that compression keeps for the next step."""
        for bucket in self.buckets:
            if bucket.compressor is not None:
                yield from bucket.compressor.memory.tensors()

    def _gather(self) -> None:
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.finish_gather()

    def _complete(self, bucket: Bucket) -> None:
        """A bucket's last gradient of this backward is there."""
        self._reduce_if_due(bucket)
        bucket.reshard()

    def _reduce_if_due(self, bucket: Bucket) -> None:
        if not bucket.is_due(self._last):
            return
        # Else unsharded gradients would pile up.
        if self.zero and len(self._under_way) == MOST_UNDER_WAY:
            self._under_way.popleft().accumulate()
        with self._recorder.phase("gradient"):
            bucket.reduce()
        self._under_way.append(bucket)

    def _hook_gathers(self, index: int, unit: Unit) -> None:
        """Gathers a unit's parameters before its forward and its backward, and meanwhile starts the next unit's."""
        following, preceding = self.units[index + 1 : index + 2], self.units[index - 1 : index]
        is_root = index == 0

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            unit.finish_gather()
            for neighbour in following:
                neighbour.start_gather()

        def before_backward(_gradient: Tensor) -> None:
            unit.finish_gather()
            if index > 1:
                for neighbour in preceding:
                    neighbour.start_gather()

        def after_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if is_root and torch.is_grad_enabled():
                return
            unit.reshard()
            if torch.is_grad_enabled():
                hidden = output if isinstance(output, Tensor) else output[0]
                hidden.register_hook(before_backward)

        unit.module.register_forward_pre_hook(before_forward)
        unit.module.register_forward_hook(after_forward)
