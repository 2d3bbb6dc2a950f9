"""The state of a run between two steps, by global names: everything that a checkpoint holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
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
    for parameter in model.parameters:
        if (left := model.unsent.get(parameter.spec.name)) is not None:
            key = f"{COMPRESSION}{OWN}error/{parameter.spec.name}"
            found[key] = _row(left, parameter.part, parameter.spec.shape, 0, 1)
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
        return _row(self.value, self.part, self.shape, self.row, self.rows)


def _row(value: Tensor, part: Part, shape: Sequence[int], row: int, rows: int) -> Piece:
    return Piece(value[None], Part((row, *part.starts), (1, *part.shape)), (rows, *shape))


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
    """Loads what compression has kept into a run that is laid out or compressed in another way, or not at all.

    - Of other numbers of ranks, rank r of n takes the sum of rows r, r + n, r + 2n, ….
    - What was not sent of a parameter that is not compressed now is added to its next gradient
      (`ParallelModel.unsent`).
    - Momentum moves between compression, whose rows are summed, and the optimizer.
    - Shared tensors start anew: PowerSGD's factors converge again by themselves. So does all that the checkpoint lacks,
      because the run was compressed in another way before, or not at all.
    """

    def __init__(self, model: ParallelModel, shapes: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        """`shapes`: shape and dtype of the stored tensors, by name."""
        self._model = model
        self._shapes = shapes
        self._tensors: dict[str, Tensor | Piece] = {}
        self._new: set[str] = set()
        self._sums: list[tuple[Tensor, Tensor]] = []  # a live tensor, and the rows whose sum it takes
        self._shares: list[tuple[Tensor, int]] = []  # a live tensor, and by what it is divided
        self._unsent: dict[str, Tensor] = {}
        kept = {each.key: each for each in compression_state(model)}
        for key, each in kept.items():
            if key in shapes:
                self._take_rows(each)
                continue
            self._new.add(key)
            momentum = f"optimizer.{key.rpartition('/')[2]}.momentum_buffer"
            if key.startswith(f"{COMPRESSION}{OWN}velocity/") and momentum in shapes:
                self._tensors[momentum] = Piece(each.value, each.part, each.shape)
                self._shares.append((each.value, each.rows))
        for parameter in model.parameters:
            key = f"{COMPRESSION}{OWN}error/{parameter.spec.name}"
            if key in shapes and key not in kept:
                left = torch.zeros_like(parameter.value.data)
                self._sums.append((left, self._rows(key, left, parameter.part, parameter.spec.shape)))
                self._unsent[parameter.spec.name] = left

    def asked(self, state: Mapping[str, Tensor | Piece]) -> dict[str, Tensor | Piece]:
        """What is to be loaded in place of a run's `state`."""
        for name, tensor in state.items():
            velocity = f"{COMPRESSION}{OWN}velocity/{name.removeprefix('optimizer.').removesuffix('.momentum_buffer')}"
            if name.endswith(".momentum_buffer") and name not in self._shapes and velocity in self._shapes:
                assert isinstance(tensor, Piece)
                self._new.add(name)
                self._sums.append(
                    (tensor.local, self._rows(velocity, tensor.local, tensor.part, tensor.shape))
                )
        return {name: tensor for name, tensor in {**state, **self._tensors}.items() if name not in self._new}

    def adopt(self) -> None:
        """Copies what was loaded into the live tensors."""
        for live, rows in self._sums:
            live.copy_(rows.sum(0))
        for live, ranks in self._shares:
            live.div_(ranks)
        self._model.unsent.update(self._unsent)

    def _take_rows(self, each: CompressionTensor) -> None:
        stored = tuple(self._shapes[each.key][0])
        if stored == (each.rows, *each.shape):
            return
        if each.is_own:
            slab = self._rows(each.key, each.value, each.part, each.shape)
            self._sums.append((each.value, slab[each.row :: each.rows]))
        else:  # what is not taken is loaded all the same
            slab = each.value.new_empty(0, *stored[1:])
            part = Part((0,) * len(stored), (0, *stored[1:]))
            self._tensors[each.key] = Piece(slab, part, stored)

    def _rows(self, key: str, like: Tensor, part: Part, shape: Sequence[int]) -> Tensor:
        """Room for a part of every stored row, asked for under `key`."""
        rows = self._shapes[key][0][0]
        slab = like.new_empty(rows, *part.shape)
        place = Part((0, *part.starts), (rows, *part.shape))
        self._tensors[key] = Piece(slab, place, (rows, *shape))
        return slab
