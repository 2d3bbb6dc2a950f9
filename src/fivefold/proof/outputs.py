"""What the modules inside a module give out, on ranks and in one process: where a wrong loss comes from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.proof.compare import kind_of

MOST_ELEMENTS = 1 << 20
"""A larger output is not kept: it would travel between processes."""
CLOSE = 1e-10
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """The name that a module or parameter has without torch's wrappers around it."""
    inner = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return inner.removeprefix("module.")


@contextmanager
def kept_outputs(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While it lasts, fills the dictionary with what each inner module gives out first, in forward order."""
    found: dict[str, Tensor] = {}

    def keeping(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(_module: nn.Module, _given: object, output: object) -> None:
            if name in found or not isinstance(output, Tensor) or isinstance(output, DTensor):
                return
            if output.is_floating_point() and output.numel() <= MOST_ELEMENTS:
                found[name] = output.detach().clone()

        return hook

    named = {plain_name(name): inner for name, inner in module.named_modules() if name not in ("", "module")}
    handles = [inner.register_forward_hook(keeping(name)) for name, inner in named.items() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_divergence(
    of_ranks: Sequence[Mapping[str, Tensor]], alone: Mapping[str, Tensor]
) -> tuple[str, str | None] | None:
    """The first inner module, in forward order, whose output cannot come from the whole one, and what kind of wrong
    it is where that can be told.

    On ranks an output may be the whole, a piece of it in any division and order, or a term of a sum or mean. What has
    other shapes, or is not on every rank, is not judged.
    """
    for name, whole in alone.items():
        pieces = [outputs[name] for outputs in of_ranks if name in outputs]
        if len(pieces) < len(of_ranks):
            continue
        if all(piece.shape == whole.shape for piece in pieces):
            total = sum(pieces[1:], pieces[0])
            if any(_close(found, whole) for found in (total, total / len(pieces))):
                continue
            return name, kind_of(pieces[0], whole)
        together = torch.cat([piece.flatten() for piece in pieces])
        if together.numel() != whole.numel() or _close(together.sort().values, whole.flatten().sort().values):
            continue
        return name, None
    return None


def _close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).norm()) <= CLOSE * max(float(expected.norm()), 1e-300)
