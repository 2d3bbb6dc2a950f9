"""Fivefold's own step, as `fivefold train` takes it: its machine choices, process group, clock and clipping."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch

from fivefold.config.model import Experts, Model
from fivefold.config.tree import Batch, Config, Machine, Parallel
from fivefold.data.rows import Batch as Rows
from fivefold.spec.legal import check_trainable, resolve_config
from fivefold.trainer import machine
from fivefold.trainer.batches import MicroBatch
from fivefold.trainer.loop import Loop
from fivefold.trainer.place import place_from
from fivefold.trainer.session import open_session
from side_by_side.sizes import Size


def model_of(size: Size) -> Model:
    experts = Experts(count=size.experts, top_k=2, ffn=size.expert_ffn) if size.experts else Experts()
    return Model(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.kv_heads,
        ffn=size.ffn,
        vocab=size.vocab,
        experts=experts,
    )


def make(
    size: Size,
    parallel: dict[str, Any],
    replicas: int,
    micro_batches: int,
    given: dict[str, Any] | None,
) -> Callable[[], None]:
    """A function that takes one optimizer step on this rank. `given`: a resolved [machine], or None: measure."""
    config = Config(
        model=model_of(size),
        parallel=Parallel(**parallel),
        batch=Batch(
            global_batch=size.micro_batch * replicas * micro_batches,
            micro_batch=size.micro_batch,
            sequence_length=size.sequence,
        ),
        machine=Machine(**given) if given else Machine(),
    )
    place = place_from(os.environ)
    resolved = resolve_config(config, place.world_size if place else 1)
    check_trainable(resolved)
    session = open_session(place, config.parallel.backend, 300.0).__enter__()  # ends with the process
    chosen = session.from_main(
        lambda: machine.measure(config.machine, config.precision.dtype, session.device)[0]
    )
    machine.apply(chosen)
    resolved = replace(resolved, config=msgspec.structs.replace(config, machine=chosen))
    loop = Loop(session, resolved, None, None, lambda: False)  # type: ignore[arg-type]  # neither data nor checkpoints
    shares = [_micro_batch(size, 7 * number + loop.data_rank, loop) for number in range(micro_batches)]
    return lambda: _step(loop, shares)


def _step(loop: Loop, shares: list[MicroBatch]) -> None:
    result = loop.stepper.step(shares, 3e-4)
    assert result.skipped is None


def _micro_batch(size: Size, seed: int, loop: Loop) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(size.vocab, (size.micro_batch, size.sequence + 1), generator=generator)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    whole = Rows(tokens, labels, torch.zeros_like(tokens, dtype=torch.int32))
    return MicroBatch.of(
        whole,
        loop.session.device,
        sequences=loop.resolved.config.batch.global_batch,
        spans=loop.resolved.spans(loop.session.rank),
    )
