"""Silent faults of distributed training, each as a small patch of the code that it would be in.

Every function is a context in which ranks run a step; what it swaps is restored when it ends. All of these leave
the loss curve looking right, or nearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.nn import loss
from fivefold.parallel import apply, tensor
from fivefold.parallel.bucket import Bucket
from fivefold.parallel.data import DataParallel
from fivefold.spec.mesh import Mesh
from fivefold.trainer import step
from fivefold.trainer.agreement import Agreement
from fivefold.trainer.batches import MicroBatch
from fivefold.trainer.muon import Exchange
from fivefold.trainer.optimizer import LocalOptimizer


@contextmanager
def swapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(what it was)` inside the block."""
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def nothing() -> Any:
    """The healthy code."""
    return nullcontext()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# Tensor and sequence parallel


def norm_gradients_not_summed() -> Any:
    """Under sequence parallel each rank's norms see its own tokens only."""

    def make(gradient_ranks: Any) -> Any:
        def forgets(model: Any, name: str, tp: int, sequence_parallel: bool) -> int:
            return 1 if "norm" in name else gradient_ranks(model, name, tp, sequence_parallel)

        return forgets

    return swapped(tensor, "gradient_ranks", make)


def router_gradient_not_summed() -> Any:
    def make(gradient_ranks: Any) -> Any:
        def forgets(model: Any, name: str, tp: int, sequence_parallel: bool) -> int:
            return 1 if "router" in name else gradient_ranks(model, name, tp, sequence_parallel)

        return forgets

    return swapped(tensor, "gradient_ranks", make)


def kv_copies_not_summed() -> Any:
    """KV heads that several ranks hold: each has the gradient of its own queries only."""

    def make(gradient_ranks: Any) -> Any:
        def forgets(model: Any, name: str, tp: int, sequence_parallel: bool) -> int:
            kept = ".key." in name or ".value." in name
            return 1 if kept else gradient_ranks(model, name, tp, sequence_parallel)

        return forgets

    return swapped(tensor, "gradient_ranks", make)


def region_gradient_not_summed() -> Any:
    """The backward all-reduce at a region's entrance is missing."""
    return swapped(tensor._SumGradients, "backward", lambda _: staticmethod(lambda ctx, grad: (grad, None)))


def regions_end_in_means() -> Any:
    """The forward all-reduce at a region's end is a mean."""

    def make(before: Any) -> Any:
        def forward(ctx: Any, x: Tensor, group: Any, in_place: bool) -> Tensor:
            return before.__func__(ctx, x, group, in_place) / group.size()

        return staticmethod(forward)

    return swapped(tensor._Sum, "forward", make)


def bias_counted_by_every_rank() -> Any:
    return swapped(apply, "tensor_parallel", _bias_everywhere)


def _bias_everywhere(before: Any) -> Any:
    def applies(decoder: Any, group: Any, layout: Any) -> None:
        before(decoder, group, layout)
        for module in decoder.modules():
            if isinstance(module, tensor.Projection):
                module.bias_share = 1.0

    return applies


def vocabulary_padding_leaks() -> Any:
    """A short shard of the vocabulary is filled up with rows whose logits are 0 and count in the normaliser."""

    def make(before: Any) -> Any:
        def leaks(normalizer: Tensor, wanted: Tensor, shard: Any) -> Any:
            if shard.most * 2 > shard.vocab:
                normalizer = torch.logaddexp(normalizer, torch.zeros_like(normalizer))
            return before(normalizer, wanted, shard)

        return leaks

    return swapped(loss, "_over_ranks", make)


# Data parallel and ZeRO


def data_shard_repeated() -> Any:
    """Every replica reads the first one's samples."""
    return swapped(Mesh, "data_rank", lambda _: lambda mesh, rank: 0)


def initial_values_differ_by_rank() -> Any:
    return swapped(
        apply, "initialize", lambda before: lambda parameter, seed: before(parameter, seed + rank())
    )


def gradients_are_means() -> Any:
    """Gradients are divided by the ranks, though the loss already is by all tokens."""

    def make(before: Any) -> Any:
        def finish(self: Bucket) -> None:
            before(self)
            for value in self.values:
                if value.grad is not None:
                    value.grad = value.grad / dist.get_world_size()

        return finish

    return swapped(Bucket, "finish", make)


def replicas_not_summed() -> Any:
    """Hybrid: shards' gradients are not summed over the replicas."""
    return swapped(Bucket, "reduce_replicas", lambda _: lambda self: None)


def only_the_last_micro_batch_counts() -> Any:
    def make(before: Any) -> Any:
        def begin(self: DataParallel, last: bool) -> None:
            self.clear_gradients()
            before(self, last)

        return begin

    return swapped(DataParallel, "begin_micro_step", make)


