"""Ranks and their coordinates on the mesh of axes, outermost axis first."""

from dataclasses import dataclass
from itertools import product
from math import prod

from fivefold.config.errors import ConfigError, nearest_multiples
from fivefold.config.tree import Parallel

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the five axes that take ranks; their product is the world size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return prod(self.shape)

    @property
    def data_parallel(self) -> int:
        """Replicas of the model that read different samples."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis; the innermost axis counts fastest."""
        found: dict[str, int] = {}
        for axis, degree in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The inverse of `coordinates`."""
        rank = 0
        for axis, degree in zip(AXES, self.shape, strict=True):
            rank = rank * degree + coordinates[axis]
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ only in their coordinates on `axes`."""
        fixed = [axis for axis in AXES if axis not in axes]
        ranges = {axis: range(degree) for axis, degree in zip(AXES, self.shape, strict=True)}
        return [
            [
                self.rank(dict(zip(fixed, outer, strict=True)) | dict(zip(axes, inner, strict=True)))
                for inner in product(*(ranges[axis] for axis in axes))
            ]
            for outer in product(*(ranges[axis] for axis in fixed))
        ]

    def data_rank(self, rank: int) -> int:
        """Which of the `data_parallel` replicas a rank belongs to."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def expert_rank(self, rank: int, ep: int) -> int:
        """The rank within its expert-parallel group: ep is the innermost part of dp_shard × cp."""
        at = self.coordinates(rank)
        return (at["dp_shard"] * self.cp + at["cp"]) % ep

    def __str__(self) -> str:
        axes = [f"{axis} {degree}" for axis, degree in zip(AXES, self.shape, strict=True) if degree > 1]
        return " × ".join(axes) or "one rank"


def resolve(parallel: Parallel, world_size: int = 0) -> Mesh:
    """The mesh of a layout on `world_size` ranks (0 = as many as the layout says).

    With zero 0, (dp_replicate, dp_shard) = (r, s) is equivalent to (r·s, 1) and normalised to it.

    Raises:
        ConfigError: a degree of 0, two degrees of -1, or a product that is not the world size.
    """
    degrees = {axis: int(getattr(parallel, axis)) for axis in AXES}
    for axis, degree in degrees.items():
        if degree == 0:
            raise ConfigError(f"parallel.{axis} = 0: expected at least 1, or -1 for the ranks that are left")
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        names = " = ".join(f"parallel.{axis}" for axis in open_axes)
        closed = "dp_shard" if "dp_shard" in open_axes else open_axes[-1]
        raise ConfigError(
            f"{names} = -1: only one axis can take the ranks that are left (without a value: dp_shard); "
            f"set {closed} = 1"
        )
    named = prod(degree for degree in degrees.values() if degree > 0)
    if open_axes:
        degrees[open_axes[0]] = _left(named, world_size, open_axes[0])
    elif world_size and named != world_size:
        raise ConfigError(
            f"parallel: {_product(degrees)} = {named} ranks, but the run has {world_size} (run.ranks, the "
            f"launcher's or the cluster's); set one axis to -1, or start {named} ranks"
        )
    if parallel.zero == 0:
        degrees["dp_replicate"] *= degrees["dp_shard"]
        degrees["dp_shard"] = 1
    return Mesh(**degrees)


def ranks_of_a_host(size: int, stride: int, per_host: int) -> int:
    """How many of `size` ranks, `stride` apart, are on the same host of `per_host` consecutive ranks; equally many on
    each host."""
    local = max(1, min(size, per_host // stride))
    while size % local:
        local -= 1
    return local


def _left(named: int, world_size: int, axis: str) -> int:
    if not world_size:
        return 1
    if world_size % named:
        raise ConfigError(
            f"parallel.{axis} = -1: the other axes take {named} ranks, which does not divide {world_size}; "
            f"nearest legal rank counts: {nearest_multiples(world_size, named)}"
        )
    return world_size // named


def _product(degrees: dict[str, int]) -> str:
    return " · ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1"
