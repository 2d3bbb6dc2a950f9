"""Chains: the elementwise work between two matrix products, which is what `machine.compile` compiles.

Products, attention and communication stay as they are: they are kernels already, and a compiler could only reorder
them. So compiled layers run in every layout, a schedule may split their backward as it splits the eager one, and each
chain saves what its hand-written counterpart does: its inputs, and sums along rows; of dropout the keys, not the mask.
"""

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


class Chain(Generic[P, R]):
    """A function of this rank's tensors that computes elementwise or along rows.

    Compiled, it is compiled once for each shape of its arguments that training has, for all layers together; torch
    stops at eight and runs further ones eagerly. Passes without gradients, whose shapes vary, stay eager.

    Args:
        rows_vary: the number of rows differs in every call: compiled once for any number (and for none or one).
    """

    def __init__(self, function: Callable[P, R], *, rows_vary: bool = False) -> None:
        self.eager = self._trained = function
        self._rows_vary = rows_vary

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        function = self._trained if torch.is_grad_enabled() else self.eager
        return function(*args, **kwargs)

    def compile(self) -> None:
        self._trained = torch.compile(self.eager, dynamic=self._rows_vary)


def compile_chains(module: nn.Module) -> None:
    """Compiles every chain in `module`, for backwards that may run in two parts. In the whole process what was compiled
    before, for another model, is forgotten, and torch keeps buffers that a backward could reuse."""
    import torch._functorch.config as functorch

    torch.compiler.reset()
    # What a backward would overwrite, its second part still needs.
    functorch.donated_buffer = False
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Chain):
                value.compile()