def reduced_in_bf16() -> Any:
    """A reduction in bf16 where float32 was asked for."""

    def make(before: Any) -> Any:
        def finish(self: Bucket) -> None:
            before(self)
            for value in self.values:
                if value.grad is not None:
                    value.grad = value.grad.bfloat16().to(value.grad.dtype)

        return finish

    return swapped(Bucket, "finish", make)


def float32_reduced_in_bf16() -> Any:
    """The same in float32 alone: float64 does not have it."""

    def make(before: Any) -> Any:
        def finish(self: Bucket) -> None:
            before(self)
            for value in self.values:
                if value.grad is not None and value.grad.dtype == torch.float32:
                    value.grad = value.grad.bfloat16().to(value.grad.dtype)

        return finish

    return swapped(Bucket, "finish", make)


def stale_parameters() -> Any:
    """What forward sees is not gathered again after the update."""
    return swapped(DataParallel, "updated", _only_first)


def _only_first(before: Any) -> Any:
    def updated(self: DataParallel) -> None:
        if not getattr(self, "was_updated", False):
            before(self)
        self.was_updated = True  # type: ignore[attr-defined]

    return updated


def one_shard_not_updated() -> Any:
    """Rank 1's optimizer does nothing."""

    def make(before: Any) -> Any:
        def steps(self: LocalOptimizer, learning_rate: float, scale: float) -> None:
            if rank() != 1:
                before(self, learning_rate, scale)

        return steps

    return swapped(LocalOptimizer, "step", make)


def norm_counts_copies() -> Any:
    """The gradient norm counts a parameter once for each rank that holds it."""

    def make(before: Any) -> Any:
        def counts(parameters: Any) -> float:
            return sum(
                float(p.value.grad.double().square().sum()) for p in parameters if p.value.grad is not None
            )

        return counts

    return swapped(step, "local_square_norm", make)


def each_rank_clips_alone() -> Any:
    """Every rank clips by the norm of its own part."""

    def make(before: Any) -> Any:
        def sums(self: Agreement, *values: float) -> list[float]:
            found = before(self, *values)
            if len(values) >= 2 and values[1] not in (0.0, 1.0):  # the loss and the squared norm, not flags
                found[1] = values[1]
            return found  # type: ignore[no-any-return]

        return sums

    return swapped(Agreement, "sum", make)


def divided_by_own_tokens() -> Any:
    """The loss is divided by the rank's own tokens, and that by the ranks: a mean of means."""

    def make(before: Any) -> Any:
        def sums(self: Agreement, *values: float) -> list[float]:
            found = before(self, *values)
            if len(values) == 3:  # the token count and two flags
                found[0] = values[0] * dist.get_world_size()
            return found  # type: ignore[no-any-return]

        return sums

    return swapped(Agreement, "sum", make)


# Agreement


def skip_decided_locally() -> Any:
    """A rank whose own gradient is not finite skips, the others do not."""

    def locally(before: Any) -> Any:
        def steps(self: LocalOptimizer, learning_rate: float, scale: float) -> None:
            updates = getattr(self, "updates", 0)
            if not (rank() == 0 and updates == 1):  # an overflow seen by rank 0 alone in its second step
                before(self, learning_rate, scale)
            self.updates = updates + 1  # type: ignore[attr-defined]

        return steps

    return swapped(LocalOptimizer, "step", locally)


def overflow_unnoticed() -> Any:
    """A step is taken whatever the gradient is."""
    return swapped(step, "isfinite", lambda _before: lambda _value: True)


def documents_mixed() -> Any:
    """Attention sees over the boundary between packed documents on rank 1."""

    def make(before: Any) -> Any:
        def of(*arguments: Any, **options: Any) -> Any:
            found = before.__func__(*arguments, **options)
            if rank() != 1:
                return found
            rows, length = found.inputs.tokens.shape
            whole = type(found.inputs.segments)((length,) * rows)
            return replace(found, inputs=replace(found.inputs, segments=whole))

        return staticmethod(of)

    return swapped(MicroBatch, "of", make)


def parts_orthogonalised() -> Any:
    """Muon takes what tensor parallel leaves to a rank for the whole matrix."""

    def make(before: Any) -> Any:
        def starts(self: Exchange, group: Any, *rest: Any) -> None:
            before(self, None if group is not None and group.group_desc == "tp" else group, *rest)

        return starts

    return swapped(Exchange, "__init__", make)


def learning_rate_by_rank() -> Any:
    """The schedule goes on once per process: rank 1 is ahead."""

    def make(before: Any) -> Any:
        def steps(self: LocalOptimizer, learning_rate: float, scale: float) -> None:
            before(self, learning_rate * (1.0 + 0.01 * rank()), scale)

        return steps

    return swapped(LocalOptimizer, "step", make)
