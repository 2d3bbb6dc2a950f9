"""What collectives cost over gloo: by hand, by the rows of a cluster file, and without such rows."""

from pathlib import Path

import msgspec
import pytest
import tomli_w
from msgspec.structs import replace

from fivefold.config.errors import ConfigError
from fivefold.config.tree import Cluster
from fivefold.ledger.hardware import Hardware, Measured, Network, Node, kind, load_hardware
from fivefold.ledger.network import Primitive, collective_seconds, wires
from fivefold.ledger.physics import Physics
from fivefold.ledger.total import estimate
from fivefold.planner.jobs import job_of
from toy import toy_config

INSIDE, BETWEEN = Node(2, 1e9, 1e-5), Network(1e7, 1e-4)
SIZE = 4e6  # four chunks of 1 MB over four ranks; the two ranks of a host have 2e7 B/s between hosts together
ROUND = 1e-4 + 1e6 / 2e7


def cluster(local: int, hosts: int, *rows: Measured) -> Hardware:
    node = replace(INSIDE, devices=local)
    return replace(kind("cpu"), nodes=hosts, node=node, network=BETWEEN, measured=rows)


@pytest.mark.parametrize(
    ("primitive", "expected"),
    [
        ("all_reduce", 6 * ROUND),
        ("reduce_scatter", 6 * ROUND),
        ("all_gather", 3 * ROUND),
        # in the rounds to the next, the second and the third rank 1, 2 and 1 chunks leave each host
        ("all_to_all", 3 * 1e-4 + 4e6 / 2e7),
        # 0→1, then 0→2 and 1→3, each all of it
        ("broadcast", 1e-5 + 4e6 / 1e9 + 1e-4 + 8e6 / 2e7),
        ("send", 1e-4 + 4e6 / 1e7),
    ],
)
def test_gloo_on_two_hosts_of_two(primitive: Primitive, expected: float) -> None:
    """One flat ring: of the messages of a round one leaves each host, whose port is free for it."""
    found = collective_seconds(primitive, SIZE, 2, 2, wires(cluster(2, 2), Physics(), "gloo"))
    assert found == pytest.approx(expected)


def test_gloo_on_other_shapes() -> None:
    """Hosts of one rank each: 2(n−1)/n of the vector over every link. One host: the same over its own links. And two
    ranks on two hosts that others share: their part of the port."""
    on = wires(cluster(2, 4), Physics(), "gloo")
    assert collective_seconds("all_reduce", SIZE, 1, 4, on) == pytest.approx(6 * (1e-4 + 1e6 / 1e7))
    assert collective_seconds("all_reduce", SIZE, 2, 1, on) == pytest.approx(2 * (1e-5 + 2e6 / 1e9))
    assert collective_seconds("reduce_scatter", SIZE, 2, 1, on) == pytest.approx(2 * (1e-5 + 2e6 / 1e9))
    assert collective_seconds("all_reduce", SIZE, 1, 2, on) == pytest.approx(2 * (1e-4 + 2e6 / 1e7))


def test_shared_memory_between_hosts_has_no_ramp_of_gpu_clusters() -> None:
    """Both ranks reduce half of it, exchange theirs with the other host at the same time, and share the halves."""
    on = wires(cluster(2, 2), Physics(), "shm")
    expected = 2 * (1e-5 + 2e6 / 1e9) + 2 * (1e-4 + 1e6 / 1e7)
    assert collective_seconds("all_reduce", SIZE, 2, 2, on) == pytest.approx(expected)


def fitted(primitive: str, backend: str, local: int, hosts: int, latency: float, rate: float) -> Measured:
    return Measured(primitive, backend, local, hosts, latency, rate, 1e3, 1e6, 0.05)


SHM = (
    fitted("all_reduce", "shm", 1, 4, 6e-4, 6.6e6),
    fitted("all_gather", "shm", 1, 4, 3e-4, 1.3e7),
)
GLOO = (fitted("all_reduce", "gloo", 1, 4, 1.2e-3, 6e6), fitted("reduce_scatter", "gloo", 1, 4, 2e-3, 5e6))


