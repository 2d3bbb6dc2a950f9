"""Process groups for the axes of the mesh (`spec.mesh`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fivefold.spec.legal import Resolved
from fivefold.spec.stages import is_tied_apart

MakeGroup = Callable[[Sequence[int], str], ProcessGroup]


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's group on each axis; None for a group of one rank.

    Attributes:
        replicate: ranks that hold the same shards; gradients are summed over them. With zero 0 nothing is sharded, and
            these are all ranks of the data and context axes.
        shard: ranks that ZeRO shards over; None with zero 0.
        expert_replicate, expert_shard: the same two for experts: only ranks that own the same experts.
        tp_copies: tensor-parallel ranks that hold the same KV heads, where there are more ranks than KV heads.
        embedding: the two pipeline ranks that hold a tied embedding and its copy, the head.
        per_host: ranks per host, consecutive in the run; 0 = all on one host.
    """

    pp: ProcessGroup | None = None
    replicate: ProcessGroup | None = None
    shard: ProcessGroup | None = None
    expert_replicate: ProcessGroup | None = None
    expert_shard: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    tp_copies: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    embedding: ProcessGroup | None = None
    per_host: int = 0


def new_group(ranks: Sequence[int], axis: str) -> ProcessGroup:
    """A group of `ranks` whose traffic is recorded under `axis`. Collective over `ranks` only."""
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=axis)
    assert isinstance(group, ProcessGroup)
    return group


def groups(resolved: Resolved, rank: int, per_host: int = 0, make: MakeGroup = new_group) -> Groups:
    """This rank's groups, made in the same order of axes on every rank. Collective."""
    config, mesh = resolved.config, resolved.mesh
    ep, zero = config.parallel.ep, config.parallel.zero
    shard_axis = "dp_shard" if mesh.cp == 1 else "dp_shard_cp"
    replicate_axis = "dp_replicate" if zero or mesh.cp == 1 else "dp_shard_cp"
    made: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}

    def group(axis: str, ranks: Sequence[int]) -> ProcessGroup | None:
        if len(ranks) == 1:
            return None
        key = axis, tuple(ranks)
        if key not in made:
            made[key] = make(ranks, axis)
        return made[key]

    def of(*axes: str) -> list[int]:
        return next(ranks for ranks in mesh.groups(*axes) if rank in ranks)

    def same_experts(ranks: list[int]) -> list[int]:
        return [other for other in ranks if mesh.expert_rank(other, ep) == mesh.expert_rank(rank, ep)]

    shards = of("dp_shard", "cp")
    replicas = of("dp_replicate") if zero else of("dp_replicate", "dp_shard", "cp")
    place = shards.index(rank) // ep * ep
    tensor, alike = of("tp"), max(1, mesh.tp // config.model.kv_heads)
    copies = tensor.index(rank) // alike * alike
    stages = of("pp")
    ends = [stages[0], stages[-1]] if is_tied_apart(config.model, config.parallel, mesh) else []
    between = [] if rank in ends or not ends else stages[1:-1]
    found = Groups(
        pp=group("pp", stages),
        replicate=group(replicate_axis, replicas),
        shard=group(shard_axis, shards) if zero else None,
        expert_replicate=group(replicate_axis, same_experts(replicas)),
        expert_shard=group(shard_axis, same_experts(shards)) if zero else None,
        cp=group("cp", of("cp")),
        tp=group("tp", tensor),
        tp_copies=group("tp", tensor[copies : copies + alike]),
        ep=group("ep", shards[place : place + ep]),
        embedding=group("embedding", ends) if rank in ends else None,
        per_host=per_host,
    )
    if between:
        # torch names a group by the number of groups that the rank has made: ranks of the stages between make one too,
        # or the names of later groups would differ between ranks.
        make(between, "embedding")
    return found
