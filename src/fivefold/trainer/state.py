"""The state of a run between two steps, by global names: everything that a checkpoint holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from fivefold.collectives.compression.state import OWN
from fivefold.parallel.apply import ParallelModel
from fivefold.parallel.local import Piece
from fivefold.spec.parts import Part
from fivefold.trainer.optimizer import LocalOptimizer

COMPRESSION = "compression."  # begins the names of what compression keeps


@dataclass(slots=True)
class Counters:
    """The progress of a run.

    Attributes:
        step: optimizer steps done, skipped ones included.
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
    """Every tensor of the run's state by global name, sharing storage with the live tensors."""
    found: dict[str, Tensor | Piece] = {f"model.{p.spec.name}": p.piece(p.value) for p in model.parameters}
    found |= {f"model.{name}": buffer for name, buffer in model.module.named_buffers()}
    found |= {f"optimizer.{name}": moment for name, moment in optimizer.state().items()}
    found |= {each.key: each.piece() for each in compression_state(model)}
    return found


@dataclass(frozen=True, slots=True)
class CompressionTensor:
    """A tensor that gradient compression keeps for the next step, with its place in the checkpoint.

    Checkpoints stack the tensors of all ranks along a new dim 0. A tensor of a rank's own (error feedback) is row
    `row` of as many rows as ranks share the sum; only the sum of the rows matters, so another number of ranks may
    redistribute them. A tensor that those ranks share (a PowerSGD factor) has one row for each group of such ranks.
    """

    key: str
    value: Tensor
    part: Part
    shape: tuple[int, ...]
    row: int
    rows: int
    is_own: bool

    def piece(self) -> Piece:
        """The tensor as a row of the stacked whole, sharing storage."""
        part = Part((self.row, *self.part.starts), (1, *self.part.shape))
        return Piece(self.value[None], part, (self.rows, *self.shape))


def compression_state(model: ParallelModel) -> list[CompressionTensor]:
    """The tensors that compression keeps on this rank; empty without compression."""
    held = {parameter.spec.name: parameter for parameter in model.parameters}
    found = []
    for bucket in model.data.buckets:
        over = bucket.division.replicate
        if bucket.compressor is None or over is None:
            continue
        for key, value in bucket.compressor.memory.state_dict().items():
            is_own, name = key.startswith(OWN), key.split("/", 2)[2]
            parameter = held[name]
            if is_own:
                part, shape, row, rows = parameter.part, parameter.spec.shape, over.rank, over.ranks
            else:
                part, shape = Part((0,) * value.dim(), tuple(value.shape)), tuple(value.shape)
                row, rows = bucket.place
            found.append(CompressionTensor(f"{COMPRESSION}{key}", value, part, shape, row, rows, is_own))
    return found


class RegroupedCompression:
    """Loads compression state that another number of ranks has saved: rank r of n takes the sum of rows r, r + n,
    r + 2n, ….

    Shared tensors start anew: PowerSGD's factors converge again by themselves. So do tensors that the checkpoint lacks,
    because the run was compressed in another way before, or not at all.
    """

    def __init__(self, model: ParallelModel, shapes: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        """`shapes`: shape and dtype of the stored tensors, by name."""
        self._slabs: list[tuple[CompressionTensor, Tensor]] = []
        self._tensors: dict[str, Tensor | Piece] = {}
        self._new: set[str] = set()
        for each in compression_state(model):
            if each.key not in shapes:
                self._new.add(each.key)
                continue
            stored = tuple(shapes[each.key][0])
            if stored == (each.rows, *each.shape):
                continue
            rows, kept = (
                (stored[0], each.part) if each.is_own else (0, Part((0,) * (len(stored) - 1), stored[1:]))
            )
            slab = each.value.new_empty(rows, *kept.shape)
            part = Part((0, *kept.starts), (rows, *kept.shape))
            self._tensors[each.key] = Piece(
                slab, part, (stored[0], *(each.shape if each.is_own else stored[1:]))
            )
            if each.is_own:
                self._slabs.append((each, slab))

    def asked(self, state: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        """What is to be loaded in place of a run's `state`."""
        return {name: tensor for name, tensor in {**state, **self._tensors}.items() if name not in self._new}

    def adopt(self) -> None:
        """Copies the loaded rows into the live tensors."""
        for each, slab in self._slabs:
            each.value.copy_(slab[each.row :: each.rows].sum(0))
