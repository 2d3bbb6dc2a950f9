"""`fivefold doctor`: what it finds, what it says, how it ends."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from fivefold.cli.extras import require_torch
from fivefold.config.errors import BadInput
from fivefold.trainer.doctor.finding import Finding
from fivefold.trainer.doctor.host import check_host
from fivefold.trainer.doctor.network import addresses, check_network
from fivefold.trainer.doctor.settings import check_settings
from fivefold.trainer.place import usable_cores
from launch_environments import OPENMPI


def doctor(*words: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys\n{before}\nfrom fivefold.cli.main import main\nsys.exit(main(['doctor', *sys.argv[1:]]))"
    )
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "GLOO_"))}
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | environment,
    )


def named(findings: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(finding for finding in findings if finding["name"].startswith(name))


def test_a_healthy_machine() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["passed"] is True
    findings = report["findings"]
    assert not any(finding["state"] == "problem" for finding in findings)
    for name in ("python", "torch", "cores", "memory", "host name", "gloo", "backends", "matmul", "malloc"):
        assert named(findings, name)["value"]
    collective = named(findings, "2 ranks")
    assert collective["state"] == "good"
    assert "all_reduce" in collective["value"]


def test_a_sick_machine_for_people() -> None:
    done = doctor(OMP_NUM_THREADS="640", GLOO_SOCKET_IFNAME="eth99", RANK="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "more threads than the" in done.stdout
    assert "no interface eth99" in done.stdout
    assert "RANK=0 is set" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 problems")


def test_without_torch() -> None:
    done = doctor("--json", before="sys.modules['torch'] = None")
    assert done.returncode in (0, 1)
    findings = json.loads(done.stdout)["findings"]
    assert not any(finding["section"] in ("Compute", "Collectives") for finding in findings)


def test_require_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    require_torch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadInput, match=r'pip install "fivefold\[train\]"'):
        require_torch()


def finding(findings: list[Finding], name: str) -> Finding:
    return next(item for item in findings if item.name == name)


def test_settings_in_force() -> None:
    cores = usable_cores()
    environment = {
        "HOME": "/root",
        "LANG": "C",
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "0",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "OMP_NUM_THREADS": str(cores),
    }
    found = list(check_settings(environment))
    assert {item.name for item in found} == set(environment) - {"HOME", "LANG"}
    states = {item.name: item.state for item in found}
    assert states == {
        "NCCL_DEBUG": "fact",
        "NCCL_IB_DISABLE": "fact",
        "NCCL_P2P_DISABLE": "note",
        "TORCH_DISTRIBUTED_DEBUG": "note",
        "OMP_NUM_THREADS": "note",
    }
    assert all(bool(item.mend) == (item.state == "note") for item in found)
    assert f"2 ranks would run {2 * cores} threads on {cores} cores" in finding(found, "OMP_NUM_THREADS").mend


def test_no_settings() -> None:
    assert [item.state for item in check_settings({"HOME": "/root"})] == ["good"]


@pytest.mark.parametrize("threads", ["0", "many"])
def test_threads_that_are_no_number(threads: str) -> None:
    (found,) = check_settings({"OMP_NUM_THREADS": threads})
    assert found.state == "problem"


def test_the_interface_gloo_would_use() -> None:
    interface = next(iter(addresses()))
    chosen = finding(list(check_network({"GLOO_SOCKET_IFNAME": interface})), "gloo")
    assert (chosen.state, chosen.value) == ("good", f"{interface}, by GLOO_SOCKET_IFNAME")


@pytest.mark.skipif(sys.platform != "linux", reason="addresses of interfaces are read on Linux only")
def test_loopback_has_its_address() -> None:
    assert addresses()["lo"] == "127.0.0.1"


def test_a_launchers_traces() -> None:
    inside = finding(list(check_host(OPENMPI)), "variables")
    assert inside.value == "mpirun: rank 1 of 2"
    left_over = finding(list(check_host({"RANK": "1"})), "variables")
    assert left_over.state == "problem"
