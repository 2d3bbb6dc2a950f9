"""Seconds of one layer, and of embedding and head, for one micro-batch on one rank: forward, input gradient,
weight gradient, each with the communication that compute does not hide."""

from typing import NamedTuple

from fivefold.ledger import context, expert, tensor
from fivefold.ledger.job import Job
from fivefold.ledger.operations import Layer, Matmul, head, layer
from fivefold.ledger.roofline import core_seconds, matmul_seconds, stream_seconds
from fivefold.ledger.simulate import StageTimes
from fivefold.ledger.traffic import Row


class Work(NamedTuple):
    """Compute seconds of one micro-batch, and traffic rows with what of them is exposed."""

    forward: float
    input_grad: float
    weight_grad: float
    rows: tuple[Row, ...]

    @property
    def times(self) -> StageTimes:
        """Compute and exposed traffic together."""
        forward = sum(r.exposed_seconds for r in self.rows if r.phase == "forward")
        backward = sum(r.exposed_seconds for r in self.rows if r.phase == "backward")
        return StageTimes(self.forward + forward, self.input_grad + backward, self.weight_grad)


def layer_work(job: Job, is_expert: bool) -> Work:
    """One decoder layer."""
    work = layer(job, is_expert)
    matmuls = sum(_matmul(job, op) for op in work.matmuls)
    weights = sum(_weight_grad(job, op) for op in work.matmuls)
    core_forward, core_backward = core_seconds(work.core, job)
    stream = _stream(job, work.streamed)
    forward = matmuls + core_forward + stream
    backward = matmuls + core_backward + 1.5 * stream
    rows = [*tensor.layer_rows(job, is_expert), *context.layer_rows(job, work.core, is_expert)]
    rows += expert.layer_rows(job) if is_expert else []
    rows = [_hide(job, item, matmuls, core_forward) for item in rows]
    again = {
        "none": 0.0,
        "attention": core_forward,
        "elementwise": stream
        + (matmuls / 2 if job.stack.keep_every > 1 else 0.0)
        + (core_forward if job.stack.attention == "blocked" else 0.0),
        "full": forward,
    }[job.recompute]
    if job.recompute == "full" and job.stack.early_stop:
        again -= _matmul(job, work.matmuls[-1])
    if job.recompute == "full" and not job.stack.reruns_traffic:
        again += sum(r.exposed_seconds for r in rows if r.phase == "forward")
    return _host_bound(job, work, Work(forward, backward + again, weights, tuple(rows)))


def _host_bound(job: Job, work: Layer, seconds: Work) -> Work:
    """An eager host launches kernels one by one: no pass is faster than its launches."""
    if job.stack.graphs:
        return seconds
    launch = job.physics.launch * work.kernels
    again = {"full": launch, "elementwise": launch / 2}.get(job.recompute, 0.0)
    total = seconds.input_grad + seconds.weight_grad
    late = max(0.0, 2 * launch + again - total)
    return seconds._replace(forward=max(seconds.forward, launch), input_grad=seconds.input_grad + late)


def _matmul(job: Job, op: Matmul) -> float:
    device = job.hardware.device
    found = matmul_seconds(op, job.precision, job.itemsize, device, job.physics)
    return found + _cast(job, op)


def _cast(job: Job, op: Matmul) -> float:
    """Quantising both operands of an 8-bit or 4-bit matmul: read at 2 bytes, written twice (a transpose)."""
    if job.precision not in ("fp8", "fp4"):
        return 0.0
    narrow = {"fp8": 1.0, "fp4": 0.5}[job.precision]
    moved = op.m * op.k * op.batch * (job.itemsize + 2 * narrow)
    return stream_seconds(moved, job.hardware.device, job.physics)


def _weight_grad(job: Job, op: Matmul) -> float:
    """[k, m] by [m, n], and the accumulated gradient read and written."""
    turned = Matmul(op.name, op.k, op.n, round(op.m) or 1, op.batch)
    extra = 2.0 * job.stack.gradient * op.k * op.n * op.batch
    return matmul_seconds(turned, job.precision, job.itemsize, job.hardware.device, job.physics, extra)


def _stream(job: Job, moved: float) -> float:
    return stream_seconds(moved, job.hardware.device, job.physics)


def _hide(job: Job, item: Row, matmuls: float, core: float) -> Row:
    """What of a layer's traffic its own compute hides: tensor traffic under matmuls where the stack overlaps
    it, and expert traffic likewise; ring attention's messages under the blocks of attention."""
    backward = job.stack.overlap_tensor_backward and item.phase == "backward"
    if item.axis == "tp" and (job.stack.overlap_tensor or backward):
        hidden = min(item.seconds * job.physics.tensor_overlap, matmuls)
        return item.exposing(item.seconds - (1 - job.physics.sharing) * hidden)
    if item.axis == "ep" and job.stack.overlap_experts:
        window = matmuls if item.phase == "forward" else 2 * matmuls
        hidden = min(item.seconds, window)
        return item.exposing(item.seconds - (1 - job.physics.sharing) * hidden)
    if item.axis == "cp" and item.primitive == "send":
        window = core if item.phase == "forward" else 2 * core
        return item.exposing(item.seconds - window)
    return item


def edge_work(job: Job, first: bool, last: bool) -> Work:
    """Embedding on the first stage, final norm, head and loss on the last.

    An unfused cross-entropy moves 38 bytes a logit forward (cast, maximum, difference, exponential, sum,
    quotient in float32; so measured: layer_times.tsv, vp_256k_2k last stage less middle stage), 8 backward.
    """
    forward = backward = weights = 0.0
    model, rows = job.model, job.tokens
    if first:
        moved = float(rows * model.hidden * (2 * job.itemsize + (1 if job.stack.dropout else 0)))
        forward += _stream(job, moved)
        weights += _stream(job, moved + rows * model.hidden * job.stack.gradient)
    if last:
        op = head(job)
        plain = matmul_seconds(
            op, "bf16" if job.itemsize == 2 else job.precision, job.itemsize, job.hardware.device, job.physics
        )
        logits = op.m * op.n
        passes = 10.0 if job.stack.fused_loss else 38.0
        forward += plain + _stream(job, logits * passes)
        backward += plain + _stream(job, logits * 8.0)
        weights += plain
    return Work(forward, backward, weights, tuple(tensor.edge_rows(job, first, last)))
