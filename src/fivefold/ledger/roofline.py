"""Seconds of one kernel on one device: the slower of arithmetic and memory traffic."""

from math import ceil

from fivefold.ledger.hardware import Device
from fivefold.ledger.job import Job
from fivefold.ledger.operations import Core, Matmul
from fivefold.ledger.physics import Physics


def matmul_seconds(
    op: Matmul, precision: str, itemsize: int, device: Device, physics: Physics, extra_bytes: float = 0.0
) -> float:
    """Roofline of a matmul (Williams 2009): FLOPs over the sustained rate of whole tiles, or bytes over
    bandwidth. `extra_bytes` are moved by the same kernel (an accumulated gradient)."""
    rate = device.matmul_of(precision) * physics.sustained_matmul
    tile_m, tile_n = physics.tile
    padded = ceil(op.m / tile_m) * tile_m * ceil(op.n / tile_n) * tile_n
    waste = min(padded / (op.m * op.n), 2.0)
    if op.m * op.n >= 16 * tile_m * tile_n:
        waste = 1.0 + (waste - 1.0) / 2  # smaller tiles exist for the edges
    arithmetic = op.flops * waste / rate
    moved = (op.m * op.k + op.k * op.n + op.m * op.n) * op.batch * itemsize + extra_bytes
    return max(arithmetic, moved / (device.bandwidth * physics.memory_rate)) + physics.matmul_ramp


def stream_seconds(moved: float, device: Device, physics: Physics) -> float:
    """Memory-bound kernels that move `moved` bytes."""
    if device.is_cpu:  # no kernel to fill: a loop runs at its rate from the start
        return moved / (device.bandwidth * physics.memory_rate)
    return (moved + physics.small_read) / (device.bandwidth * physics.memory_rate) if moved else 0.0


def core_seconds(core: Core, job: Job) -> tuple[float, float]:
    """(forward, backward) of softmax(QKᵀ)V. Fused kernels skip masked blocks and recompute the scores in the
    backward (5 matmuls against 2); unfused ones compute and store all scores."""
    if job.stack.attention == "unfused":
        return _unfused(core, job)
    physics, device = job.physics, job.hardware.device
    rate = device.attention[job.stack.attention]
    if device.is_cpu:  # measured in training, at the lengths CPUs train on
        forward = core.causal_flops / rate
        return forward, (2.0 if job.stack.attention == "blocked" else 2.5) * forward
    rate *= physics.sustained_attention
    block = core.keys / (job.cp if job.context == "ring" else 1)  # a ring works block by block
    rate *= block / (block + physics.attention_half)
    rate *= core.qk_dim / (ceil(core.qk_dim / 8) * 8)  # heads are padded to whole tensor-core tiles
    forward = core.causal_flops / rate + physics.matmul_ramp
    return forward, 2.5 * core.causal_flops / (rate * physics.attention_backward) + physics.matmul_ramp


def _unfused(core: Core, job: Job) -> tuple[float, float]:
    device, physics, item = job.hardware.device, job.physics, job.itemsize
    batch = core.batch * core.heads
    scores = Matmul("QKᵀ", core.queries, core.keys, core.qk_dim, batch)
    values = Matmul("PV", core.queries, core.v_dim, core.keys, batch)
    products = sum(
        matmul_seconds(op, "bf16" if item == 2 else job.precision, item, device, physics)
        for op in (scores, values)
    )
    if core.qk_dim % 8 and not device.is_cpu:
        products /= physics.misaligned
    elements = float(batch * core.queries * core.keys)
    dropped = (2 * item + 1) if job.stack.dropout else 0
    fused = job.stack.fused_softmax
    apart = 8 * 4 if not fused or batch % fused else 0
    forward = elements * (2 * item + dropped + apart)
    backward = elements * (3 * item + dropped + apart)
    return (
        products + stream_seconds(forward, device, physics),
        2 * products + stream_seconds(backward, device, physics),
    )
