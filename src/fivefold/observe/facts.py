"""What the start page and the end page tell, as data. The trainer fills it in on rank 0."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.spec.legal import Resolved


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A source of data.

    Attributes:
        path: where it lies.
        share: of all samples, the part that comes from it.
        documents: in it.
        tokens: in them.
        skipped_files: left out because they are not UTF-8 text.
        passes: how often the whole run goes through its training samples.
    """

    path: str
    share: float
    documents: int
    tokens: int
    skipped_files: int
    passes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """A run before its first step.

    Attributes:
        resolved: the config with mesh, batch arithmetic and learning rate.
        directory: the run directory.
        start_step: optimizer steps already done by the run that is resumed; 0 = a new one.
        sources: what is trained on.
        unigram_entropy: of their tokens, in nats: the loss of a model that knows frequencies and no context.
        device: what computes, e.g. "CPU, 1 thread a rank, gloo".
        matmul: the chosen matmul path and why, e.g. "highest: 92 GFLOP/s against 61 for medium".
        peak_flops: FLOP/s of one rank that MFU is stated against; `peak_source` says where it comes from.
    """

    resolved: Resolved
    directory: Path
    start_step: int = 0
    sources: Sequence[SourceFacts]
    unigram_entropy: float
    device: str
    matmul: str
    peak_flops: float
    peak_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFacts:
    """A run after its last step.

    Attributes:
        ended: how, e.g. "done", "stopped by SIGTERM".
        step: optimizer steps done, those before a resume included.
        loss: training loss of the last step, nats per token.
        evaluation_loss: of the last evaluation; None when there was none.
        unigram_entropy: as in `StartFacts`.
        tokens: tokens trained on since this start.
        seconds: wall seconds since this start, from the first step to the last.
        checkpoint: the last one written.
        sample: text the model wrote; empty = none.
        next_commands: what to try next: (command, what it does).
    """

    ended: str = "done"
    step: int
    loss: float
    evaluation_loss: float | None
    unigram_entropy: float
    tokens: int
    seconds: float
    checkpoint: Path | None
    sample: str = ""
    next_commands: Sequence[tuple[str, str]] = ()
