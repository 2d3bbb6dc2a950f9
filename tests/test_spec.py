"""Parameters, layout table and mesh: against the decoder, closed forms and one another."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.config.errors import ConfigError
from fivefold.config.model import Experts, LatentAttention, Model
from fivefold.config.tree import Batch, Config, Parallel, Run
from fivefold.nn.decoder import Decoder
from fivefold.spec.layout import Owned, Split, placements, table
from fivefold.spec.legal import Resolved, check_layout, check_trainable, resolve_config, units
from fivefold.spec.mesh import AXES, Mesh, resolve
from fivefold.spec.parameters import active, parameters, total
from spec_cases import PATIENT, meshes, offered

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
