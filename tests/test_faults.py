"""`fivefold verify` finds each of these silent faults and names the axis and the module; nothing on healthy layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

import faults
import faults_cp_ep_pp
from fivefold.config.load import load
from fivefold.config.tree import Config
from fivefold.proof.verify import Case, Verifier

pytestmark = pytest.mark.injected_fault


class Fault(NamedTuple):
    """A fault, where it is put, and what verify must say: the axis, a part of the module's name, the kind of wrong."""

    inject: Callable[[], Any]
    layout: dict[str, Any]
    axis: str
    module: str
    kind: str = ""
    preset: str = "quickstart"
    model: Mapping[str, Any] = MappingProxyType({})
    optimizer: str = "adamw"


TP = {"tp": 2}
SP = {"tp": 2, "sequence_parallel": True}
ZERO = {"dp_shard": 2, "zero": 2}
HYBRID = {"dp_replicate": 2, "dp_shard": 2, "zero": 1}
REPLICAS = {"dp_replicate": 2, "zero": 0}
RING = {"cp": 2}
PIPE = {"pp": 2}
EP = {"dp_shard": 2, "ep": 2, "zero": 1}
MOE = "quickstart-moe"

FAULTS = [
    Fault(faults.norm_gradients_not_summed, SP, "tp", "norm"),
    Fault(faults.router_gradient_not_summed, TP, "tp", "router", preset=MOE),
    Fault(faults.kv_copies_not_summed, {"tp": 2}, "tp", "attention.", model={"kv_heads": 1}),
    Fault(faults.region_gradient_not_summed, TP, "tp", "gradient"),
    Fault(faults.regions_end_in_means, TP, "tp", "layers.0 (forward)"),
    Fault(faults.bias_counted_by_every_rank, TP, "tp", ".bias (gradient)", model={"output_bias": True}),
    Fault(faults.vocabulary_padding_leaks, TP, "tp", "", model={"vocab": 4093}),
    Fault(faults.data_shard_repeated, REPLICAS, "dp_replicate", ""),
    Fault(faults.initial_values_differ_by_rank, REPLICAS, "dp_replicate", "layers.0 (forward)"),
    Fault(faults.gradients_are_means, ZERO, "dp_shard", "gradient", "1/2"),
    Fault(faults.replicas_not_summed, HYBRID, "dp_replicate with dp_shard", "gradient"),
    Fault(faults.only_the_last_micro_batch_counts, ZERO, "dp_shard", "gradient"),
    Fault(faults.reduced_in_bf16, ZERO, "dp_shard", "gradient"),
    Fault(faults.stale_parameters, ZERO, "dp_shard", ""),
    Fault(faults.one_shard_not_updated, ZERO, "dp_shard", ""),
    Fault(faults.norm_counts_copies, REPLICAS, "dp_replicate", ""),
    Fault(faults.each_rank_clips_alone, PIPE, "pp", ""),
    Fault(faults.divided_by_own_tokens, REPLICAS, "dp_replicate", "gradient"),
    Fault(faults.learning_rate_by_rank, REPLICAS, "dp_replicate", ""),
    Fault(faults.documents_mixed, REPLICAS, "dp_replicate", "layers.0 (forward)"),
    Fault(faults_cp_ep_pp.label_lost_at_a_boundary, RING, "cp", ""),
    Fault(faults_cp_ep_pp.positions_start_at_zero, RING, "cp", "layers.0 (forward)"),
    Fault(faults_cp_ep_pp.ring_backward_scaled, RING, "cp", "attention.key"),
    Fault(faults_cp_ep_pp.ring_sees_the_future, RING, "cp", "layers.0 (forward)"),
    Fault(
        faults_cp_ep_pp.heads_return_in_another_order,
        RING | {"context": "ulysses"},
        "cp",
        "layers.0 (forward)",
    ),
    Fault(faults_cp_ep_pp.context_gradients_not_summed, RING, "cp", "gradient"),
    Fault(faults_cp_ep_pp.auxiliary_loss_by_rank, RING, "cp", "gradient", preset=MOE),
    Fault(faults_cp_ep_pp.expert_gradients_doubled, EP, "ep", "gradient", preset=MOE),
    Fault(faults_cp_ep_pp.rows_reach_other_experts, EP, "ep", "layers.0 (forward)", preset=MOE),
    Fault(faults_cp_ep_pp.dispatched_weights_forgotten, EP, "dp_shard", "layers.0 (forward)", preset=MOE),
    Fault(faults_cp_ep_pp.accumulation_not_divided, PIPE, "pp", "gradient", "2"),
    Fault(faults_cp_ep_pp.tied_copies_apart, PIPE, "pp", "embedding"),
    Fault(faults_cp_ep_pp.weight_gradients_twice, PIPE | {"schedule": "zb_h1"}, "pp", "gradient"),
    Fault(faults_cp_ep_pp.stage_gradient_cast, PIPE, "pp", "gradient"),
    Fault(faults.skip_decided_locally, REPLICAS, "dp_replicate", ""),
    Fault(faults.parts_orthogonalised, TP, "tp", "(update)", optimizer="muon"),
]
FEW = {
    faults.norm_gradients_not_summed,
    faults.gradients_are_means,
    faults_cp_ep_pp.ring_backward_scaled,
    faults_cp_ep_pp.expert_gradients_doubled,
    faults_cp_ep_pp.accumulation_not_divided,
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(4) as started:
        yield started


def config_of(fault: Fault) -> Config:
    config = load(fault.preset, [f"optimizer.name={fault.optimizer}"])
    parallel = replace(config.parallel, **({"dp_replicate": 1, "dp_shard": 1} | fault.layout))
    model = replace(config.model, **fault.model)
    batch = replace(config.batch, global_batch=16, micro_batch=2)
    data = replace(config.data, document_mask=True)
    return replace(config, model=model, parallel=parallel, batch=batch, data=data)


def check(fault: Fault, case: Case) -> None:
    failed = case.failed
    assert failed is not None, "not noticed"
    assert case.axis == fault.axis, (case.axis, failed)
    said = f"{failed.first} {' '.join(failed.wrong)}"
    assert fault.module in said, said
    assert fault.kind in (failed.kind or ""), (failed.kind, failed.first)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.inject.__name__, marks=() if fault.inject in FEW else pytest.mark.full)
        for fault in FAULTS
    ],
)
def test_fault_is_found_and_named(verifier: Verifier, fault: Fault) -> None:
    verifier.fault = fault.inject
    check(fault, verifier.case(config_of(fault), ["float64"]))


def test_every_fault_still_finds_what_it_breaks() -> None:
    """Most are only tried in the full run: a name that has moved shows here."""
    for fault in FAULTS:
        with fault.inject():
            pass


def test_no_false_alarm(verifier: Verifier) -> None:
    """Each layout above, healthy."""
    verifier.fault = faults.nothing
    seen = []
    for fault in FAULTS:
        if fault.inject not in FEW:
            continue
        case = verifier.case(config_of(fault), ["float64"])
        assert case.passed, case.document()
        seen.append(case)
    assert len(seen) == len(FEW)


def test_the_page_lists_each_fault_with_its_axis() -> None:
    page = (Path(__file__).parent.parent / "docs" / "verify.md").read_text()
    rows = [line.split(" | ") for line in page.partition("| axis named |")[2].splitlines()[2:] if line]
    assert len(rows) == len(FAULTS)
    for (_, _, axis, first), fault in zip(rows, FAULTS, strict=True):
        assert axis == fault.axis
        assert fault.module in first
        assert fault.kind in first