def estimated(file: Path, rows: tuple[Measured, ...], backend: str, zero: int = 0) -> dict[str, float]:
    """Seconds of one collective of the data axis by primitive, beside the bytes of one, from a file with these rows:
    links as `comm calibrate` writes them, of the first row."""
    link = cluster(1, 4, *rows).measured_over("default")
    file.write_text(tomli_w.dumps(msgspec.to_builtins(replace(link, measured=rows))), encoding="utf-8")
    axis = "dp_shard" if zero else "dp_replicate"
    config = toy_config(backend=backend, zero=zero, **{axis: 4})
    job = job_of(replace(config, cluster=Cluster(path=str(file)), run=replace(config.run, ranks=4)))
    found = {}
    for row in estimate(job).traffic:
        if row.axis == axis and row.phase in ("gradient", "optimizer"):
            found[row.primitive] = row.seconds / row.times
            found[f"{row.primitive} bytes"] = row.bytes_per_rank / row.times
    return found


@pytest.mark.parametrize("size", [1e4, 1e8])
def test_one_rank_a_host_leaves_shared_memory_the_rings_of_gloo(size: float) -> None:
    many = cluster(1, 16)
    shm, gloo = (wires(many, Physics(), backend) for backend in ("shm", "gloo"))
    assert collective_seconds("all_reduce", size, 1, 16, shm) == pytest.approx(
        collective_seconds("all_reduce", size, 1, 16, gloo)
    )


def test_within_a_host_shared_memory_moves_what_a_ring_moves() -> None:
    on = wires(cluster(4, 1), Physics(), "shm")
    assert collective_seconds("all_reduce", SIZE, 4, 1, on) <= 6 * (1e-5 + 1e6 / 1e9) * (1 + 1e-9)


def test_a_measured_row_has_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    made = cluster(1, 1, Measured("all_reduce", "gloo", 1, 1, 1e-5, 1e9, 1e3, 1e6, 0.05))
    file.write_text(tomli_w.dumps(msgspec.to_builtins(made)))
    with pytest.raises(ConfigError, match=r"one\.toml: a measured all_reduce over local × hosts = 1 rank"):
        load_hardware(Cluster(path=str(file)))


def test_gloo_is_a_ring_where_a_file_was_measured_over_shared_memory_only(tmp_path: Path) -> None:
    """Four hosts of one rank: shm's all-reduce is gloo's there, and so is its time, of any size."""
    found = estimated(tmp_path / "cluster.toml", SHM, "gloo")
    assert found["all_reduce"] == pytest.approx(SHM[0].link.seconds(found["all_reduce bytes"]))
    found = estimated(tmp_path / "cluster.toml", SHM, "gloo", zero=1)
    assert found["reduce_scatter"] == pytest.approx(SHM[0].link.seconds(found["reduce_scatter bytes"]))
    assert found["all_gather"] == pytest.approx(SHM[0].link.seconds(found["all_gather bytes"]) / 2)


def test_each_backend_has_its_own_rows_and_links(tmp_path: Path) -> None:
    both, file = (*SHM, *GLOO), tmp_path / "cluster.toml"
    for backend, row in (("default", SHM[0]), ("shm", SHM[0]), ("gloo", GLOO[0])):
        found = estimated(file, both, backend)
        assert found["all_reduce"] == pytest.approx(row.link.seconds(found["all_reduce bytes"]))
    found = estimated(file, both, "gloo", zero=1)
    assert found["reduce_scatter"] == pytest.approx(GLOO[1].link.seconds(found["reduce_scatter bytes"]))
    # of gloo's all-gather there is no row: half of a ring all-reduce, on the links that gloo's all-reduces saw
    assert found["all_gather"] == pytest.approx(GLOO[0].link.seconds(found["all_gather bytes"]) / 2)
    loaded = load_hardware(Cluster(path=str(file)))
    assert loaded is not None
    assert loaded.network.latency == pytest.approx(SHM[0].latency / 6)
    assert loaded.measured_over("gloo").network.latency == pytest.approx(GLOO[0].latency / 6)
