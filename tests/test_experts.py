"""Mixture of experts: grouped products, routers, imbalance against closed forms, and the layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from fivefold.config.model import Experts as Options
from fivefold.config.model import Model
from fivefold.nn.attention import Segments
from fivefold.nn.decoder import Decoder
from fivefold.nn.expert_swiglu import expert_swiglu
from fivefold.nn.experts import Experts
from fivefold.nn.grouped import _one_by_one, _together, grouped_linear
from fivefold.nn.inputs import Inputs
from fivefold.nn.router import Router, balanced, imbalance
from fivefold.proof.error import errors
from ranks import Ranks
from test_decoder import made
from test_parity import check, run
from toy import MODEL, reference, toy_config

OPTIONS = Options(count=5, top_k=2, ffn=12, auxiliary_loss=0.05)
VARIANTS: dict[str, Options] = {
    "softmax": OPTIONS,
    "not renormalised": replace(OPTIONS, normalize_top_k=False, top_k=3),
    "sigmoid, scaled": replace(OPTIONS, router="sigmoid", scale=2.5),
    "shared": replace(OPTIONS, shared_ffn=20, dense_layers=1),
    "biased": replace(OPTIONS, router="sigmoid", router_bias=True, bias_update_rate=0.05),
    "limited to groups": replace(
        OPTIONS, count=8, groups=4, top_groups=2, top_k=4, router="sigmoid", router_bias=True
    ),
    "limited to a group": replace(OPTIONS, count=6, groups=2, top_groups=1, top_k=2),
    "shared behind a gate": replace(OPTIONS, shared_ffn=20, shared_gate=True),
}


def with_experts(options: Options) -> Model:
    return replace(MODEL, experts=options)


COUNTS = [[3, 5, 2], [0, 10, 0], [0, 0, 0], [10, 0, 0], [1, 0, 9], [32, 0, 31], [64, 33, 100]]
"""Of rows: none, less than a tile, whole tiles, and tiles with a rest."""


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("grouped", [_together, grouped_linear])
def test_grouped_products_equal_the_loop(grouped: Any, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 8, generator=generator, requires_grad=True)
    weight = torch.randn(3, 12, 8, generator=generator, requires_grad=True)
    grad = torch.randn(sum(counts), 12, generator=generator)
    results = []
    for product in (grouped, _one_by_one):
        y = product(x, weight, torch.tensor(counts))
        results.append((y, *torch.autograd.grad(y, (x, weight), grad)))
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sizes",
    [[*counts, *reversed(counts)] for counts in COUNTS]
    + [[700, 1, 0], [0, 65, 1100], [2, 600, 3, 63, 512, 0]],
)
def test_experts_in_pieces_equal_the_loop(sizes: list[int], dtype: torch.dtype) -> None:
    """Of one and of two sources; less than a tile, more than a piece, whole ones, and nothing."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    x, weights = drawn(sum(sizes), 8), (drawn(3, 12, 8), drawn(3, 12, 8), drawn(3, 8, 12))
    grad = torch.randn_like(x)

    def loop() -> Tensor:
        gate, up, down = (weight.repeat(len(sizes) // 3, 1, 1) for weight in weights)
        groups = torch.tensor(sizes)
        inner = F.silu(_one_by_one(x, gate, groups)) * _one_by_one(x, up, groups)
        return _one_by_one(inner, down, groups)

    found, expected = (
        dict(
            zip(
                ("out", "x", "gate", "up", "down"),
                (y, *torch.autograd.grad(y, (x, *weights), grad)),
                strict=True,
            )
        )
        for y in (expert_swiglu(x, *weights, sizes), loop())
    )
    worst = errors(found, expected)
    assert max(worst.values()) <= (1e-13 if dtype == torch.float64 else 1e-6), worst


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_type_has_a_grouped_product(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 8).to(dtype), torch.randn(2, 16, 8).to(dtype)
    y = grouped_linear(x, weight, torch.tensor([2, 4]))
    expected = torch.cat((x[:2] @ weight[0].T, x[2:] @ weight[1].T))
    assert y.dtype == dtype
    assert torch.allclose(y, expected, rtol=1e-2, atol=1e-2)


def in_best_groups(wanted: Tensor, options: Options) -> Tensor:
    """DeepSeek-V3 2024, §2.1.2, group by group."""
    size, each = options.count // options.groups, options.top_k // options.top_groups
    members = [range(group * size, (group + 1) * size) for group in range(options.groups)]
    sums = [sum(sorted((wanted[i].item() for i in group), reverse=True)[:each]) for group in members]
    best = sorted(range(options.groups), key=lambda group: -sums[group])[: options.top_groups]
    allowed = {expert for group in best for expert in members[group]}
    return torch.stack([w if i in allowed else w - 100.0 for i, w in enumerate(wanted)])


def plain_experts(module: Experts, model: Model, x: Tensor) -> Tensor:
    """Token by token, from the textbook."""
    options, weights = model.experts, dict(module.named_parameters())
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for at in range(x.shape[1]):
            token = x[row, at]
            logits = weights["router.weight"] @ token
            scores = torch.sigmoid(logits) if options.router == "sigmoid" else torch.softmax(logits, 0)
            wanted = scores if module.selection_bias is None else scores + module.selection_bias
            if options.groups > 1:
                wanted = in_best_groups(wanted, options)
            chosen = wanted.argsort(descending=True)[: options.top_k]
            share = scores[chosen] / (scores[chosen].sum() if options.normalize_top_k else 1.0)
            total = torch.zeros_like(token)
            for factor, expert in zip(share, chosen.tolist(), strict=True):
                gate, up, down = (weights[f"{name}.weight"][expert] for name in ("gate", "up", "down"))
                total = total + options.scale * factor * (down @ (F.silu(gate @ token) * (up @ token)))
            if options.shared_ffn:
                gate, up, down = (weights[f"shared.{name}.weight"] for name in ("gate", "up", "down"))
                shared = down @ (F.silu(gate @ token) * (up @ token))
                if options.shared_gate:
                    shared = shared * torch.sigmoid(weights["shared_gate.weight"] @ token)
                total = total + shared
            out[row, at] = total
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_experts_equal_the_textbook(options: Options, dtype: torch.dtype) -> None:
    model = with_experts(options)
    module = made(model, dtype).layers["1"].experts
    assert isinstance(module, Experts)
    if module.selection_bias is not None:
        bias = torch.tensor([0.3, 0.0, -0.2, 0.1, -0.3, 0.2, -0.1, 0.05])
        module.selection_bias.copy_(bias[: options.count])
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    names, tensors = zip(*module.named_parameters(), strict=True)
    found, expected = module(x)[0], plain_experts(module, model, x)
    bound = 1e-13 if dtype == torch.float64 else 1e-5
    assert errors({"": found}, {"": expected})[""] <= bound
    grad = torch.randn_like(found)
    gradients = [
        dict(zip(("x", *names), torch.autograd.grad(y, (x, *tensors), grad), strict=True))
        for y in (found, expected)
    ]
    worst = errors(*gradients)
    assert max(worst.values()) <= bound, worst


class TestImbalance:
    def test_perfect_balance_is_exactly_one_a_sequence(self) -> None:
        """Megatron-LM#1617."""
        scores = torch.full((3, 8, 4), 0.25)
        experts = torch.arange(8 * 2).view(1, 8, 2).expand(3, 8, 2) % 4
        assert imbalance(scores, experts).item() == 3.0

    def test_all_on_one_expert(self) -> None:
        """f = E on one expert of E, whose probability is p: E · p."""
        scores = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 6, 4)
        assert imbalance(scores, torch.zeros(1, 6, 1, dtype=torch.long)).item() == pytest.approx(2.8)

    def test_half_and_half(self) -> None:
        """Two of four experts used alike, f = (2, 2, 0, 0), P = (0.4, 0.3, 0.2, 0.1): 1.4."""
        scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(1, 6, 4)
        experts = torch.tensor([0, 1]).expand(1, 6, 2)
        assert imbalance(scores, experts).item() == pytest.approx(1.4)
        assert imbalance(7 * scores, experts).item() == pytest.approx(1.4)  # sigmoid scores are normalised

    def test_sequences_are_judged_one_by_one(self) -> None:
        """Each sequence on an expert of its own is not balance, though the batch is."""
        scores = F.one_hot(torch.arange(2), 2).double().unsqueeze(1).expand(2, 5, 2)
        experts = torch.arange(2).view(2, 1, 1).expand(2, 5, 1)
        assert imbalance(scores, experts).item() == 4.0

    def test_it_is_in_the_gradient_and_not_in_the_loss(self) -> None:
        decoder = made(with_experts(replace(OPTIONS, auxiliary_loss=0.5)), torch.float64)
        tokens = torch.arange(40).view(2, 20)
        segments = Segments((20, 20))
        plain, weighted = (decoder(Inputs(tokens, segments, tokens), weight) for weight in (0.0, 3.0))
        assert plain.item() == weighted.item()
        parameters = list(decoder.parameters())
        found: list[Tensor] = []
        routers = [module for module in decoder.modules() if isinstance(module, Router)]
        assert len(routers) == 2
        x = decoder.embedding(tokens)
        for layer in decoder.layers.values():
            from fivefold.nn.rotary import rotary_table

            x, value = layer(x, rotary_table(decoder.model, torch.arange(20)), segments)
            assert value is not None
            found.append(value.imbalance)
        extra = torch.autograd.grad(1.5 * torch.stack(found).sum(), parameters, allow_unused=True)
        base, whole = (torch.autograd.grad(loss, parameters) for loss in (plain, weighted))
        for a, b, c in zip(base, whole, extra, strict=True):
            assert torch.allclose(a + (0.0 if c is None else c), b, atol=1e-12)


@pytest.mark.parametrize("recompute", ["attention", "elementwise", "full"])
def test_recompute_changes_nothing(recompute: Any) -> None:
    model = with_experts(OPTIONS)
    plain = made(model, torch.float32)
    again = Decoder(model, recompute)
    again.load_state_dict(plain.state_dict())
    tokens, segments = torch.arange(40).view(2, 20), Segments((20, 20))
    gradients = [
        torch.autograd.grad(decoder(Inputs(tokens, segments, tokens), 3.0), list(decoder.parameters()))
        for decoder in (plain, again)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class TestBiasBalancing:
    def test_a_bias_moves_against_its_load(self) -> None:
        bias = torch.tensor([0.5, 0.0, -0.5, 0.25])
        moved = balanced(bias, torch.tensor([9.0, 1.0, 5.0, 5.0]), 0.125)
        assert moved.tolist() == [0.375, 0.125, -0.5, 0.25]

    @pytest.mark.parametrize("recompute", ["none", "full"])
    def test_each_choice_is_counted_once(self, recompute: Any) -> None:
        options = VARIANTS["biased"]
        decoder = Decoder(with_experts(options), recompute)
        decoder.load_state_dict(made(with_experts(options), torch.float32).state_dict())
        tokens, segments = torch.arange(40).view(2, 20), Segments((20, 20))
        with torch.no_grad():
            decoder(Inputs(tokens, segments, tokens))
        assert not any(decoder.take_counts())
        for _ in range(2):
            decoder(Inputs(tokens, segments, tokens)).backward()
        counts = torch.tensor(decoder.take_counts(), dtype=torch.float64).view(2, 5)
        assert counts.sum(dim=1).tolist() == [2 * 40 * 2] * 2
        assert not any(decoder.take_counts())
        decoder.balance(counts.flatten().tolist())
        for layer, chosen in zip(decoder.layers.values(), counts, strict=True):
            assert torch.equal(layer.experts.selection_bias, 0.05 * (chosen.mean() - chosen).sign().float())

    def test_it_balances(self) -> None:
        """Routers that send everything to one expert are turned away from it."""
        options = replace(VARIANTS["biased"], top_k=1)
        decoder = made(with_experts(options), torch.float32)
        for layer in decoder.layers.values():
            layer.experts.selection_bias[0] = 2.0  # scores are below 1
        tokens, segments = torch.arange(40).view(2, 20), Segments((20, 20))
        shares = []
        for _ in range(60):
            decoder(Inputs(tokens, segments, tokens))
            counts = decoder.take_counts()
            shares.append(max(counts) / 40)
            decoder.balance(counts)
        assert shares[0] == 1.0
        assert shares[-1] < 0.5


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, backend=None) as started:
        yield started


@pytest.mark.parametrize(
    ("name", "zero"),
    [*(("biased", zero) for zero in range(4)), ("shared behind a gate", 3), ("limited to groups", 0)],
)
def test_layouts_equal_one_process(ranks: Ranks, name: str, zero: int) -> None:
    """With the auxiliary loss, unevenly masked tokens, uneven shards of 5 experts, accumulation 2."""
    config = toy_config(zero=zero, global_batch=4 * ranks.world_size, micro_batch=2)
    config = replace(config, model=with_experts(VARIANTS[name]))
    check(run(ranks, config), reference(config), 1e-12)
