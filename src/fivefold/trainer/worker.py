"""What one rank (worker process) does from start to end: settle the config, prepare data, train, finish."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
import torch

from fivefold.config.tree import Config
from fivefold.data.mixture import Mixture
from fivefold.data.shards import prepare
from fivefold.data.store import TokenStore, open_store
from fivefold.nn.hub.weights import given_weights
from fivefold.observe.facts import EndFacts, SourceFacts, StartFacts
from fivefold.observe.observer import open_observer
from fivefold.observe.progress import PreparationProgress
from fivefold.spec.legal import Resolved
from fivefold.trainer import machine
from fivefold.trainer.checkpoint import Checkpointer
from fivefold.trainer.directory import CHECKPOINTS, TOKENIZER, choose_directory, write_run
from fivefold.trainer.loop import Loop
from fivefold.trainer.place import Place
from fivefold.trainer.session import Session, open_session
from fivefold.trainer.stop import StopSignal

T = TypeVar("T")
SAMPLE_PROMPT = "def "


@dataclass(frozen=True, slots=True)
class _Settled:
    """What rank 0 decides for all ranks: the config with measured settings, the run directory, the token stores."""

    config: Config
    directory: Path
    tokens: tuple[Path, ...]
    machine_reason: str

    def write(self, resume: bool) -> None:
        """Writes it into the run directory. On rank 0 only."""
        write_run(self.directory, self.config, self.tokens[0] / TOKENIZER, resume=resume)


def run_worker(resolved: Resolved, place: Place | None, resume: bool) -> bool:
    """One rank's whole run. Collective. Returns True if the last step is done, False if the run was stopped.

    Raises:
        BadInput: the data or the run directory cannot be used.
        RunError: the run cannot continue.
    """
    config = resolved.config
    with (
        StopSignal() as stop,
        open_session(place, config.parallel.backend, config.run.timeout_seconds) as session,
    ):
        settled = session.from_main(
            lambda: _settle(config, choose_directory(config.run, resume), session.device)
        )
        stop.listen()
        if not resume:
            session.from_main(lambda: settled.write(resume))
        loop, stores = _build(session, resolved, settled, stop)
        checkpoints = loop.checkpoints
        if resume:
            loop.restore()
            if session.is_main and loop.saved_step is None:
                print(f"{settled.directory}: no checkpoint there yet; the run begins with its first step")
            if loop.counters.step >= config.run.steps:
                _say_done(loop, settled)
                checkpoints.close()
                return True
            # Only now, so that a refused resume changes nothing.
            session.from_main(lambda: settled.write(resume))
        if loop.saved_step is None and (weights := given_weights(config.model)):
            loop.start_from(weights)
        loop.observer = open_observer(
            settled.config,
            settled.directory,
            rank=session.rank,
            stream=sys.stdout,
            start_step=loop.counters.step,
        )
        with loop.observer:
            ended = _train(loop, settled, stores, stop)
        checkpoints.close()
    return ended == "done"


def first_steps(resolved: Resolved, place: Place | None, take: Callable[[Loop], T]) -> T:
    """Calls `take` with a run that is ready for its first step, and returns its result. Collective.

    Leaves nothing behind but the prepared data. The run directory is temporary and lies beside the data, where all
    ranks can see it.

    Raises:
        BadInput: the data cannot be used.
    """
    config = resolved.config
    with (
        ExitStack() as stack,
        StopSignal() as stop,
        open_session(place, config.parallel.backend, config.run.timeout_seconds) as session,
    ):
        settled = session.from_main(lambda: _settle_briefly(config, session.device, stack.enter_context))
        stop.listen()
        loop, _ = _build(session, resolved, settled, stop)
        if weights := given_weights(config.model):
            loop.start_from(weights)
        found = take(loop)
        loop.checkpoints.close()
        return found


def _settle_briefly(
    config: Config, device: torch.device, enter: Callable[[TemporaryDirectory[str]], str]
) -> _Settled:
    """As `_settle`, in a temporary directory, which the context entered by `enter` removes."""
    settled = _settle(config, Path(), device)
    beside = settled.tokens[0].parent
    directory = enter(TemporaryDirectory(prefix=".account-", dir=beside, ignore_cleanup_errors=True))
    return replace(settled, directory=Path(directory))


def _build(
    session: Session, resolved: Resolved, settled: _Settled, stop: StopSignal
) -> tuple[Loop, list[TokenStore]]:
    """The loop before its first step, and the token stores it reads."""
    config = settled.config
    resolved = replace(resolved, config=config)
    if note := machine.apply(config.machine):
        print(f"rank {session.rank}: {note}", file=sys.stderr)
    stores = [open_store(directory) for directory in settled.tokens]
    samples = Mixture(stores, config.data, resolved.batch.sequence_length, config.run.seed)
    checkpoints = Checkpointer(settled.directory / CHECKPOINTS, config.checkpoint)
    return Loop(session, resolved, samples, checkpoints, lambda: bool(stop)), stores


def _settle(config: Config, directory: Path, device: torch.device) -> _Settled:
    """Prepares the data and measures the machine. On rank 0; nothing is written into the run directory yet."""
    stores = prepare(config.data, config.model.vocab, PreparationProgress(sys.stdout))
    measured, reason = machine.measure(config.machine, config.precision.dtype, device)
    run = msgspec.structs.replace(config.run, dir=str(directory))
    config = msgspec.structs.replace(config, run=run, machine=measured)
    return _Settled(config, directory, tuple(store.directory for store in stores), reason)


def _say_done(loop: Loop, settled: _Settled) -> None:
    if loop.session.is_main:
        print(
            f"{settled.directory}: step {loop.counters.step} of run.steps = {settled.config.run.steps} is done; "
            "train on with a larger one: --set run.steps=N"
        )


def _train(loop: Loop, settled: _Settled, stores: Sequence[TokenStore], stop: StopSignal) -> str:
    """Trains, and reports start and end; returns how it ended."""
    observer, start_tokens, started = loop.observer, loop.counters.tokens, time.monotonic()
    entropy = loop.samples.unigram_entropy() if loop.session.is_main else 0.0
    observer.start(_start_facts(loop, settled, stores, entropy))
    ended = loop.run()
    seconds = time.monotonic() - started
    sample = ""
    count = settled.config.run.sample_tokens
    if count and ended == "done":
        tokenizer = stores[0].tokenizer()
        prompt = tokenizer.encode([SAMPLE_PROMPT])[0]
        sample = SAMPLE_PROMPT + tokenizer.decode(loop.sample(prompt, count))
    observer.finish(
        EndFacts(
            ended=f"stopped by {stop.name}" if stop.name else ended,
            step=loop.counters.step,
            loss=loop.last_loss,
            evaluation_loss=loop.last_evaluation,
            unigram_entropy=entropy,
            tokens=loop.counters.tokens - start_tokens,
            seconds=seconds,
            checkpoint=loop.last_checkpoint,
            sample=sample,
            next_commands=_next_commands(settled.directory, ended),
        )
    )
    return ended


def _start_facts(loop: Loop, settled: _Settled, stores: Sequence[TokenStore], entropy: float) -> StartFacts:
    session, chosen = loop.session, settled.config.machine
    return StartFacts(
        resolved=loop.resolved,
        directory=settled.directory,
        start_step=loop.counters.step,
        sources=[
            SourceFacts(kept.source, share, kept.documents, kept.tokens, kept.skipped_files, passes)
            for kept, share, passes in zip(
                (store.manifest for store in stores),
                loop.samples.shares,
                loop.samples.passes(loop.resolved.samples),
                strict=True,
            )
        ],
        unigram_entropy=entropy,
        device=f"{machine.settings_text(chosen, session.device)}, {session.backend}",
        matmul=settled.machine_reason
        or f"matmul {chosen.matmul}, malloc {chosen.malloc}: as measured at the first start",
        peak_flops=chosen.peak_flops,
        peak_source="fastest matmul measured at the first start",
    )


def _next_commands(directory: Path, ended: str) -> list[tuple[str, str]]:
    if ended != "done":
        return [(f"fivefold train {directory} --resume", "go on from the checkpoint")]
    return [
        (f'fivefold generate {directory} --prompt "import "', "text from the trained model"),
        (f"fivefold train {directory} --resume --set run.steps=N", "train on"),
        (
            "fivefold train quickstart --set parallel.zero=3 --set parallel.dp_shard=2",
            "the same, fully sharded",
        ),
        ("fivefold config explain", "every key there is"),
    ]
