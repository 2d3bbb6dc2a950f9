"""A tiny model and batches for parity tests, and the training of one process that layouts are held against.

The reference shares the decoder's forward with what is tested and nothing else: no micro-batches, no process group,
torch's own unfused optimizer, torch's own clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from fivefold.collectives.dispatch import DispatchRecorder
from fivefold.collectives.record import Recorder
from fivefold.config.model import Model
from fivefold.config.tree import Batch, Config, Optimizer, Parallel, Precision, Run, Schedule
from fivefold.data.rows import Batch as Rows
from fivefold.nn.attention import Segments
from fivefold.nn.decoder import Decoder
from fivefold.nn.dropout import step_key
from fivefold.nn.inputs import Inputs
from fivefold.observe.clock import StepClock
from fivefold.parallel.apply import ParallelModel, parallelize
from fivefold.parallel.data import master_dtype
from fivefold.parallel.mesh import Groups, groups
from fivefold.planner.jobs import hardware_of
from fivefold.proof.gather import wholes
from fivefold.spec.legal import Resolved, resolve_config
from fivefold.spec.parameters import parameters
from fivefold.trainer import machine
from fivefold.trainer.agreement import Agreement
from fivefold.trainer.batches import held_out_share
from fivefold.trainer.loss_scale import LossScale
from fivefold.trainer.optimizer import LocalOptimizer
from fivefold.trainer.session import torch_backend
from fivefold.trainer.state import tensors
from fivefold.trainer.step import Stepper

CPU = torch.device("cpu")
SEQUENCE = 12
FLAGS = (
    0.0,
    0.0,
)  # a stop asked for, no save under way: what the run's loop sends along with the token count
# 50 vocabulary rows, 40 columns and 2 KV heads of 6 do not divide by 3 or by 4.
MODEL = Model(layers=2, hidden=24, heads=4, kv_heads=2, ffn=40, vocab=50, init_std=0.2)


def toy_config(
    *,
    global_batch: int = 12,
    micro_batch: int = 1,
    sequence: int = SEQUENCE,
    dtype: str = "float64",
    steps: int = 5,
    **parallel: Any,
) -> Config:
    return Config(
        model=MODEL,
        parallel=Parallel(**parallel),
        batch=Batch(global_batch=global_batch, micro_batch=micro_batch, sequence_length=sequence),
        precision=Precision(dtype=dtype),  # type: ignore[arg-type]
        optimizer=Optimizer(lr=3e-3, clip=0.5),
        schedule=Schedule(warmup_tokens=2 * global_batch * sequence),
        run=Run(steps=steps, seed=7),
    )


def global_batch(config: Config, step: int) -> Rows:
    """The whole batch of a step: rows packed from documents, and labels masked very unevenly (some rows have none)."""
    rows, vocab, length = config.batch.global_batch, config.model.vocab, config.batch.sequence_length
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab, (rows, length), generator=generator)
    labels = torch.randint(vocab, (rows, length), generator=generator)
    kept = torch.randint(length + 1, (rows,), generator=generator)
    kept[step % rows], kept[(step + 1) % rows] = 0, length
    labels[torch.arange(length) >= kept.unsqueeze(1)] = -100
    boundary = torch.randint(1, length, (rows, 1), generator=generator)
    documents = (torch.arange(length) >= boundary).int() * (torch.arange(rows) % 3 > 0).int().unsqueeze(1)
    return Rows(tokens, labels, documents)


def full(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def gradients(model: ParallelModel) -> dict[str, Tensor]:
    """Whole gradients, on every rank."""
    return wholes(
        {p.spec.name: p.piece(p.value.grad) for p in model.parameters if p.value.grad is not None}
    ).tensors


def start_group(wrapped: bool = True) -> Recorder:
    """The default group of a test's rank; the environment is that of `ranks.Ranks(backend=None)`.

    Args:
        wrapped: records, over the backend that training uses by default; otherwise plain gloo, of which a
            dispatch mode may record.
    """
    recorder, timeout = Recorder(), timedelta(seconds=60)
    backend = machine.default_backend(CPU)
    dist.init_process_group(torch_backend(backend, CPU, recorder, timeout) if wrapped else "gloo")
    return recorder


def stepper_on(resolved: Resolved, recorder: Recorder) -> Stepper:
    rank = dist.get_rank() if dist.is_initialized() else 0
    config = replace(resolved.config, run=replace(resolved.config.run, ranks=resolved.mesh.world_size))
    on_axes = groups(resolved, rank, hardware_of(config).fast_domain)  # hosts as the ledger has them
    model = parallelize(resolved, on_axes, rank, CPU)
    optimizer = LocalOptimizer(resolved.config.optimizer, model.parameters)
    clip, scale = resolved.config.optimizer.clip, LossScale.of(resolved.config.precision)
    return Stepper(model, optimizer, Agreement(CPU), recorder, StepClock(), scale, clip)


def permuted(batch: Rows, seed: int) -> Rows:
    """The same rows in another order, so that micro-batches hold others; seed 0 = as they are."""
    if not seed:
        return batch
    order = torch.randperm(len(batch.tokens), generator=torch.Generator().manual_seed(seed))
    return Rows(batch.tokens[order], batch.labels[order], batch.documents[order])


def train_on_ranks(
    rank: int,
    world_size: int,
    config: Config,
    permutation: int = 0,
    wrapped: bool = True,
    batches: Sequence[Rows] = (),
) -> dict[str, Any]:
    """Trains in the layout of `config`, on `batches` or on those of `global_batch`; whole tensors from every rank."""
    recorder = start_group(wrapped)
    resolved = resolve_config(config, world_size)
    stepper = stepper_on(resolved, recorder)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "rows": [], "optimizer": config.optimizer}
    found["initial"] = wholes({p.spec.name: p.piece(p.value) for p in stepper.model.parameters}).tensors

    def keep_gradients(model: ParallelModel) -> None:
        if "gradients" not in found:
            with recorder.paused():
                found["gradients"] = gradients(model)

    for step in range(config.run.steps):
        recorder.clear()
        rows = permuted(batches[step] if batches else global_batch(config, step), permutation)
        data_rank, key = resolved.mesh.data_rank(rank), step_key(config.run.seed, step)
        share = held_out_share(rows, resolved.batch, data_rank, CPU, resolved.spans(rank), key)
        lr = resolved.learning_rate.at((step + 1) * resolved.batch.global_batch_tokens)
        with nullcontext() if wrapped else DispatchRecorder(recorder):
            result = stepper.step(share, lr, FLAGS, keep_gradients)
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)
        found["rows"].append(recorder.rows())
    state = wholes(tensors(stepper.model, stepper.optimizer))
    assert not state.disagreeing, f"replicas differ: {state.disagreeing}"
    found["state"] = state.tensors
    return found


def reference(config: Config, batches: Sequence[Rows] = ()) -> dict[str, Any]:
    """The same training in this process: one batch, one backward, unfused AdamW."""
    config = replace(config, parallel=Parallel(recompute=config.parallel.recompute))
    resolved = resolve_config(config)
    master = master_dtype(config.precision)
    decoder = Decoder(config.model).to(master)
    source = parallelize(resolved, Groups(), 0, CPU)
    decoder.load_state_dict(source.module.state_dict())
    roles = {spec.name: spec.role for spec in parameters(config.model)}
    named = dict(decoder.named_parameters())
    options = config.optimizer
    groups = [
        {
            "params": [p for n, p in named.items() if (roles[n] in options.no_decay) == kept],
            "weight_decay": decay,
        }
        for kept, decay in ((False, options.weight_decay), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, foreach=False)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "optimizer": config.optimizer}
    found["initial"] = {name: full(parameter) for name, parameter in named.items()}
    for step in range(config.run.steps):
        batch = batches[step] if batches else global_batch(config, step)
        segments, count = Segments.from_documents(batch.documents), max(batch.loss_tokens, 1)
        inputs = Inputs(batch.tokens, segments, batch.labels, dropout_key=step_key(config.run.seed, step))
        loss = decoder(inputs, count / len(batch.tokens)) / count
        loss.backward()
        if step == 0:
            found["gradients"] = {n: full(p.grad) for n, p in named.items()}  # type: ignore[arg-type]
        norm = torch.nn.utils.clip_grad_norm_(named.values(), options.clip)
        for group in optimizer.param_groups:
            group["lr"] = resolved.learning_rate.at((step + 1) * resolved.batch.global_batch_tokens)
        optimizer.step()
        decoder.balance(decoder.take_counts())
        optimizer.zero_grad()
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm.item())
    buffers = dict(decoder.named_buffers())
    found["state"] = {f"model.{n}": full(p) for n, p in (named | buffers).items()}
    for name, parameter in named.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            found["state"][f"optimizer.{name}.{moment}"] = full(optimizer.state[parameter][moment])
    return found
