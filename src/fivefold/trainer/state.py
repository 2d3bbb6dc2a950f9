"""What a run is made of between two steps, by global names: all of it goes into a checkpoint."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from fivefold.parallel.apply import ParallelModel
from fivefold.parallel.local import Piece
from fivefold.trainer.optimizer import LocalOptimizer


@dataclass(slots=True)
class Counters:
    """How far a run has come.

    Attributes:
        step: optimizer steps begun and ended, skipped ones included.
        samples, tokens: consumed from the training stream.
        updates: steps that changed the parameters.
        skips_in_a_row: steps skipped since the last update.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    updates: int = 0
    skips_in_a_row: int = 0

    def advance(self, samples: int, tokens: int, skipped: bool) -> None:
        """Counts one step."""
        self.step += 1
        self.samples += samples
        self.tokens += tokens
        self.updates += not skipped
        self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tensors(model: ParallelModel, optimizer: LocalOptimizer) -> dict[str, Tensor | Piece]:
    """Every tensor of the run's state by global name, each sharing storage with the live one."""
    found: dict[str, Tensor | Piece] = {f"model.{p.spec.name}": p.piece(p.value) for p in model.parameters}
    found |= {f"model.{name}": buffer for name, buffer in model.module.named_buffers()}
    found |= {f"optimizer.{name}": moment for name, moment in optimizer.state().items()}
    return found
