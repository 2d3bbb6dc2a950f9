"""The decoder against the same mathematics written out plainly, with a mask for documents and one big softmax."""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.config.model import Model, RopeScaling
from fivefold.nn.attention import Segments, causal_attention
from fivefold.nn.causal_attention import blocked_causal_attention
from fivefold.nn.decoder import Decoder
from fivefold.nn.initialize import BLOCK, initial_values
from fivefold.nn.inputs import Inputs
from fivefold.nn.loss import IGNORED, cross_entropy_sum
from fivefold.proof.error import errors
from fivefold.spec.parameters import Parameter, parameters

MODEL = Model(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=8, ffn=40, vocab=50, init_std=0.2)
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
BOUND = {torch.float64: 1e-13, torch.float32: 1e-5}


def made(model: Model, dtype: torch.dtype, seed: int = 3) -> Decoder:
    decoder = Decoder(model).to(dtype)
    named = dict(decoder.named_parameters())
    with torch.no_grad():
        for spec in filter(lambda spec: spec.trained, parameters(model)):
            values = initial_values(spec, seed, 0, spec.numel).view(spec.shape)
            named[spec.name].copy_(values + 0.1 * (spec.std == 0.0) * torch.randn(spec.shape))
    return decoder


def batch(rows: int = 4, sequence: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(MODEL.vocab, (rows, sequence), generator=generator)
    labels = torch.randint(MODEL.vocab, (rows, sequence), generator=generator)
    labels[0] = IGNORED
    labels[1, 3:] = IGNORED
    documents = torch.zeros(rows, sequence, dtype=torch.int32)
    documents[2, 7:], documents[2, 8:] = 1, 2
    documents[3, 1:] = 1
    return tokens, labels, documents


def plain_decoder(decoder: Decoder, tokens: Tensor, documents: Tensor) -> Tensor:
    """Logits `[batch, sequence, vocabulary]`, from the textbook."""
    model, weights = decoder.model, dict(decoder.named_parameters())
    dtype = weights["embedding.weight"].dtype
    sequence = tokens.shape[1]
    causal = torch.ones(sequence, sequence, dtype=torch.bool).tril()
    visible = causal & (documents.unsqueeze(2) == documents.unsqueeze(1))

    def rms_norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        if model.norm == "rmsnorm":
            return rms_norm(x, name)
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return (
            centred / (variance + model.norm_eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def feed_forward(x: Tensor, name: str) -> Tensor:
        up = linear(x, f"{name}.up")
        if model.activation == "swiglu":
            gate = linear(x, f"{name}.gate")
            return linear(gate * torch.sigmoid(gate) * up, f"{name}.down")
        inner = sqrt(2 / pi) * (up + 0.044715 * up**3)
        curve = torch.tanh(inner) if model.activation == "gelu_tanh" else torch.erf(up / sqrt(2))
        return linear(0.5 * up * (1 + curve), f"{name}.down")

    def turn(x: Tensor) -> Tensor:  # [batch, heads, sequence, head_dim]
        half = model.head_dim // 2
        out = torch.empty_like(x)
        for i in range(half):
            frequency = model.rope_theta ** (-2 * i / model.head_dim)
            if model.rope_scaling:
                frequency = scaled(frequency, model.rope_scaling)
            angle = torch.arange(sequence, dtype=torch.float64) * frequency
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
            out[..., i] = x[..., i] * cos - x[..., i + half] * sin
            out[..., i + half] = x[..., i + half] * cos + x[..., i] * sin
        return out

    x = weights["embedding.weight"][tokens]
    if model.positions == "learned":
        x = x + weights["positions.weight"][:sequence]
    if model.embedding_norm:
        x = norm(x, "embedding_norm")
    for layer in range(model.layers):
        name = f"layers.{layer}"
        h = norm(x, f"{name}.attention_norm")
        q, k, v = (
            linear(h, f"{name}.attention.{part}").unflatten(-1, (-1, model.head_dim)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        if model.qk_norm:
            q, k = (rms_norm(t, f"{name}.attention.{part}_norm") for t, part in ((q, "query"), (k, "key")))
        if model.positions == "rotary":
            q, k = turn(q), turn(k)
        k, v = (t.repeat_interleave(model.heads // model.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / sqrt(model.head_dim)
        attended = scores.masked_fill(~visible.unsqueeze(1), float("-inf")).softmax(-1) @ v
        x = x + linear(attended.transpose(1, 2).flatten(2), f"{name}.attention.output")
        x = x + feed_forward(norm(x, f"{name}.feed_forward_norm"), f"{name}.feed_forward")
    head = "embedding" if model.tied else "head"
    return linear(norm(x, "norm"), head)


def scaled(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule, as its authors state it: three ranges of wavelength."""
    wavelength = 2 * pi / frequency
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def gradients(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    names, tensors = zip(*decoder.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, tensors), strict=True))


GPT2: dict[str, Any] = {
    "kv_heads": 4,
    "head_dim": 6,
    "tied": True,
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "qkv_bias": True,
    "output_bias": True,
    "positions": "learned",
    "max_positions": 24,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"tied": True},
    {"rope_scaling": LLAMA3},
    {"kv_heads": 4},
    {"kv_heads": 1},
    {"qkv_bias": True},
    {"qkv_bias": True, "output_bias": True},
    {"qk_norm": True},
    {"norm": "layernorm", "activation": "gelu", "embedding_norm": True},
    GPT2,
]


def judged(decoder: Decoder, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """A key's bias adds the same to all scores of a query, so softmax ignores it where keys are not turned:
    its gradient is rounding, and is judged together with the query's."""
    if decoder.model.positions == "rotary":
        return found
    for key in [name for name in found if name.endswith("key.bias")]:
        query = key.replace("key", "query")
        found[query] = torch.cat((found[query], found.pop(key)))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "change", CHANGES, ids=lambda change: " ".join(change) if change is not GPT2 else "gpt2"
)
def test_decoder_equals_the_textbook(dtype: torch.dtype, change: dict[str, Any]) -> None:
    decoder = made(replace(MODEL, **change), dtype)
    tokens, labels, documents = batch()
    segments = Segments.from_documents(documents)
    logits = plain_decoder(decoder, tokens, documents)
    assert errors({"": decoder(Inputs(tokens, segments))}, {"": logits})[""] <= BOUND[dtype]
    loss = decoder(Inputs(tokens, segments, labels))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    assert loss.dtype == dtype
    assert loss.item() == pytest.approx(expected.item(), rel=BOUND[dtype])
    worst = errors(judged(decoder, gradients(decoder, loss)), judged(decoder, gradients(decoder, expected)))
    assert max(worst.values()) <= BOUND[dtype], worst


def test_documents_do_not_see_each_other() -> None:
    decoder = made(MODEL, torch.float64)
    tokens, _, documents = batch()
    segments = Segments.from_documents(documents)
    before = decoder(Inputs(tokens, segments))
    tokens[2, :7] = (tokens[2, :7] + 1) % MODEL.vocab
    after = decoder(Inputs(tokens, segments))
    assert torch.equal(before[2, 7:], after[2, 7:])
    assert not torch.equal(before[2, :7], after[2, :7])


@pytest.mark.parametrize("sequence", [1, 2, 127, 128, 129, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_blocked_attention_is_attention(sequence: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, sequence, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    k, v = (
        torch.randn(2, kv_heads, sequence, 4, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(2)
    )
    grad = torch.randn(q.shape, dtype=torch.float64, generator=generator)
    mine = blocked_causal_attention(q, k, v)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert errors({"": mine}, {"": theirs})[""] <= 1e-14
    found, expected = (torch.autograd.grad(out, (q, k, v), grad) for out in (mine, theirs))
    scale = sum(e.norm() for e in expected)
    for f, e in zip(found, expected, strict=True):
        assert (f - e).norm() <= 1e-14 * scale


@pytest.mark.parametrize("boundary", [None, 900])
def test_long_sequences_fall_back_to_flash(boundary: int | None) -> None:
    """Above the length whose probabilities are kept, the result is the same."""
    q = torch.randn(2, 2, 2100, 4, dtype=torch.float64)
    documents = torch.zeros(2, 2100, dtype=torch.int32)
    if boundary:
        documents[0, boundary:] = 1
    segments = Segments.from_documents(documents)
    found, expected = causal_attention(q, q, q, segments), blocked_causal_attention(q, q, q, documents)
    assert torch.allclose(found, expected, atol=1e-13)


class LargestFloat(TorchDispatchMode):
    """The largest floating-point storage that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_is_exact_and_never_holds_all_logits(dtype: torch.dtype) -> None:
    tokens, width, vocab = 3000, 16, 4099  # three chunks, the last one short
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::3] = IGNORED
    with LargestFloat() as largest:
        loss = cross_entropy_sum(hidden, weight, labels)
        found = torch.autograd.grad(loss * 0.5, (hidden, weight))
    assert largest.numel < tokens * vocab / 2
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=BOUND[dtype])
    for f, e in zip(found, torch.autograd.grad(expected * 0.5, (hidden, weight)), strict=True):
        assert (f - e).norm() <= BOUND[dtype] * e.norm()


def test_all_labels_masked_gives_zero_and_zero_gradients() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss = cross_entropy_sum(hidden, weight, torch.full((5,), IGNORED))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_half_precision_loss_is_summed_in_float32() -> None:
    hidden, weight = torch.randn(64, 8).bfloat16(), torch.randn(100, 8).bfloat16()
    labels = torch.randint(100, (64,))
    loss = cross_entropy_sum(hidden, weight, labels)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    "span", [(0, 3 * BLOCK + 5), (17, 40), (BLOCK - 1, BLOCK + 1), (2 * BLOCK, 2 * BLOCK), (5, 9000)]
)
def test_initial_values_of_a_part_are_that_part(span: tuple[int, int]) -> None:
    spec = Parameter("layers.0.attention.query.weight", (100, 150), "attention", 0, std=0.02)
    whole = initial_values(spec, 11, 0, spec.numel)
    assert torch.equal(initial_values(spec, 11, *span), whole[slice(*span)])
    assert whole.std().item() == pytest.approx(0.02, rel=0.05)
    other = initial_values(replace_name(spec), 11, 0, spec.numel)
    assert abs((whole * other).mean().item()) < 0.02**2 * 0.05
    state = torch.get_rng_state()
    initial_values(spec, 11, 0, 100)
    assert torch.equal(torch.get_rng_state(), state)


def replace_name(spec: Parameter) -> Parameter:
    return Parameter("layers.1.attention.query.weight", spec.shape, spec.role, 1, std=spec.std)
