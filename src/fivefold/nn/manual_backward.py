"""When autograd functions with a hand-written backward replace torch's operations."""

import torch
from torch import Tensor


def uses_manual_backward(x: Tensor) -> bool:
    """Whether the functions in this package that have a hand-written backward apply to `x`: float32 and float64, on
    a CPU, in eager mode.

    There every torch operation is a pass over memory whose inputs autograd saves; a hand-written backward needs fewer
    passes and saves less. Accelerators have fused kernels, a compiler fuses by itself, and bf16 and fp16 need the same
    casts in the same order as torch's operations.
    """
    exact = x.dtype in (torch.float32, torch.float64)
    return exact and x.device.type == "cpu" and not torch.compiler.is_compiling()
