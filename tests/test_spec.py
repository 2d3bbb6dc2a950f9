"""Parameters, layout table, mesh and batch arithmetic: against the decoder, closed forms and one another."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from itertools import pairwise, product
from math import prod, sqrt
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.config.errors import ConfigError
from fivefold.config.tree import (
    Batch,
    Config,
    Experts,
    LatentAttention,
    Model,
    Optimizer,
    Parallel,
    Run,
    Schedule,
)
from fivefold.nn.decoder import Decoder
from fivefold.spec.batch import BatchPlan, LearningRate, learning_rate, plan_batch
from fivefold.spec.layout import Owned, Split, placements, table
from fivefold.spec.legal import Resolved, check_layout, check_trainable, resolve_config, units
from fivefold.spec.mesh import AXES, Mesh, resolve
from fivefold.spec.parameters import active, parameters, total

PATIENT = settings(deadline=None, max_examples=60)  # the machine may be busy
SMALL = Model(layers=3, hidden=24, heads=4, kv_heads=2, ffn=40, vocab=50)
MOE = Experts(count=12, top_k=2, ffn=16, shared_ffn=12, shared_gate=True, dense_layers=1, router_bias=True)
LATENT = LatentAttention(kv_rank=8, nope_dim=4, rope_dim=2, value_dim=6)
GPT2 = Model(
    layers=12,
    hidden=768,
    heads=12,
    ffn=3072,
    vocab=50257,
    max_positions=1024,
    tied=True,
    activation="gelu_tanh",
    norm="layernorm",
    qkv_bias=True,
    output_bias=True,
    positions="learned",
)
LLAMA2_7B = Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000)
LLAMA3_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
QWEN3_06B = Model(
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    ffn=3072,
    vocab=151936,
    tied=True,
    qk_norm=True,
)
MIXTRAL = replace(LLAMA3_8B, vocab=32000, experts=Experts(count=8, top_k=2, ffn=14336))
FAMILIES = {
    "dense": SMALL,
    "biases": replace(
        SMALL, qkv_bias=True, output_bias=True, norm="layernorm", qk_norm=True, embedding_norm=True
    ),
    "gpt2": replace(GPT2, layers=2),
    "gelu": replace(SMALL, activation="gelu", output_bias=True),
    "experts": replace(SMALL, experts=MOE),
    "latent": replace(SMALL, latent=LATENT, experts=MOE),
    "latent, queries compressed": replace(SMALL, latent=replace(LATENT, q_rank=6)),
}
TRAINABLE = ("dense", "biases", "gpt2", "gelu", "experts")


class TestParameters:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("head_dim", [0, 10])
    def test_equal_the_decoders(self, tied: bool, head_dim: int) -> None:
        model = Model(
            layers=3, hidden=24, heads=4, kv_heads=2, head_dim=head_dim, ffn=40, vocab=50, tied=tied
        )
        with torch.device("meta"):
            decoder = Decoder(model)
        expected = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        assert {each.name: each.shape for each in parameters(model)} == expected
        assert total(model) == sum(parameter.numel() for parameter in decoder.parameters())

    @pytest.mark.parametrize("family", TRAINABLE)
    def test_equal_the_decoders_of_every_family(self, family: str) -> None:
        model = FAMILIES[family]
        check_trainable(resolve_config(Config(model=model)))
        with torch.device("meta"):
            decoder = Decoder(model)
        expected = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        assert {each.name: each.shape for each in parameters(model) if each.trained} == expected
        untrained = {name: tuple(buffer.shape) for name, buffer in decoder.named_buffers()}
        assert {each.name: each.shape for each in parameters(model) if not each.trained} == untrained

    @pytest.mark.parametrize(
        ("model", "count"),
        [
            (GPT2, 124_439_808),
            (LLAMA2_7B, 6_738_415_616),
            (LLAMA3_8B, 8_030_261_248),
            (QWEN3_06B, 596_049_920),
        ],
    )
    def test_published_models_have_their_published_count(self, model: Model, count: int) -> None:
        assert total(model) == active(model) == count

    def test_mixture_of_experts(self) -> None:
        assert total(MIXTRAL) == 46_702_792_704
        assert active(MIXTRAL) == 12_879_925_248
        biased = replace(MIXTRAL, experts=replace(MIXTRAL.experts, router_bias=True))
        assert total(biased) == total(MIXTRAL)  # a selection bias is not trained
        assert len(parameters(biased)) == len(parameters(MIXTRAL)) + MIXTRAL.layers

    @pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
    def test_names_are_unique_and_layers_complete(self, model: Model) -> None:
        found = parameters(model)
        assert len({each.name for each in found}) == len(found)
        assert {each.layer for each in found} == {None, *range(model.layers)}
        for each in found:
            assert each.layer is None or each.name.startswith(f"layers.{each.layer}.")
            assert each.numel > 0, each.name


degree = st.integers(1, 4)
meshes = st.builds(Mesh, pp=degree, dp_replicate=degree, dp_shard=degree, cp=degree, tp=degree)


class TestMesh:
    @PATIENT
    @given(mesh=meshes)
    def test_ranks_and_coordinates_are_one_to_one(self, mesh: Mesh) -> None:
        found = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
        assert [mesh.rank(at) for at in found] == list(range(mesh.world_size))
        # in the order of the axes, the innermost fastest
        assert [tuple(at.values()) for at in found] == list(product(*map(range, mesh.shape)))
        assert all(tuple(at) == AXES for at in found)

    @PATIENT
    @given(mesh=meshes, axes=st.sets(st.sampled_from(AXES)))
    def test_groups_partition_the_ranks(self, mesh: Mesh, axes: set[str]) -> None:
        groups = mesh.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            assert len(group) == prod(getattr(mesh, axis) for axis in axes)
            fixed = [{a: c for a, c in mesh.coordinates(rank).items() if a not in axes} for rank in group]
            assert all(each == fixed[0] for each in fixed)

    @PATIENT
    @given(mesh=meshes)
    def test_tensor_parallel_ranks_are_neighbours(self, mesh: Mesh) -> None:
        assert mesh.groups("tp") == [
            list(range(start, start + mesh.tp)) for start in range(0, mesh.world_size, mesh.tp)
        ]

    @PATIENT
    @given(mesh=meshes)
    def test_data_rank_numbers_the_replicas(self, mesh: Mesh) -> None:
        for group in mesh.groups("dp_replicate", "dp_shard"):
            assert [mesh.data_rank(rank) for rank in group] == list(range(mesh.data_parallel))
        for group in mesh.groups("pp", "cp", "tp"):
            assert len({mesh.data_rank(rank) for rank in group}) == 1


class TestResolve:
    @PATIENT
    @given(mesh=meshes, zero=st.sampled_from([0, 1, 2, 3]), open_axis=st.sampled_from([None, *AXES]))
    def test_one_axis_takes_what_is_left(self, mesh: Mesh, zero: Any, open_axis: str | None) -> None:
        named = {axis: -1 if axis == open_axis else getattr(mesh, axis) for axis in AXES}
        found = resolve(Parallel(**named, zero=zero), mesh.world_size)
        expected = {axis: getattr(mesh, axis) for axis in AXES}
        if zero == 0:  # nothing is sharded: replicas are replicas
            expected |= {"dp_replicate": mesh.data_parallel, "dp_shard": 1}
        assert {axis: getattr(found, axis) for axis in AXES} == expected

    def test_without_a_world_size_the_layout_decides(self) -> None:
        assert resolve(Parallel(dp_replicate=2, tp=3)).world_size == 6
        assert resolve(Parallel()) == Mesh()
        assert resolve(Parallel(dp_shard=4, zero=1)) == Mesh(dp_shard=4)

    def test_run_ranks_and_a_launcher_fill_the_open_axis(self) -> None:
        config = Config(parallel=Parallel(zero=3), run=Run(ranks=4))
        assert resolve_config(config).mesh == Mesh(dp_shard=4)
        assert resolve_config(config, 8).mesh == Mesh(dp_shard=8)  # the launcher's number counts

    @PATIENT
    @given(
        named=st.integers(1, 40),
        world_size=st.integers(1, 100),
    )
    def test_refused_rank_counts_come_with_legal_ones(self, named: int, world_size: int) -> None:
        layout = Parallel(dp_replicate=named)
        if world_size % named == 0:
            assert resolve(layout, world_size).world_size == world_size
            return
        with pytest.raises(ConfigError) as caught:
            resolve(layout, world_size)
        assert all(resolve(layout, count).world_size == count for count in offered(caught.value, world_size))


def offered(error: ConfigError, refused: int) -> list[int]:
    """The legal values that a refusal names, at most one on each side of the refused one."""
    match = re.search(r"nearest legal[^:]*: (\d+)(?: or (\d+))?$", str(error))
    assert match, str(error)
    values = [int(value) for value in match.groups() if value]
    assert sum(value < refused for value in values) <= 1
    assert sum(value > refused for value in values) <= 1
    return values


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


class TestLayoutTable:
    @pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
    def test_a_parameter_has_one_meaning(self, model: Model) -> None:
        for each in parameters(model):
            matching = [axes for pattern, axes in table(model) if fnmatchcase(each.name, pattern)]
            assert len(matching) <= 1, each.name
            assert placements(model, each.name) == (matching[0] if matching else {})

    def test_no_row_is_dead(self) -> None:
        alive = {
            pattern
            for model in FAMILIES.values()
            for pattern, _ in table(model)
            if any(fnmatchcase(each.name, pattern) for each in parameters(model))
        }
        assert {pattern for model in FAMILIES.values() for pattern, _ in table(model)} == alive

    @pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
    def test_placements_cut_whole_units_of_dims_that_exist(self, model: Model) -> None:
        for each in parameters(model):
            for axis, placement in placements(model, each.name).items():
                assert 0 <= placement.dim < len(each.shape), (each.name, axis)
                assert each.shape[placement.dim] % units(model, placement.unit) == 0, (each.name, axis)
            dims = [placement.dim for placement in placements(model, each.name).values()]
            assert len(set(dims)) == len(dims), each.name

    @pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
    def test_what_is_not_in_the_table_is_small_or_needed_whole(self, model: Model) -> None:
        """Replicated over tp: norms, biases of what is summed over tp, the router, a gate, compressions, positions."""
        whole = (
            ".bias",
            "norm.weight",
            ".router.weight",
            ".shared_gate.weight",
            "_down.weight",
            "selection_bias",
        )
        for each in parameters(model):
            if not placements(model, each.name) and each.name != "positions.weight":
                assert each.name.endswith(whole), each.name

    @pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
    @pytest.mark.parametrize("tp", range(1, 13))
    def test_a_degree_that_is_accepted_gives_equal_parts(self, model: Model, tp: int) -> None:
        try:
            check_layout(model, Parallel(), Mesh(tp=tp))
        except ConfigError as error:
            for value in offered(error, tp):
                check_layout(model, Parallel(), Mesh(tp=value))
            return
        for each in parameters(model):
            placement = placements(model, each.name).get("tp")
            if placement is None or (isinstance(placement, Split) and placement.uneven):
                continue
            count = units(model, placement.unit)
            if isinstance(placement, Split) and placement.replicable and tp > count:
                assert tp % count == 0
            else:
                assert each.shape[placement.dim] % tp == 0, each.name
                assert count % tp == 0, each.name

    @PATIENT
    @given(ep=st.integers(1, 16), shards=st.integers(1, 16))
    def test_expert_parallel(self, ep: int, shards: int) -> None:
        model, mesh = FAMILIES["experts"], Mesh(dp_shard=shards)
        if 12 % ep == 0 and shards % ep == 0:
            check_layout(model, Parallel(ep=ep), mesh)
            owned = [
                p
                for each in parameters(model)
                for p in placements(model, each.name).values()
                if isinstance(p, Owned)
            ]
            assert owned
            assert all(p.dim == 0 for p in owned)
            return
        with pytest.raises(ConfigError, match=rf"^parallel\.ep = {ep}: does not divide") as caught:
            check_layout(model, Parallel(ep=ep), mesh)
        for value in offered(caught.value, ep):
            check_layout(model, Parallel(ep=value), mesh)

    def test_kv_heads_may_be_replicated_but_not_torn(self) -> None:
        """torchtitan#2574: 2 KV heads on 4 ranks: two ranks hold each; 3 heads on 4 ranks or 4 on 6 cannot be."""
        model = replace(SMALL, heads=12, hidden=48, kv_heads=2, head_dim=4, ffn=48)
        for tp in (1, 2, 4, 6, 12):
            check_layout(model, Parallel(), Mesh(tp=tp))
        with pytest.raises(ConfigError, match=r"tp = 3: does not divide 2 KV heads; nearest legal: 2 or 4$"):
            check_layout(model, Parallel(), Mesh(tp=3))


