"""Where a non-finite value came from: the first module, rank, micro-batch and samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fivefold.config.model import Model
from fivefold.parallel.apply import ParallelModel
from fivefold.spec.parameters import parameters
from fivefold.trainer.batches import MicroBatch


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """Where one rank first finds a non-finite value; the smallest finding of all ranks is the origin."""

    in_backward: bool
    micro_batch: int
    depth: tuple[int, int]
    text: str


def first_non_finite(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> str:
    """One line on the origin of a non-finite loss or gradient. Collective; called before gradients are cleared.

    Runs the forward again and checks every module's output. If all are finite, the value arose in backward, and its
    first non-finite gradient is that of the last such parameter in forward order.
    """
    found = _in_forward(model, micro_batches) or _in_gradients(model)
    findings: list[Finding | None] = [found]
    if dist.is_initialized():
        findings = [None] * dist.get_world_size()
        dist.all_gather_object(findings, found)
    told = [(finding, rank) for rank, finding in enumerate(findings) if finding]
    if not told:
        return "not found again when the step was repeated"
    finding, rank = min(told)
    return f"rank {rank}: {finding.text}"


def _in_forward(model: ParallelModel, micro_batches: Sequence[MicroBatch]) -> Finding | None:
    culprits: list[str] = []  # in the order the modules end

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and not bool(first.isfinite().all()):
                culprits.append(name)

        return hook

    module = model.module
    names = list(_as_they_end(module))
    hooks = [part.register_forward_hook(watch(name)) for name, part in module.named_modules()]
    found = None
    try:
        for index, batch in enumerate(micro_batches):
            model.evaluate([batch])
            if culprits and found is None:
                samples = ", ".join(map(str, batch.sample_ids))
                text = f"output of {culprits[0] or 'the loss'} in forward, micro-batch {index}, samples {samples}"
                place = _layer(module.model, culprits[0]), names.index(culprits[0])
                found = Finding(False, index, place, text)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _as_they_end(module: nn.Module, name: str = "") -> Iterator[str]:
    """Names of a module and its children in the order in which their forwards end, children first: a rank whose part
    of a module fails should come before one that sees only the module's output."""
    for part, child in module.named_children():
        yield from _as_they_end(child, f"{name}.{part}" if name else part)
    yield name


def _in_gradients(model: ParallelModel) -> Finding | None:
    place = {spec.name: number for number, spec in enumerate(parameters(model.module.model))}
    for parameter in reversed(model.parameters):
        gradient = parameter.gradient()
        if gradient is not None and not bool(gradient.isfinite().all()):
            name = parameter.spec.name
            return Finding(True, 0, (-place[name], 0), f"gradient of {name} in backward")
    return None


def _layer(model: Model, module: str) -> int:
    """The position of a module in the whole model, comparable between pipeline ranks."""
    kind, _, rest = module.partition(".")
    if kind == "layers":
        return int(rest.partition(".")[0])
    return model.layers if kind in ("norm", "head", "") else -1
