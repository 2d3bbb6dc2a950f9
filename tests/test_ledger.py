"""The ledger against what torch counts: FLOPs, saved activations, states, and the bytes the trainer sends.

Tests import torch; the ledger does not.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.model import Experts, LatentAttention, Model
from fivefold.config.tree import Config
from fivefold.ledger import activations, flops, hardware
from fivefold.ledger.job import Job, Stack
from fivefold.ledger.operations import head, layer
from fivefold.ledger.total import estimate
from fivefold.nn.attention import Segments
from fivefold.nn.decoder import Decoder, DecoderLayer
from fivefold.nn.dropout import step_key, token_keys
from fivefold.nn.inputs import Inputs
from fivefold.nn.recompute import Recompute
from fivefold.nn.rotary import rotary_table
from fivefold.planner.jobs import job_of
from fivefold.spec.legal import resolve_config
from fivefold.spec.parameters import total
from reference_blocks import alibi_attention, feed_forward, latent_attention, layer_weights
from test_traffic import closed_form
from toy import toy_config

MODEL = Model(layers=2, hidden=256, heads=4, kv_heads=4, ffn=688, vocab=512)
GROUPED = Model(layers=2, hidden=256, heads=8, kv_heads=2, ffn=640, vocab=500, tied=True)
GPT = Model(
    layers=2, hidden=256, heads=4, ffn=1024, vocab=512, tied=True, activation="gelu_tanh", norm="layernorm",
    positions="learned", qkv_bias=True, output_bias=True,
)  # fmt: skip
QWEN = replace(MODEL, kv_heads=2, qk_norm=True, qkv_bias=True)
MOE = replace(MODEL, experts=Experts(count=8, top_k=2, ffn=96, auxiliary_loss=0.01))
SHARED = replace(
    MODEL,
    experts=Experts(
        count=8, top_k=3, ffn=96, shared_ffn=128, shared_gate=True, router="sigmoid", router_bias=True,
        normalize_top_k=False, scale=2.5,
    ),
)  # fmt: skip
LATENT = LatentAttention(q_rank=48, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=40)
UNTRAINED = {
    "DeepSeek": replace(MODEL, latent=LATENT),
    "DeepSeek-lite": replace(MODEL, latent=replace(LATENT, q_rank=0)),
    "BLOOM": replace(GPT, positions="alibi", activation="gelu", embedding_norm=True),
}
BLOCKS = {"Llama": MODEL, "GPT-2": GPT, "Qwen3": QWEN, "Mixtral": MOE, "shared experts": SHARED}
MODELS = {**BLOCKS, "grouped heads": GROUPED}
DTYPES = {torch.float32: 4, torch.float64: 8, torch.bfloat16: 2}


def job(model: Model, itemsize: int, batch: int, length: int, recompute: str = "none") -> Job:
    manual_backward = itemsize > 2
    stack = Stack(
        attention="blocked" if manual_backward else "flash",
        manual_backward=manual_backward,
        compute_copy=0,
        chunked_loss=True,
        early_stop=True,
    )
    on = hardware.preset("1x1 cpu")
    return Job(model, on, batch, 1, length, recompute=recompute, itemsize=itemsize, stack=stack)  # type: ignore[arg-type]


def whole_rows(batch: int, length: int) -> Segments:
    """Every row one document."""
    return Segments.from_documents(torch.zeros(batch, length, dtype=torch.int64))


class Alive(TorchDispatchMode):
    """Storages that operators made and that still live: with only a graph held, those that its backward keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[int, StorageWeakRef]] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.found[storage.data_ptr()] = (storage.nbytes(), StorageWeakRef(storage))

    def bytes_besides(self, own: Iterable[Tensor]) -> int:
        pointers = {tensor.untyped_storage().data_ptr() for tensor in own}
        return sum(
            size
            for pointer, (size, storage) in self.found.items()
            if pointer not in pointers and not storage.expired()
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out


def kept_by_autograd(model: Model, mode: Any, batch: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that the last decoder layer keeps for its backward, parameters and shared tables apart."""
    block = DecoderLayer(model, model.layers - 1, Recompute(mode)).to(dtype)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    rotary = rotary_table(model, torch.arange(length)) if model.positions == "rotary" else None
    segments = whole_rows(batch, length)
    x = torch.randn(batch, length, model.hidden, dtype=dtype).requires_grad_().clone()
    keys = token_keys(step_key(0, 0), torch.arange(batch), torch.arange(length)) if model.dropout else None
    alive = Alive()
    with alive:
        alive.add(x)
        out, routing = block(x, rotary, segments, keys=keys)
    graph = (out.grad_fn, routing.imbalance.grad_fn if routing else None)
    del x, out, routing
    assert graph[0] is not None
    return alive.bytes_besides((*block.parameters(), *block.buffers(), *(rotary or ())))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["none", "attention", "elementwise", "full"])
def test_saved_activations_are_autograds(name: str, dtype: torch.dtype, mode: str) -> None:
    """At a length that is no multiple of blocked attention's blocks."""
    model, length = BLOCKS[name], 200
    predicted = activations.saved(job(model, DTYPES[dtype], 2, length, mode), bool(model.experts.count))
    assert predicted == kept_by_autograd(model, mode, 2, length, dtype)


def test_saved_masks_are_autograds() -> None:
    expected = job(BLOCKS["Llama"], 4, 2, 200, "none")
    expected = dataclasses.replace(expected, stack=dataclasses.replace(expected.stack, dropout=True))
    model = replace(BLOCKS["Llama"], dropout=0.1)
    assert activations.saved(expected, False) == kept_by_autograd(model, "none", 2, 200, torch.float32)


def in_place(_: object, a: Any, b: Any, *more: Any, **options: Any) -> int:
    """FLOPs of addmm_ and baddbmm_."""
    return int(2 * torch.Size(a).numel() * b[-1])


def grouped(a: Any, b: Any, *more: Any, **options: Any) -> int:
    """FLOPs of rows by their experts' matrices."""
    return int(2 * a[0] * a[1] * b[-1])


def transposed(a: Any, b: Any, *more: Any, **options: Any) -> int:
    """FLOPs of the rows of both by each other."""
    return int(2 * a[0] * a[1] * b[1])


def expert_products(x: Any, gate: Any, *more: Any, **options: Any) -> int:
    """FLOPs of gate, up and down."""
    return int(6 * x[0] * x[1] * gate[1])


def expert_gradients(grad: Any, x: Any, gate: Any, *more: Any, **options: Any) -> int:
    return 2 * expert_products(x, gate)


def pairs(query: Any, key: Any, value: Any) -> int:
    """FLOPs of one product over all pairs of query and key; key and value have the same width."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * width)


def flash(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> int:
    return 2 * pairs(query, key, value)


def flash_backward(grad: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> int:
    return 5 * pairs(query, key, value)


# What FlopCounterMode counts as nothing.
ATEN = torch.ops.aten
UNCOUNTED: Any = {
    ATEN.addmm_: in_place,
    ATEN.baddbmm_: in_place,
    torch.ops.fivefold.rows_times: grouped,
    torch.ops.fivefold.transposed_times: transposed,
    torch.ops.fivefold.expert_products: expert_products,
    torch.ops.fivefold.expert_gradients: expert_gradients,
    ATEN._scaled_dot_product_flash_attention_for_cpu: flash,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flash_backward,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["none", "attention", "elementwise", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
def test_flops_are_the_counters(name: str, mode: Any, dtype: torch.dtype) -> None:
    """Forward and backward as FlopCounterMode sees them, with what recomputation and flash attention's backward
    add. One block of 128 queries sees all pairs, so the full convention is what runs; the head's three products
    are all in the forward (chunked cross-entropy)."""
    model = MODELS[name]
    decoder = Decoder(model, mode).to(dtype)
    tokens = torch.randint(model.vocab, (2, 128))
    counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
    with counter:
        decoder(Inputs(tokens, whole_rows(2, 128), tokens)).backward()
    ours = job(model, DTYPES[dtype], 2, 128, mode)
    assert counter.get_total_flops() == flops.hardware_flops(ours, "full")
    if mode == "none" and dtype == torch.float32:
        assert counter.get_total_flops() == flops.model_flops(ours, "full")


@pytest.mark.parametrize("name", [*MODELS, *UNTRAINED])
def test_seconds_and_flops_count_the_same_matmuls(name: str) -> None:
    model = {**MODELS, **UNTRAINED}[name]
    ours = job(model, 4, 2, 128)
    per_token = flops.forward_per_token(model, 128, "full")
    work = layer(ours, bool(model.experts.count))
    assert sum(op.flops for op in work.matmuls) * model.layers == pytest.approx(per_token.layers * 256)
    assert work.core.full_flops * model.layers == per_token.core * 256
    assert head(ours).flops == per_token.head * 256


@pytest.mark.parametrize("name", UNTRAINED)
def test_flops_of_layers_that_are_only_planned(name: str) -> None:
    """Latent attention and ALiBi against layers written out in the test."""
    model = UNTRAINED[name]
    weights = layer_weights(model)
    attention = latent_attention if model.latent.kv_rank else alibi_attention
    x = torch.randn(2, 128, model.hidden, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        feed_forward(weights, attention(model, weights, x)).sum().backward()
    per_token = flops.forward_per_token(replace(model, layers=1), 128, "full")
    assert counter.get_total_flops() == 3 * (per_token.layers + per_token.core) * 256


def test_flop_conventions() -> None:
    """Llama-3 8B at 8192: 57.9 GFLOP a token counting all pairs, 51.5 causal (published/FORMULAS.md §3)."""
    model = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    for convention, expected in (("full", 57.9e9), ("causal", 51.5e9)):
        found = 3 * flops.forward_per_token(model, 8192, convention).total  # type: ignore[arg-type]
        assert found == pytest.approx(expected, rel=0.002)


def test_korthikanti_activations() -> None:
    """22B without recompute: 59.25 GiB to the last digit; sequence parallel + selective: 34sbh/t (table 2)."""
    model = Model(
        layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, activation="gelu", norm="layernorm",
        positions="learned",
    )  # fmt: skip
    stack = Stack(attention="unfused", fused=True, dropout=True)
    on = hardware.preset("1x8 a100")
    plain = Job(model, on, 4, 1, 2048, tp=8, stack=stack)
    assert 48 * activations.saved(plain, False) / 2**30 == 59.25
    both = Job(model, on, 4, 1, 2048, tp=8, sequence_parallel=True, recompute="attention", stack=stack)
    assert 48 * activations.saved(both, False) == 48 * 34 * 2048 * 4 * 6144 / 8


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_traffic_is_what_the_trainer_sends(zero: int, dtype: str, accumulation: int) -> None:
    """Rows equal to the closed form that the recorded step equals (test_traffic), to the byte."""
    for world in (2, 3, 4):
        check_traffic(toy_config(zero=zero, dtype=dtype, global_batch=accumulation * world), world)
    hybrid = {"zero": 3, "dp_replicate": 2, "dp_shard": 2}
    check_traffic(toy_config(dtype=dtype, global_batch=accumulation * 4, **hybrid), 4)


def check_traffic(config: Config, world: int) -> None:
    import msgspec

    run = msgspec.structs.replace(config.run, ranks=world)
    config = msgspec.structs.replace(config, run=run)
    found = estimate(job_of(config)).traffic
    ours = sorted((r.axis, r.primitive, r.phase, r.times, round(r.bytes_per_rank)) for r in found)
    expected = closed_form(resolve_config(config, world))
    assert ours == [(r.axis, r.primitive, r.phase, r.count, r.bytes_per_rank) for r in expected]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_by_zero(zero: int) -> None:
    """formulas.md §6 for float32 masters that are the parameters: 4 + 4 + 8 bytes, each split from its stage on."""
    on = hardware.preset("1x4 h100")
    stack = Stack(compute_copy=0, chunked_loss=True)
    shards = 4 if zero else 1
    found = Job(MODEL, on, 1, 1, 256, dp_replicate=4 // shards, dp_shard=shards, zero=zero, stack=stack)
    memory = estimate(found).fullest.memory
    count = total(MODEL)
    assert memory.optimizer == 8 * count / (4 if zero >= 1 else 1)
    assert memory.gradients == 4 * count / (4 if zero >= 2 else 1)
    assert memory.parameters == 4 * count / (4 if zero >= 3 else 1)


def test_a_pipeline_keeps_gradients_whole() -> None:
    """Under pp, zero 2 and 3 hold full gradients until the end of the step."""
    on = hardware.preset("1x4 h100")
    stack = Stack(compute_copy=0, chunked_loss=True)
    model = Model(layers=4, hidden=256, heads=4, ffn=688, vocab=512)
    memories = [
        estimate(Job(model, on, 1, 4, 256, pp=2, dp_shard=2, zero=zero, stack=stack)).fullest.memory
        for zero in (1, 2, 3)
    ]
    assert len({memory.gradients for memory in memories}) == 1


def test_flash_attention_leaves_little_to_recompute() -> None:
    """Megatron-LM#1225: selective recompute saved 2 % with flash attention, where it saves most without."""
    model = Model(layers=1, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=1000)
    saving = {}
    for kind in ("flash", "unfused"):
        stack = Stack(attention=kind, fused=True)  # type: ignore[arg-type]
        on = hardware.preset("1x1 h100")
        none, attention = (
            activations.saved(Job(model, on, 1, 1, 8192, recompute=mode, stack=stack), False)  # type: ignore[arg-type]
            for mode in ("none", "attention")
        )
        saving[kind] = 1 - attention / none
    assert saving["flash"] < 0.03
    assert saving["unfused"] > 0.5
