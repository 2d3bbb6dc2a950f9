"""The ledger against what torch counts: FLOPs, saved activations, states, and the bytes the trainer sends.

Tests import torch; the ledger does not.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.tree import Config, Model
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
from test_traffic import closed_form
from toy import toy_config

MODEL = Model(layers=2, hidden=256, heads=4, kv_heads=4, ffn=688, vocab=512)
GROUPED = Model(layers=2, hidden=256, heads=8, kv_heads=2, ffn=640, vocab=500, tied=True)
DTYPES = {torch.float32: 4, torch.float64: 8, torch.bfloat16: 2}


def job(model: Model, itemsize: int, batch: int, length: int, recompute: str = "none") -> Job:
    stack = Stack(
        attention="flash" if itemsize == 2 else "blocked", compute_copy=0, chunked_loss=True, early_stop=True
    )
    on = hardware.preset("1x1 cpu")
    return Job(model, on, batch, 1, length, recompute=recompute, itemsize=itemsize, stack=stack)  # type: ignore[arg-type]


def whole_rows(batch: int, length: int) -> Segments:
    """Every row one document."""
    return Segments.from_documents(torch.zeros(batch, length, dtype=torch.int64))


def dropping(length: int) -> Tensor:
    return token_keys(step_key(0, 0), torch.arange(2), torch.arange(length))


def kept_by_autograd(model: Model, mode: Any, batch: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of storages one decoder layer keeps, parameters and shared tables apart."""
    block = DecoderLayer(model, 0, Recompute(mode)).to(dtype)
    tables = rotary_table(model, torch.arange(length))
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *tables)}
    seen: dict[int, tuple[int, Any]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    x = torch.randn(batch, length, model.hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keys = dropping(length) if model.dropout else None
        out, _ = block(x, tables, whole_rows(batch, length), keys=keys)
    assert out.requires_grad
    return sum(size for pointer, (size, _) in seen.items() if pointer not in own)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["none", "attention", "full"])
@pytest.mark.parametrize("length", [256, 200])
def test_saved_activations_are_autograds(dtype: torch.dtype, mode: str, length: int) -> None:
    predicted = activations.saved(job(MODEL, DTYPES[dtype], 2, length, mode), False)
    assert predicted == kept_by_autograd(MODEL, mode, 2, length, dtype)


def test_saved_masks_are_autograds() -> None:
    expected = job(MODEL, 4, 2, 200, "none")
    expected = replace(expected, stack=replace(expected.stack, dropout=True))
    model = structs.replace(MODEL, dropout=0.1)
    assert activations.saved(expected, False) == kept_by_autograd(model, "none", 2, 200, torch.float32)


def in_place(_: object, a: Any, b: Any, *more: Any, **options: Any) -> int:
    """FLOPs of addmm_ and baddbmm_, which FlopCounterMode counts as nothing."""
    return int(2 * torch.Size(a).numel() * b[-1])


IN_PLACE: Any = {torch.ops.aten.addmm_: in_place, torch.ops.aten.baddbmm_: in_place}


@pytest.mark.parametrize("model", [MODEL, GROUPED])
def test_flops_are_the_counters(model: Model) -> None:
    """Forward and backward as FlopCounterMode sees them. One block of 128 queries sees all pairs, so the full
    convention is what runs; the head's three products are all in the forward (chunked cross-entropy)."""
    decoder = Decoder(model)
    tokens = torch.randint(model.vocab, (2, 128))
    documents = whole_rows(2, 128)
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with counter:
        decoder(Inputs(tokens, documents, tokens)).backward()
    ours = job(model, 4, 2, 128)
    assert counter.get_total_flops() == flops.model_flops(ours, "full") == flops.hardware_flops(ours, "full")
    per_token = flops.forward_per_token(model, 128, "full")
    assert sum(op.flops for op in layer(ours, False).matmuls) * model.layers == per_token.layers * 256
    assert layer(ours, False).core.full_flops * model.layers == per_token.core * 256
    assert head(ours).flops == per_token.head * 256


@pytest.mark.parametrize("mode", ["attention", "full"])
def test_hardware_flops_with_recompute(mode: Any) -> None:
    """What recomputation adds, as the counter sees it."""
    decoder = Decoder(MODEL, mode)
    tokens = torch.randint(MODEL.vocab, (2, 128))
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with counter:
        decoder(Inputs(tokens, whole_rows(2, 128), tokens)).backward()
    assert counter.get_total_flops() == flops.hardware_flops(job(MODEL, 4, 2, 128, mode), "full")


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
