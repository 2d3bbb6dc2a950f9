"""Which part of each parameter a rank holds: the layout table applied to a mesh and a rank."""

from math import prod
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.spec.layout import Owned, Placement, Split, placements
from fivefold.spec.legal import units
from fivefold.spec.mesh import Mesh
from fivefold.spec.parameters import Parameter


class Part(NamedTuple):
    """A box of a whole parameter: start and size along each dim (size 0 = the part is empty)."""

    starts: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def narrow(self, dim: int, start: int, stop: int) -> "Part":
        """The sub-box from `start` to `stop` along a dim; both are relative to this part."""
        starts, shape = list(self.starts), list(self.shape)
        starts[dim] += start
        shape[dim] = stop - start
        return Part(tuple(starts), tuple(shape))


def whole(parameter: Parameter) -> Part:
    """All of a parameter."""
    return Part((0,) * len(parameter.shape), parameter.shape)


def part_of(model: Model, parameter: Parameter, mesh: Mesh, ep: int, rank: int) -> Part:
    """The part of `rank` under tensor and expert parallel; ZeRO shards its rows further."""
    starts, shape = list(whole(parameter).starts), list(parameter.shape)
    for axis, placement in placements(model, parameter.name).items():
        degree = ep if axis == "ep" else getattr(mesh, axis)
        index = mesh.expert_rank(rank, ep) if axis == "ep" else mesh.coordinates(rank)[axis]
        first, last = _run(units(model, placement.unit), placement, degree, index)
        width = parameter.shape[placement.dim] // units(model, placement.unit)
        starts[placement.dim], shape[placement.dim] = first * width, (last - first) * width
    return Part(tuple(starts), tuple(shape))


def _run(count: int, placement: Placement, degree: int, index: int) -> tuple[int, int]:
    """The units [first, last) that rank `index` of `degree` holds."""
    if isinstance(placement, Split) and placement.replicable and degree > count:
        unit = index * count // degree
        return unit, unit + 1
    each = -(-count // degree)
    return min(index * each, count), min((index + 1) * each, count)


def sharded_dim(shape: tuple[int, ...], shards: int) -> int:
    """The dim that ZeRO shards: 0; for stacked expert matrices 1, if only that dim is divisible."""
    return int(len(shape) == 3 and shape[0] % shards != 0 and shape[1] % shards == 0)


def shard_range(size: int, shards: int, index: int) -> tuple[int, int]:
    """The range [start, stop) of a dim that shard `index` of `shards` holds: equal shards, the last ones shorter."""
    each = -(-size // shards)
    return min(index * each, size), min((index + 1) * each, size)


def is_expert(model: Model, parameter: Parameter) -> bool:
    """Whether expert parallel divides the parameter."""
    return isinstance(placements(model, parameter.name).get("ep"), Owned)


def tensor_copies(model: Model, parameter: Parameter, tp: int) -> int:
    """How many ranks of a tensor-parallel group hold the same part."""
    placement = placements(model, parameter.name).get("tp")
    if placement is None:
        return tp
    if isinstance(placement, Split) and placement.replicable:
        return max(1, tp // units(model, placement.unit))
    return 1


def copies(model: Model, parameter: Parameter, mesh: Mesh, ep: int, zero: int) -> int:
    """How many ranks of a pipeline stage hold the same part."""
    shards = mesh.dp_shard * mesh.cp // (ep if is_expert(model, parameter) else 1)
    return mesh.dp_replicate * (1 if zero else shards) * tensor_copies(model, parameter, mesh.tp)
