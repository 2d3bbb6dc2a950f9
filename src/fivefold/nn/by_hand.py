"""Where the functions with a backward of their own are used instead of torch's operations."""

import torch
from torch import Tensor


def by_hand(x: Tensor) -> bool:
    """Whether the functions of this room that are written for CPUs apply to `x`.

    In eager mode on a CPU each of torch's operations is a pass over memory, and autograd keeps what each of them
    needs: a backward written by hand has fewer of both. Other devices have kernels of their own, a compiler fuses
    better, and types below float32 need their casts in the order that torch makes them.
    """
    exact = x.dtype in (torch.float32, torch.float64)
    return exact and x.device.type == "cpu" and not torch.compiler.is_compiling()
