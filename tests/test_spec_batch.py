"""Batch arithmetic and learning rates: against closed forms."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.config.errors import ConfigError
from fivefold.config.tree import (
    Batch,
    Optimizer,
    Schedule,
)
from fivefold.spec.batch import BatchPlan, LearningRate, learning_rate, plan_batch
from fivefold.spec.mesh import Mesh
from spec_cases import PATIENT, meshes, offered


class TestBatch:
    @PATIENT
    @given(mesh=meshes, micro_batch=st.integers(1, 5), accumulation=st.integers(1, 5))
    def test_every_sample_exactly_once(self, mesh: Mesh, micro_batch: int, accumulation: int) -> None:
        size = micro_batch * accumulation * mesh.data_parallel
        plan = plan_batch(Batch(global_batch=size, micro_batch=micro_batch), mesh)
        assert (plan.global_batch, plan.accumulation) == (size, accumulation)
        taken = [
            sample
            for micro_step in range(plan.accumulation)
            for data_rank in range(plan.data_parallel)
            for sample in range(size)[plan.rows(micro_step, data_rank)]
        ]
        assert taken == list(range(size))  # and one micro-step after the other takes them in order
        assert f"accumulation {accumulation} = global batch {size}" in plan.reason

    @PATIENT
    @given(
        global_batch=st.integers(1, 200),
        micro_batch=st.integers(1, 9),
        data_parallel=st.integers(1, 9),
        tokens=st.integers(0, 16),
    )
    def test_refused_batches_come_with_legal_ones(
        self, global_batch: int, micro_batch: int, data_parallel: int, tokens: int
    ) -> None:
        """`tokens` 0 gives the batch in sequences; else in tokens, of sequences that long."""
        mesh = Mesh(dp_shard=data_parallel)
        key = "global_batch_tokens" if tokens else "global_batch"

        def plan(value: int) -> BatchPlan:
            return plan_batch(
                Batch(**{key: value}, micro_batch=micro_batch, sequence_length=tokens or 8), mesh
            )

        unit = micro_batch * data_parallel * (tokens or 1)
        if global_batch % unit == 0:
            assert plan(global_batch).global_batch == global_batch // (tokens or 1)
            return
        with pytest.raises(ConfigError, match=rf"^batch\.{key} = {global_batch}: ") as caught:
            plan(global_batch)
        values = offered(caught.value, global_batch)
        assert values == [v for v in (global_batch // unit * unit, -(-global_batch // unit) * unit) if v]
        assert all(plan(value).accumulation * unit == value for value in values)

    def test_without_a_size_each_replica_takes_one_micro_batch(self) -> None:
        plan = plan_batch(Batch(micro_batch=3), Mesh(dp_replicate=2, dp_shard=2))
        assert (plan.global_batch, plan.accumulation) == (12, 1)


def rate(
    schedule: Schedule,
    *,
    optimizer: Optimizer = Optimizer(lr=1.0),  # noqa: B008 - immutable
    global_batch: int = 8,
    steps: int = 100,
    micro_batch: int = 1,
    data_parallel: int = 1,
) -> tuple[LearningRate, BatchPlan]:
    """The learning rate of a run with sequences of 10 tokens."""
    batch = Batch(global_batch=global_batch, micro_batch=micro_batch, sequence_length=10)
    plan = plan_batch(batch, Mesh(dp_shard=data_parallel))
    return learning_rate(optimizer, schedule, plan, steps * plan.global_batch_tokens), plan


KINDS = ("constant", "cosine", "linear", "wsd")


class TestLearningRate:
    @pytest.mark.parametrize("kind", KINDS)
    @PATIENT
    @given(
        warmup=st.integers(0, 3000),
        data_parallel=st.sampled_from([1, 2, 8]),
        micro_batch=st.sampled_from([1, 2, 4]),
    )
    def test_no_layout_changes_it(self, kind: Any, warmup: int, data_parallel: int, micro_batch: int) -> None:
        """accelerate#1382: 1, 2 and 8 ranks, any accumulation: the same rate after the same tokens."""
        schedule = Schedule(kind=kind, warmup_tokens=warmup)
        one, _ = rate(schedule, global_batch=64)
        other, plan = rate(schedule, global_batch=64, data_parallel=data_parallel, micro_batch=micro_batch)
        assert plan.accumulation == 64 // (data_parallel * micro_batch)
        assert [one.at(tokens) for tokens in range(0, 64_001, 640)] == [
            other.at(tokens) for tokens in range(0, 64_001, 640)
        ]

    @pytest.mark.parametrize("kind", KINDS)
    @PATIENT
    @given(warmup=st.integers(0, 800), tokens=st.integers(0, 64_000), factor=st.sampled_from([2, 4, 8]))
    def test_nor_does_the_batch_size(self, kind: Any, warmup: int, tokens: int, factor: int) -> None:
        """With as many tokens in the run: fewer and larger steps read the same curve."""
        schedule = Schedule(kind=kind, warmup_tokens=warmup)
        small, _ = rate(schedule, global_batch=8, steps=800)
        large, _ = rate(schedule, global_batch=8 * factor, steps=800 // factor)
        assert small.at(tokens) == large.at(tokens)

    @pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
    def test_scaling_with_the_batch(self, scaling: Any, factor: float) -> None:
        optimizer = Optimizer(lr=0.5, lr_scaling=scaling, lr_reference_batch=8)
        assert rate(Schedule(), optimizer=optimizer, global_batch=8)[0].peak == 0.5
        assert rate(Schedule(), optimizer=optimizer, global_batch=32)[0].peak == pytest.approx(0.5 * factor)
        assert rate(Schedule(), optimizer=optimizer, global_batch=2)[0].peak == pytest.approx(0.5 / factor)
        own = replace(optimizer, lr_reference_batch=0)  # the batch at hand is the reference
        assert rate(Schedule(), optimizer=own, global_batch=32)[0].peak == 0.5

    @pytest.mark.parametrize("scaling", ["none", "linear", "sqrt"])
    def test_warmup_is_a_number_of_tokens(self, scaling: Any) -> None:
        """In tokens it is not rescaled; steps are those at the reference batch: steps · B_ref / B of these."""
        optimizer = Optimizer(lr_scaling=scaling, lr_reference_batch=8)
        for global_batch in (4, 8, 32):
            given_tokens, _ = rate(
                Schedule(warmup_tokens=960), optimizer=optimizer, global_batch=global_batch
            )
            assert given_tokens.warmup_tokens == 960
            in_steps, plan = rate(Schedule(warmup_steps=12), optimizer=optimizer, global_batch=global_batch)
            assert in_steps.warmup_tokens == 12 * 8 * 10
            assert in_steps.warmup_tokens / plan.global_batch_tokens == 12 * 8 / global_batch
        own, plan = rate(Schedule(warmup_steps=12), global_batch=32)
        assert own.warmup_tokens == 12 * plan.global_batch_tokens

    @pytest.mark.parametrize("kind", KINDS)
    @PATIENT
    @given(
        warmup=st.integers(0, 7999),
        floor=st.sampled_from([0.0, 0.1, 1.0]),
        decay=st.sampled_from([0.1, 0.5, 1.0]),
    )
    def test_shape(self, kind: Any, warmup: int, floor: float, decay: float) -> None:
        """Up in a line to the peak, then never up again, and at the end what the kind promises."""
        schedule = Schedule(kind=kind, warmup_tokens=warmup, min_lr_fraction=floor, decay_fraction=decay)
        curve, _ = rate(schedule, optimizer=Optimizer(lr=2.0))
        assert curve.total_tokens == 8000
        assert curve.at(warmup) == 2.0
        for tokens in range(0, warmup, 97):
            assert curve.at(tokens) == pytest.approx(2.0 * tokens / warmup)
        after = [curve.at(tokens) for tokens in [*range(warmup, 8000, 53), 8000]]
        assert all(later <= earlier for earlier, later in pairwise(after))
        assert curve.at(9000) == curve.at(8000)  # a run that goes on goes on at the floor
        assert curve.at(8000) == pytest.approx(2.0 if kind == "constant" else 2.0 * floor)

    def test_halfway(self) -> None:
        schedule = Schedule(warmup_tokens=2000, min_lr_fraction=0.2)
        assert rate(replace(schedule, kind="cosine"))[0].at(5000) == pytest.approx(0.6)
        assert rate(replace(schedule, kind="cosine"))[0].at(3500) == pytest.approx(
            0.2 + 0.8 * (1 + sqrt(0.5)) / 2
        )
        assert rate(replace(schedule, kind="linear"))[0].at(3500) == pytest.approx(0.8)
        stable = rate(replace(schedule, kind="wsd", decay_fraction=0.25))[0]
        assert [stable.at(tokens) for tokens in (2000, 6000, 7000, 8000)] == pytest.approx(
            [1.0, 1.0, 0.6, 0.2]
        )

    def test_a_run_may_end_during_its_warmup(self) -> None:
        """A short trial of a long run's config is no mistake."""
        curve, plan = rate(Schedule(warmup_tokens=10**6))
        assert 0 < curve.at(plan.global_batch_tokens) < curve.peak