class TestLegal:
    @PATIENT
    @given(
        pp=st.integers(1, 4),
        accumulation=st.integers(1, 12),
        schedule=st.sampled_from(
            ["gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "dualpipev"]
        ),
    )
    def test_refused_micro_batches_come_with_legal_batches(
        self, pp: int, accumulation: int, schedule: Any
    ) -> None:
        def plan(global_batch: int) -> Resolved:
            return resolve_config(
                Config(
                    model=replace(SMALL, layers=8),
                    parallel=Parallel(pp=pp, schedule=schedule, dp_replicate=3),
                    batch=Batch(global_batch=global_batch, micro_batch=2),
                )
            )

        try:
            assert plan(6 * accumulation).batch.accumulation == accumulation
        except ConfigError as error:
            assert pp > 1
            for value in offered(error, 6 * accumulation):
                plan(value)

    @PATIENT
    @given(heads=st.integers(1, 64), kv_heads=st.integers(1, 64))
    def test_refused_heads_come_with_legal_ones(self, heads: int, kv_heads: int) -> None:
        def config(heads: int, kv_heads: int) -> Config:
            return Config(model=Model(hidden=192, heads=heads, kv_heads=kv_heads))

        assume(192 % heads or (192 // heads) % 2 == 0)  # an odd head is refused for another reason
        if 192 % heads == heads % kv_heads == 0:
            resolve_config(config(heads, kv_heads))
            return
        with pytest.raises(ConfigError, match=r"^model\.(kv_)?heads = ") as caught:
            resolve_config(config(heads, kv_heads))
        if 192 % heads:
            assert all(192 % value == 0 for value in offered(caught.value, heads))
        else:
            for value in offered(caught.value, kv_heads):
                resolve_config(config(heads, value))
