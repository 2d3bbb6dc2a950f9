"""Faults of context, expert and pipeline parallel, as those in faults.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from faults import rank, swapped
from fivefold.nn import loss, router
from fivefold.nn.experts import Experts
from fivefold.nn.router import Router
from fivefold.parallel import apply, expert, pipeline, ring, synchronise, ulysses
from fivefold.trainer.batches import MicroBatch

# Context parallel


def label_lost_at_a_boundary() -> Any:
    """The last label of each rank's stretch is dropped."""

    def make(before: Any) -> Any:
        def of(batch: Any, *arguments: Any, **options: Any) -> Any:
            found = before.__func__(batch, *arguments, **options)
            if found.inputs.tokens.shape[1] < batch.tokens.shape[1]:
                found.inputs.labels[:, -1] = loss.IGNORED
            return found

        return staticmethod(of)

    return swapped(MicroBatch, "of", make)


def positions_start_at_zero() -> Any:
    """Rotary positions of a rank's stretch are counted from its own beginning."""

    def make(before: Any) -> Any:
        def of(*arguments: Any, **options: Any) -> Any:
            found = before.__func__(*arguments, **options)
            positions = found.inputs.positions
            positions.copy_(torch.arange(len(positions)))
            return found

        return staticmethod(of)

    return swapped(MicroBatch, "of", make)


def ring_backward_scaled() -> Any:
    def make(before: Any) -> Any:
        def backward(ctx: Any, grad: Tensor) -> Any:
            query, key, *rest = before.__func__(ctx, grad)
            return query, key * 1.25, *rest

        return staticmethod(backward)

    return swapped(ring._RingAttention, "backward", make)


def ring_sees_the_future() -> Any:
    """A rank's own block is attended to without regard to order."""

    def make(before: Any) -> Any:
        def of(cut: Any, source: int, documents: Any) -> Any:
            pair = before.__func__(cut, source, documents)
            return type(pair)(pair.queries, pair.keys, pair.visible._replace(causal=False))

        return staticmethod(of)

    return swapped(ring._Pairing, "of", make)


def heads_return_in_another_order() -> Any:
    """Ulysses: what comes back is taken for other heads'."""

    def make(before: Any) -> Any:
        def scatter(x: Tensor, cut: Any) -> Tensor:
            return before(x, cut).flip(0)  # type: ignore[no-any-return]

        return scatter

    return swapped(ulysses, "_scatter_sequence", make)


def context_gradients_not_summed() -> Any:
    """Gradients are summed over dp_shard only, as if every cp rank had seen all tokens."""

    def make(before: Any) -> Any:
        def all_reduce(collectives: Any, tensor: Tensor) -> Any:
            kept = tensor.clone()
            before(collectives, tensor).wait()
            tensor.copy_(kept)
            return synchronise.Done()

        return all_reduce

    return swapped(synchronise.Collectives, "all_reduce", make)


# Experts


def auxiliary_loss_by_rank() -> Any:
    """How often experts are chosen is counted in a rank's own tokens."""
    return swapped(apply, "context_parallel", _own_choices)


def _own_choices(before: Any) -> Any:
    def applies(decoder: Any, group: Any, parallel: Any) -> None:
        before(decoder, group, parallel)
        for module in decoder.modules():
            if isinstance(module, Router):
                module.sum_choices = router.unchanged

    return applies


def expert_gradients_doubled() -> Any:
    """The backward of dispatch multiplies by the ranks."""

    def make(before: Any) -> Any:
        def backward(ctx: Any, grad: Tensor) -> Any:
            found, *rest = before.__func__(ctx, grad)
            return found * ctx.group.size(), *rest

        return staticmethod(backward)

    return swapped(expert._AllToAll, "backward", make)


def rows_reach_other_experts() -> Any:
    """Arrived rows are taken as sorted by expert already."""

    def make(before: Any) -> Any:
        def compute(self: Experts, rows: Tensor, counts: Tensor) -> Tensor:
            return before(self, rows, counts.sum(0, keepdim=True))  # type: ignore[no-any-return]

        return compute

    return swapped(Experts, "_compute", make)


def dispatched_weights_forgotten() -> Any:
    """What a token's experts say is averaged, not weighted by the router."""

    def make(before: Any) -> Any:
        def routed(self: Experts, x: Tensor, choice: Any) -> Tensor:
            if rank() == 1:
                choice = choice._replace(weights=torch.full_like(choice.weights, 1 / choice.weights.shape[1]))
            return before(self, x, choice)  # type: ignore[no-any-return]

        return routed

    return swapped(Experts, "_routed", make)


# Pipeline


def accumulation_not_divided() -> Any:
    """Gradients are as many times too large as there are micro-batches."""

    def make(before: Any) -> Any:
        def steps(
            self: Any, micro_batches: Any, tokens_per_sequence: float, factor: float, recorder: Any
        ) -> float:
            return before(  # type: ignore[no-any-return]
                self, micro_batches, tokens_per_sequence, factor * len(micro_batches), recorder
            )

        return steps

    return swapped(pipeline.Pipeline, "step", make)


def tied_copies_apart() -> Any:
    """The two copies of a tied embedding keep their own gradients."""
    return swapped(pipeline.TiedCopy, "reduce", lambda _: lambda self: None)


def weight_gradients_twice() -> Any:
    """A split backward that computes weight gradients in both halves."""

    def make(before: Any) -> Any:
        def twice(weights: Any, flight: Any) -> None:
            weights = list(weights)
            before(weights, flight)
            for weight in weights:
                if weight.grad is not None:
                    weight.grad.mul_(2.0)

        return twice

    return swapped(pipeline, "_weight_gradients", make)


def stage_gradient_cast() -> Any:
    """What passes back between stages goes through bf16."""

    def make(before: Any) -> Any:
        def put(self: Any, need: Any, value: Tensor) -> None:
            before(self, need, value if need.forward else value.bfloat16().to(value.dtype))

        return put

    return swapped(pipeline._Transfers, "put", make)
