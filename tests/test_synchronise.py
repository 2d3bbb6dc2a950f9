"""Programs in place of the backend's collectives: the same training, and every message where the ledger has it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from fivefold.config.tree import Cluster, Config
from fivefold.ledger.hardware import Hardware, Measured, kind
from fivefold.ledger.job import Job
from fivefold.ledger.programs import catalogue
from fivefold.ledger.programs.steps import Fabric, Link, seconds
from fivefold.ledger.synchronisation import MOST_PIECES, PIECE_BYTES, program_of
from fivefold.ledger.total import estimate, traffic_of
from fivefold.planner.jobs import job_of
from fivefold.proof.error import errors
from fivefold.spec.parameters import parameters
from fivefold.spec.synchronisation import PROGRAMS, Algorithm, serves
from ranks import Ranks
from toy import MODEL, reference, toy_config, train_on_ranks

HYBRID = {"dp_replicate": 2, "dp_shard": 2}
DATA_AXES = ("dp_replicate", "dp_shard", "dp_shard_cp")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, backend=None) as started:
        yield started


def laid_out(cluster: str = "", **parallel: Any) -> Config:
    """Two micro-batches a replica, two steps."""
    config = toy_config(steps=2, **parallel)
    replicas = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    batch = replace(config.batch, global_batch=2 * replicas)
    return replace(config, batch=batch, cluster=Cluster(preset=cluster))


FULL = pytest.mark.full  # verify's layouts have them, too
CASES = [
    pytest.param({"dp_replicate": 2, "algorithm": "ring"}, "", marks=FULL),
    ({"dp_replicate": 3, "algorithm": "halving-doubling"}, ""),
    pytest.param({"dp_replicate": 3, "algorithm": "recursive-doubling"}, "", marks=FULL),
    pytest.param({"dp_replicate": 4, "algorithm": "double-tree"}, "", marks=FULL),
    ({"dp_replicate": 4, "algorithm": "hierarchical"}, "2x2 cpu"),
    pytest.param({"dp_replicate": 2, "cp": 2, "algorithm": "ring"}, "", marks=FULL),
    ({"dp_shard": 3, "zero": 1, "algorithm": "ring"}, ""),
    pytest.param({"dp_shard": 3, "zero": 2, "algorithm": "halving-doubling"}, "", marks=FULL),
    pytest.param({"dp_shard": 4, "zero": 3, "algorithm": "ring"}, "", marks=FULL),
    (HYBRID | {"zero": 3, "algorithm": "halving-doubling"}, ""),
]


@pytest.mark.parametrize(
    ("layout", "cluster"),
    CASES,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_training_is_the_same_and_messages_are_the_ledgers(
    ranks: Ranks, layout: dict[str, Any], cluster: str
) -> None:
    """Gradients and weights as one process has them, replicas equal to the bit (`train_on_ranks` looks), and each
    rank's own messages, in number and bytes, those predicted for it."""
    config = laid_out(cluster, **layout)
    world = 1
    for axis in ("dp_replicate", "dp_shard", "cp"):
        world *= layout.get(axis, 1)
    found, expected = ranks.run(train_on_ranks, config, world_size=world), reference(config)
    assert max(errors(found[0]["gradients"], expected["gradients"]).values()) <= 1e-12
    assert max(errors(found[0]["state"], expected["state"]).values()) <= 1e-12
    job = job_of(replace(config, run=replace(config.run, ranks=world)))
    for place, of_rank in enumerate(found):
        recorded = {
            (row.axis, row.primitive, row.phase): (row.count, row.bytes_per_rank)
            for row in of_rank["rows"][-1]
            if row.axis in DATA_AXES and row.primitive != "recv"
        }
        predicted = {
            (row.axis, row.primitive, row.phase): (row.times, row.bytes_per_rank)
            for row in traffic_of(job, 0, place)
            if row.axis in DATA_AXES
        }
        assert {primitive for _, primitive, _ in recorded} == {"send"}
        assert recorded == predicted, f"rank {place}"


def test_every_name_is_a_program_of_the_catalogue() -> None:
    assert set(get_args(Algorithm)) == {"backend", *PROGRAMS}
    for name, programs in PROGRAMS.items():
        assert serves(name, 0)
        assert serves(name, 3) == ({"reduce_scatter", "all_gather"} <= programs.keys())
        for collective in programs:
            assert program_of(name, collective, 1 << 20, 6, 2).primitive == collective


def test_large_vectors_go_through_a_double_tree_in_pieces() -> None:
    for size, pieces in ((1000, 1), (8 * PIECE_BYTES, 4), (1 << 34, MOST_PIECES)):
        assert program_of("double-tree", "all_reduce", size, 4).chunks == 2 * pieces


def on_hosts(hardware: Hardware, algorithm: str) -> Job:
    """Four replicas on two hosts of two, one vector each layer and one for the rest."""
    cluster = replace(hardware, nodes=2, node=replace(hardware.node, devices=2))
    config = laid_out("2x2 cpu", dp_replicate=4, algorithm=algorithm)
    job = job_of(replace(config, run=replace(config.run, ranks=4)))
    return dataclasses.replace(job, hardware=cluster)


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_time_is_the_programs_own(algorithm: Algorithm) -> None:
    """On the links that messages were measured on; two ranks share a host's port. Compute hides none of it."""
    near, far = Link(1e-5, 4e9), Link(2e-4, 5e7)
    rows = tuple(
        Measured("send", "gloo", local, hosts, *link[:2], 1e3, 1e6, 0.1)
        for local, hosts, link in ((2, 1, near), (1, 2, far), (2, 2, Link(1.0, 1.0)))
    )
    ledger = estimate(on_hosts(replace(kind("cpu"), measured=rows), algorithm))
    (row,) = (row for row in ledger.traffic if row.axis == "dp_replicate")
    fabric = Fabric(near, Link(far.latency, 2 * far.bandwidth), 2, shared=True)
    buckets = Counter[int | None]()
    for parameter in parameters(MODEL):
        buckets[parameter.layer] += 8 * parameter.numel
    expected = sum(
        seconds(program_of(algorithm, "all_reduce", size, 4, 2), size, fabric) for size in buckets.values()
    )
    assert row.seconds == pytest.approx(expected)
    assert row.exposed_seconds == row.seconds
    assert row.link == "between nodes"


def test_between_hosts_the_hierarchical_program_is_predicted_to_be_the_fastest() -> None:
    """Where latency does not decide: 2(N−1)/N of a vector passes a host's port, as few bytes as can be."""
    slow = replace(kind("cpu"), network=replace(kind("cpu").network, bandwidth=1e6))
    times = {
        name: next(r.seconds for r in estimate(on_hosts(slow, name)).traffic if r.axis == "dp_replicate")
        for name in PROGRAMS
    }
    assert min(times, key=lambda name: times[name]) == "hierarchical"
    assert catalogue.PROGRAMS["all_reduce"].keys() == times.keys()
