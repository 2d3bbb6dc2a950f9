"""A rank's part of a parameter: its place in the whole, its initial value, its form in checkpoints."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fivefold.nn.hub.weights import HubWeights
from fivefold.nn.initialize import initial_values
from fivefold.spec.parameters import Parameter
from fivefold.spec.parts import Part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter and the part of it that this rank keeps, updates and saves.

    Attributes:
        spec: the whole parameter.
        part: which part.
        value: the part, a plain tensor in the master dtype, which the optimizer updates. Once a step has reduced
            gradients, its `grad` is this part of the gradient of the global batch.
        copies: how many ranks of the run hold this same part.
        shards: the ZeRO group, whose ranks together hold what tensor and expert parallel assign to each of them;
            None = not sharded.
        tensor: the tensor-parallel group, each rank with a part of the parameter or a copy; None = no tensor parallel.
        momentum_corrected: gradient compression applies momentum to its gradient; the optimizer keeps none.
    """

    spec: Parameter
    part: Part
    value: nn.Parameter
    copies: int
    shards: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    momentum_corrected: bool = False

    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient."""
        return self.value.grad

    def piece(self, tensor: Tensor) -> "Piece":
        """`tensor`, shaped as `value` (a moment, a gradient, the value), with its place in the whole."""
        return Piece(tensor.detach(), self.part, self.spec.shape)


class Piece:
    """A part of a tensor that is distributed over ranks, in the form that checkpoints save and load.

    Implements as much of a tensor as torch.distributed.checkpoint needs: `__create_write_items__` and
    `__create_chunk_list__` are its protocol for custom tensor types. (They import it: 0.7 s that only a save needs.)
    """

    def __init__(self, local: Tensor, part: Part, shape: tuple[int, ...]) -> None:
        self.local = local
        self.part = part
        self.shape = torch.Size(shape)
        self.dtype = local.dtype
        self.is_meta = local.is_meta

    def size(self) -> torch.Size:
        """Of the whole tensor."""
        return self.shape

    def to_local(self) -> Tensor:
        """This rank's part, sharing storage with the live tensor."""
        return self.local

    def __create_write_items__(self, name: str, _: object) -> "list[WriteItem]":
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        chunks = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not self.part.numel:
            return []
        return [ChunkStorageMetadata(torch.Size(self.part.starts), torch.Size(self.part.shape))]


def initialize(parameter: LocalParameter, seed: int) -> None:
    """Fills this rank's part with the layout-independent initial value."""
    part, spec = parameter.part, parameter.spec
    width = spec.numel // spec.shape[0]
    start = part.starts[0]
    values = initial_values(spec, seed, start * width, (start + part.shape[0]) * width)
    _fill(parameter, values.view(part.shape[0], *spec.shape[1:]))


def load(parameter: LocalParameter, weights: HubWeights) -> None:
    """Fills this rank's part from a Hugging Face model's files, of which it reads little more than that part."""
    start = parameter.part.starts[0]
    _fill(parameter, weights.read(parameter.spec, start, start + parameter.part.shape[0]))


def _fill(parameter: LocalParameter, rows: Tensor) -> None:
    """Takes this rank's part out of whole rows."""
    part = parameter.part
    for dim in range(1, len(part.shape)):
        rows = rows.narrow(dim, part.starts[dim], part.shape[dim])
    with torch.no_grad():
        parameter.value.copy_(rows.reshape(part.shape))
