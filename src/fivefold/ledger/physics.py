"""Constants of devices and networks in training: one set for every model, layout and software stack.

Each has its source, or says that it is fitted (by `fivefold validate`'s rows, all at once, never to one
source).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Physics:
    """Attributes:

    sustained_matmul: part of the best measured matmul rate (a minute on an idle device) that remains in
        training, where power, clocks and other kernels share. Fitted.
    matmul_ramp: seconds a matmul loses in filling and draining the device: a 1024³ fp16 product takes 18 µs
        on an A100 where its rate allows 8 (kernels.tsv, cuBLASLt).
    tile: rows and columns of the output tile a multiprocessor computes; partial tiles and waves are lost.
    memory_rate: part of the datasheet bandwidth that streams reach (STREAM copy: A100 0.79, H100 0.87).
    small_read: bytes at which a memory-bound kernel reaches half of that rate. Fitted.
    sustained_attention: as sustained_matmul, for attention kernels. Fitted.
    attention_half: sequence length at which flash attention reaches half its best rate (FA2 curves).
    attention_backward: backward of fused attention runs at this part of the forward's rate (FA2, FA3 curves).
    misaligned: part of the rate that is left to the batched products of unfused attention when a head's width
        is no multiple of 8 elements: they leave the tensor cores. Fitted to the head-count sweep of BLOOM,
        whose heads of 108 and 150 run that way.
    sharing: slowdown of compute under a concurrent collective (Calculon: 15 % of SMs for NVLink; 2 % IB).
    tensor_overlap: part of tensor-parallel traffic that a stack which overlaps it hides. Fitted.
    gradient_window: part of the backward in which an overlapping stack can hide gradient traffic. Fitted.
    collective_ramp: bytes at which a collective between nodes reaches half its bandwidth (collectives.tsv,
        aws_p5 and b200x32 curves).
    launch: seconds of host time per kernel in an eager stack; steps are never faster than their launches.
    expert_kernels, local_expert_kernels: launches (host synchronisations counted as launches) of an expert
        layer's routing and exchange, and of each local expert. Fitted.
    step: seconds per optimizer step outside of all else: data, logging, scalar reductions. Fitted.
    context_bytes: device context, libraries and communicators outside of the allocator (0.5 to 1 GiB, and
        buffers per communicator; measured runs state about 1.5 GB on V100 and A100).
    fragmentation: part of activations and buffers the allocator reserves without use (3 to 10 %).
    """

    sustained_matmul: float = 0.83
    matmul_ramp: float = 6e-6
    tile: tuple[int, int] = (128, 256)
    memory_rate: float = 0.85
    small_read: float = 3e6
    sustained_attention: float = 0.6
    attention_half: float = 450.0
    attention_backward: float = 0.8
    misaligned: float = 0.08
    sharing: float = 0.07
    tensor_overlap: float = 0.75
    gradient_window: float = 0.9
    collective_ramp: float = 1e7
    launch: float = 7.5e-6
    expert_kernels: float = 500.0
    local_expert_kernels: float = 12.0
    step: float = 0.02
    context_bytes: float = 1.8e9
    fragmentation: float = 0.08
