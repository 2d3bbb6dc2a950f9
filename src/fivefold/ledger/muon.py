"""Muon: traffic, matmuls and buffers of the orthogonalisation. Twin of trainer/muon.py.

Every matrix is gathered to one of the ranks that hold parts of it, first over the ZeRO group, then over the
tensor-parallel group, and the update returns the same way. All ranks wait for the one with the most work.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from fivefold.config.model import Model
from fivefold.ledger.hardware import Device
from fivefold.ledger.job import Job
from fivefold.ledger.operations import Matmul
from fivefold.ledger.physics import Physics
from fivefold.ledger.roofline import matmul_seconds, stream_seconds
from fivefold.ledger.shards import Share, StageContent, representatives
from fivefold.ledger.traffic import Row, row
from fivefold.spec.matrices import ITEMSIZE, ITERATIONS, is_matrix, owners, products, work
from fivefold.spec.mesh import Mesh
from fivefold.spec.parameters import Parameter, parameters
from fivefold.spec.parts import Part, is_expert, part_of, shard_range, sharded_dim, tensor_copies


class Layers(NamedTuple):
    """Layers of a pipeline rank, of each kind."""

    dense: int
    expert: int

    @staticmethod
    def of(contents: Sequence[StageContent]) -> "Layers":
        return Layers(
            sum(content.dense_layers for content in contents),
            sum(content.expert_layers for content in contents),
        )


class Axes(NamedTuple):
    """The degrees that divide matrices; `shards` of ZeRO, 1 where it divides nothing."""

    shards: int
    tp: int
    ep: int

    @staticmethod
    def of(job: Job) -> "Axes":
        return Axes(job.dp_shard * job.cp if job.zero else 1, job.tp, job.ep)

    @property
    def expert_shards(self) -> int:
        return max(1, self.shards // self.ep)


class Sent(NamedTuple):
    """Elements that a rank puts into the two exchanges over shards, those over shards of experts, and those over
    tensor parallel; None where it takes part in none."""

    shards: int | None
    expert_shards: int | None
    tensor: int | None


def rows(job: Job, contents: Sequence[StageContent], place: int = 0, tensor_place: int = 0) -> list[Row]:
    """One step's traffic of a rank with these stages; exact for what trainer/muon.py does (a test).

    Args:
        place, tensor_place: the rank among those of the data and context axes, and among those of tensor parallel.
    """
    if not job.stack.muon:
        return []
    axes = Axes.of(job)
    sent = _sent(job.model, Layers.of(contents), axes, place % axes.shards, tensor_place)
    axis = "dp_shard" if job.cp == 1 else "dp_shard_cp"
    exchanges = (
        (axis, "matrices", sent.shards, job.spread(axes.shards, job.tp)),
        (axis, "experts' matrices", sent.expert_shards, job.spread(axes.expert_shards, job.tp * job.ep)),
        ("tp", "matrices", sent.tensor, job.group("tp")),
    )
    return [
        row(
            job,
            name,
            "all_to_all",
            "optimizer",
            count=2,
            size=elements * ITEMSIZE / 2,
            group=group,
            formula=f"{ITEMSIZE} B · elements of {what} the rank sends to be orthogonalised, and of steps it returns",
        )
        for name, what, elements, group in exchanges
        if elements is not None
    ]


def seconds(job: Job, contents: Sequence[StageContent], share: Share) -> float:
    """Newton-Schulz on the rank that has most of it, and the passes over bf16 copies of this rank's matrices."""
    if not job.stack.muon:
        return 0.0
    axes = Axes.of(job)
    device, physics = job.hardware.device, job.physics
    most = _most_seconds(job.model, Layers.of(contents), axes, device, physics)
    return most + stream_seconds(4 * ITEMSIZE * _shard(axes, share), device, physics)


def update_bytes(job: Job, share: Share) -> float:
    """What an update holds besides states, about so: the rank's matrices in bf16 and as they are sent; those it has
    whole as they are received, put together and orthogonalised."""
    if not job.stack.muon:
        return 0.0
    axes = Axes.of(job)
    own = _shard(axes, share)
    if axes.shards == axes.tp == 1:
        return 2.0 * ITEMSIZE * own
    return ITEMSIZE * (2.0 * own + 3.0 * max(own, _largest(job.model, job.ep)))


