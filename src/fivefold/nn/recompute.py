"""What backward recomputes instead of keeping: torch's non-reentrant checkpointing at the chosen depth."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

P = ParamSpec("P")
R = TypeVar("R")

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


class Recompute:
    """Wraps the functions a mode recomputes.

    none: nothing. attention: the attention core. elementwise: everything in a layer but the outputs of
    projections and fused attention. full: everything in a layer but its input.
    """

    def __init__(self, mode: Literal["none", "attention", "elementwise", "full"]) -> None:
        self.mode = mode

    def attention(self, function: Callable[P, R]) -> Callable[P, R]:
        """The attention core under this mode."""
        return _checkpointed(function) if self.mode == "attention" else function

    def layer(self, function: Callable[P, R]) -> Callable[P, R]:
        """A decoder layer's forward under this mode."""
        if self.mode == "full":
            return _checkpointed(function)
        if self.mode == "elementwise":
            context = partial(create_selective_checkpoint_contexts, _keep_matmuls)
            return _checkpointed(function, context_fn=context)
        return function


def _checkpointed(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    # Nothing here draws from the global generator (dropout is a function of the step), so its state need not
    # be saved.
    return cast(
        Callable[P, R],
        partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, **options),
    )


def _keep_matmuls(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
