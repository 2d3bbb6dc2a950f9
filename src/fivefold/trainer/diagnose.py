"""Where a number that is not finite came from: the first module, rank, micro-batch and samples."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.parallel.apply import ParallelModel
from fivefold.trainer.batches import MicroBatch


def first_non_finite(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> str:
    """One line on the origin of a non-finite loss or gradient. Collective; called while gradients still stand.

    The forward is run again with every module's output looked at. If all outputs are finite the fault arose in
    backward, and the last parameter in forward order whose gradient is not finite was the first to be reached.
    """
    found = _in_forward(model.module, micro_batches) or _in_gradients(model)
    reports: list[str | None] = [found]
    if dist.is_initialized():
        reports = [None] * dist.get_world_size()
        dist.all_gather_object(reports, found)
    told = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report]
    return (
        told[0] + (f" (and {len(told) - 1} more ranks)" if len(told) > 1 else "")
        if told
        else "not found again"
    )


def _in_forward(module: nn.Module, micro_batches: Sequence[MicroBatch]) -> str | None:
    culprits: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not culprits and not bool(output.isfinite().all()):
                culprits.append(name)

        return hook

    hooks = [part.register_forward_hook(watch(name or "loss")) for name, part in module.named_modules()]
    report = None
    try:
        with torch.no_grad():
            for index, batch in enumerate(micro_batches):
                module(batch.tokens, batch.segments, batch.labels)
                if culprits and report is None:
                    report = (
                        f"output of {culprits[0]} in forward, micro-batch {index}, "
                        f"samples {', '.join(map(str, batch.sample_ids))}"
                    )
    finally:
        for hook in hooks:
            hook.remove()
    return report


def _in_gradients(model: ParallelModel) -> str | None:
    for parameter in reversed(model.parameters):
        gradient = parameter.gradient()
        if gradient is not None and not bool(gradient.isfinite().all()):
            return f"gradient of {parameter.spec.name} in backward"
    return None