def flops(job: Job) -> float:
    """Of one step's Newton-Schulz products, over all ranks: replicas that no shards divide repeat them."""
    if not job.stack.muon:
        return 0.0
    dense = experts = 0
    for parameter in filter(is_matrix, parameters(job.model)):
        if is_expert(job.model, parameter):
            experts += work(parameter.shape)
        else:
            dense += work(parameter.shape)
    ranks = job.data_parallel * job.cp
    axes = Axes.of(job)
    return float(dense * (ranks // axes.shards) + experts * (ranks // job.ep // axes.expert_shards))


@lru_cache(maxsize=64)
def _largest(model: Model, ep: int) -> int:
    """Elements of the largest that is one rank's to orthogonalise."""
    shapes = (_orthogonalised(model, p, ep) for p in representatives(model) if is_matrix(p))
    return max(map(prod, shapes), default=0)


def _shard(axes: Axes, share: Share) -> int:
    """Elements of matrices that a rank updates."""
    return -(-share.matrices // axes.shards) - (-share.expert_matrices // axes.expert_shards)


@lru_cache(maxsize=4096)
def _most_seconds(model: Model, layers: Layers, axes: Axes, device: Device, physics: Physics) -> float:
    """Newton-Schulz of the rank that has most; in bf16 whatever the run computes in."""

    def of(shape: tuple[int, ...]) -> float:
        each = (
            matmul_seconds(Matmul("Newton-Schulz", m, n, k), "bf16", ITEMSIZE, device, physics)
            for m, n, k in products(shape)
        )
        return ITERATIONS * prod(shape[:-2]) * sum(each)

    loads = _loads(model, layers, axes)
    known = {shape: of(shape) for load in loads for shape, _ in load}
    return max(sum(count * known[shape] for shape, count in load) for load in loads)


@lru_cache(maxsize=256)
def _stage(model: Model, layers: Layers) -> tuple[Parameter, ...]:
    """The matrices of a pipeline rank in the trainer's order, each layer's named as those of the first of its kind."""
    kinds: tuple[list[Parameter], list[Parameter]] = [], []
    for parameter in representatives(model):
        if parameter.layer is not None and is_matrix(parameter):
            has_experts = bool(model.experts.count) and parameter.layer >= model.experts.dense_layers
            kinds[has_experts].append(parameter)
    return tuple(kinds[0] * layers.dense + kinds[1] * layers.expert)


def _orthogonalised(model: Model, parameter: Parameter, ep: int) -> tuple[int, ...]:
    """The shape of what one rank orthogonalises: of experts, those that a rank has."""
    first, *rest = parameter.shape
    return (first // ep, *rest) if is_expert(model, parameter) else parameter.shape


@lru_cache(maxsize=256)
def _met(model: Model, layers: Layers, axes: Axes) -> tuple[tuple[Parameter, ...], ...]:
    """What meets on the ranks of each shard; experts on one of the shards that have the same experts."""
    found: list[list[Parameter]] = [[] for _ in range(axes.shards)]
    stage = _stage(model, layers)
    dealt: dict[int, int] = {}
    for numbers, ranks in _exchanges(model, layers, axes):
        works = [work(_orthogonalised(model, stage[number], axes.ep)) for number in numbers]
        dealt |= zip(numbers, owners(works, ranks), strict=True)
    for number, parameter in enumerate(stage):
        alike = axes.ep if is_expert(model, parameter) else 1
        for shard in range(dealt[number] * alike, min((dealt[number] + 1) * alike, axes.shards)):
            found[shard].append(parameter)
    return tuple(map(tuple, found))


@lru_cache(maxsize=256)
def _exchanges(model: Model, layers: Layers, axes: Axes) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Of the two over shards: numbers of the matrices in the stage, and ranks. Without expert parallel it is one."""
    together: list[int] = []
    apart: list[int] = []
    for number, parameter in enumerate(_stage(model, layers)):
        (apart if axes.ep > 1 and is_expert(model, parameter) else together).append(number)
    return (tuple(together), axes.shards), (tuple(apart), axes.expert_shards)


@lru_cache(maxsize=256)
def _loads(model: Model, layers: Layers, axes: Axes) -> tuple[tuple[tuple[tuple[int, ...], int], ...], ...]:
    """(shape, how many) of the matrices that ranks orthogonalise, without repetition."""
    found: dict[tuple[tuple[tuple[int, ...], int], ...], None] = {}
    for met in dict.fromkeys(_met(model, layers, axes)):
        shapes = [_orthogonalised(model, parameter, axes.ep) for parameter in met]
        ranks: list[dict[tuple[int, ...], int]] = [{} for _ in range(axes.tp)]
        for shape, rank in zip(shapes, owners([work(shape) for shape in shapes], axes.tp), strict=True):
            ranks[rank][shape] = ranks[rank].get(shape, 0) + 1
        found |= dict.fromkeys(tuple(of_rank.items()) for of_rank in ranks)
    return tuple(found)


@lru_cache(maxsize=1024)
def _sent(model: Model, layers: Layers, axes: Axes, shard: int, tensor_rank: int) -> Sent:
    """Its parts, and what it owns of everyone's."""
    stage = _stage(model, layers)
    parts = [part_of(model, parameter, Mesh(tp=axes.tp), axes.ep, tensor_rank) for parameter in stage]
    over_shards: list[int | None] = []
    places = (shard, shard // axes.ep)
    for (numbers, ranks), place in zip(_exchanges(model, layers, axes), places, strict=True):
        if ranks == 1 or not numbers:
            over_shards.append(None)
            continue
        works = [work(_orthogonalised(model, stage[number], axes.ep)) for number in numbers]
        given = sum(_shard_of(parts[number], ranks, place).numel for number in numbers)
        dealt = zip(numbers, owners(works, ranks), strict=True)
        over_shards.append(given + sum(parts[number].numel for number, owner in dealt if owner == place))
    plain, experts = over_shards
    return Sent(plain, experts, _sent_over_tensor(model, _met(model, layers, axes)[shard], axes, tensor_rank))


def _sent_over_tensor(model: Model, met: Sequence[Parameter], axes: Axes, tensor_rank: int) -> int | None:
    """Of equal parts only the first rank's is gathered; each gets its step."""
    if axes.tp == 1 or not met:
        return None
    shapes = [_orthogonalised(model, parameter, axes.ep) for parameter in met]
    dealt = owners([work(shape) for shape in shapes], axes.tp)
    found = 0
    for parameter, shape, owner in zip(met, shapes, dealt, strict=True):
        copies = tensor_copies(model, parameter, axes.tp)
        if tensor_rank % copies == 0:
            found += prod(shape) * copies // axes.tp
        if owner == tensor_rank:
            found += prod(shape) * copies
    return found


def _shard_of(part: Part, shards: int, index: int) -> Part:
    dim = sharded_dim(part.shape, shards)
    return part.narrow(dim, *shard_range(part.shape[dim], shards, index))
