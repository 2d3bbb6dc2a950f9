"""What one rank holds of each parameter."""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fivefold.nn.hub.weights import HubWeights
from fivefold.nn.initialize import initial_values
from fivefold.spec.parameters import Parameter


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter and the part of it that this rank holds.

    Attributes:
        spec: the whole parameter.
        held: the module's own parameter: a DTensor where an axis divides it.
        value: this rank's part, a plain tensor on the storage of `held`: what the optimizer steps on.
        copies: how many ranks of the run hold this same part.
    """

    spec: Parameter
    held: nn.Parameter
    value: nn.Parameter
    copies: int

    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient, sharing its storage."""
        return None if self.held.grad is None else local(self.held.grad)

    def like_held(self, part: Tensor) -> Tensor:
        """`part`, shaped as `value`, as a tensor laid out like `held` (for checkpoints)."""
        if not isinstance(self.held, DTensor) or part.dim() == 0:
            return part
        return DTensor.from_local(
            part,
            self.held.device_mesh,
            self.held.placements,
            run_check=False,
            shape=self.held.shape,
            stride=self.held.stride(),
        )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself. Shares storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_parameters(module: nn.Module, specs: list[Parameter]) -> list[LocalParameter]:
    """The parameters of `module` that `specs` names, in its order; each tied parameter once."""
    held = dict(module.named_parameters())
    return [
        LocalParameter(
            spec, held[spec.name], nn.Parameter(local(held[spec.name].detach())), _copies(held[spec.name])
        )
        for spec in specs
        if spec.name in held
    ]


def initialize(parameter: LocalParameter, seed: int) -> None:
    """Fills this rank's part with the layout-independent initial value."""
    rows, start = _rows(parameter.held)
    width = prod(parameter.spec.shape[1:])
    values = initial_values(parameter.spec, seed, start * width, (start + rows) * width)
    with torch.no_grad():
        parameter.value.copy_(values.view(parameter.value.shape))


def load(parameter: LocalParameter, weights: HubWeights) -> None:
    """Fills this rank's part from published weights; reads little more than that part."""
    rows, start = _rows(parameter.held)
    with torch.no_grad():
        parameter.value.copy_(weights.read(parameter.spec, start, start + rows))


def _rows(held: Tensor) -> tuple[int, int]:
    """How many rows (dim 0) of the whole parameter this rank holds, and the first of them."""
    if not isinstance(held, DTensor):
        return held.shape[0], 0
    shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
    if tuple(shape[1:]) != tuple(held.shape[1:]):
        raise NotImplementedError(f"initial values of a shard over a dim other than 0: {held.placements}")
    return shape[0], offset[0]


def _copies(held: Tensor) -> int:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(held, DTensor):
        return world_size
    sharded = zip(held.device_mesh.shape, held.placements, strict=True)
    return world_size // prod(degree for degree, placement in sharded if isinstance(placement, Shard))
