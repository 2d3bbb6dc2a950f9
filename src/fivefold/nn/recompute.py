"""Activation recomputation: torch's non-reentrant checkpointing in the chosen mode."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fivefold.nn.expert_swiglu import EXPERT_PRODUCTS
from fivefold.nn.grouped import ROWS_TIMES

P = ParamSpec("P")
R = TypeVar("R")

_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._grouped_mm.default,
        ROWS_TIMES,
        EXPERT_PRODUCTS,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


class Recompute:
    """Wraps the functions that a mode recomputes in backward.

    none: nothing. attention: the attention core. elementwise: everything in a layer except the outputs of projections
    and fused attention. full: everything in a layer; only its input is saved.

    `kept`, if set, is called with every tensor that "elementwise" saves, which autograd's saved-tensor hooks do not
    see.
    """

    def __init__(self, mode: Literal["none", "attention", "elementwise", "full"]) -> None:
        self.mode = mode
        self.kept: Callable[[torch.Tensor], None] | None = None

    def attention(self, function: Callable[P, R]) -> Callable[P, R]:
        """The attention core under this mode."""
        return _checkpointed(function) if self.mode == "attention" else function

    def layer(self, function: Callable[P, R]) -> Callable[P, R]:
        """A decoder layer's forward under this mode."""
        if self.mode == "full":
            return _checkpointed(function)
        if self.mode == "elementwise":
            context = partial(create_selective_checkpoint_contexts, self._keep_matmuls)
            return _checkpointed(function, context_fn=context)
        return function

    def _keep_matmuls(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in _KEPT:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if self.kept is not None and not context.is_recompute:
            for tensor in tree_leaves(context.op_output):
                if isinstance(tensor, torch.Tensor):
                    self.kept(tensor)
        return CheckpointPolicy.MUST_SAVE


def _checkpointed(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    # Nothing here draws from the global generator (dropout is a function of the step), so its state need not
    # be saved.
    return cast(
        Callable[P, R],
        partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, **options),
    )
