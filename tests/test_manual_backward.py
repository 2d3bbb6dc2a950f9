"""The functions with a backward of their own against torch's operations, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from fivefold.config.model import Model
from fivefold.nn.feed_forward import swiglu
from fivefold.nn.grouped import copied_in_order
from fivefold.nn.manual_backward import uses_manual_backward
from fivefold.nn.norm import RMSNorm
from fivefold.nn.rotary import apply_rotary, rotary_table

MODEL = Model(hidden=24, heads=4, head_dim=6)
BOUND = {torch.float64: 1e-14, torch.float32: 1e-6}
TABLE = rotary_table(MODEL, torch.arange(5))


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    module = RMSNorm(x.shape[-1], eps=1e-5).to(x.dtype)
    return torch.func.functional_call(module, {"weight": weight}, (x,))  # type: ignore[no-any-return]


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def plain_rotary(x: Tensor) -> Tensor:
    cosine, sine = (table.to(x.dtype) for table in TABLE)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def by_position(x: Tensor) -> Tensor:
    """As projections lay heads out: a transposed view."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "norm": (norm, plain_norm, [(2, 5, 24), (24,)]),
    "norm of a transposed view": (
        lambda x, w: norm(x.transpose(0, 1), w),
        lambda x, w: plain_norm(x.transpose(0, 1), w),
        [(2, 5, 24), (24,)],
    ),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, [(2, 5, 8), (2, 5, 8)]),
    "rotary": (lambda x: apply_rotary(x, TABLE), plain_rotary, [(2, 4, 5, 6)]),
    "rotary of heads": (
        lambda x: apply_rotary(by_position(x), TABLE),
        lambda x: plain_rotary(by_position(x)),
        [(2, 4, 5, 6)],
    ),
}


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    mine, plain, shapes = CASES[name]
    inputs = [drawn(*shape, dtype=dtype) for shape in shapes]
    results = []
    for function in (mine, plain):
        out = function(*inputs)
        grad = drawn(*out.shape, dtype=dtype).detach()
        results.append((out, *torch.autograd.grad(out, inputs, grad)))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= BOUND[dtype] * expected.norm()


@pytest.mark.parametrize("name", CASES)
def test_finite_differences(name: str) -> None:
    mine, _, shapes = CASES[name]
    assert gradcheck(mine, [drawn(*shape) for shape in shapes])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_torchs_own_operations(dtype: torch.dtype) -> None:
    x, weight = drawn(2, 24, dtype=dtype), drawn(24, dtype=dtype)
    assert not uses_manual_backward(x)
    assert torch.equal(norm(x, weight), F.rms_norm(x, (24,), weight, 1e-5))
    assert torch.equal(swiglu(x, x), F.silu(x) * x)
    heads = drawn(2, 4, 5, 6, dtype=dtype)
    assert torch.equal(apply_rotary(heads, TABLE), plain_rotary(heads.float()).to(dtype))


@pytest.mark.parametrize("copies", [1, 3])
def test_rows_in_another_order(copies: int) -> None:
    x = drawn(4, 3)
    order = torch.randperm(4 * copies, generator=torch.Generator().manual_seed(1))
    found = copied_in_order(x, order, order.argsort(), copies)
    expected = x.repeat_interleave(copies, dim=0)[order]
    assert torch.equal(found, expected)
    grad = drawn(*found.shape).detach()
    mine, plain = (torch.autograd.grad(y, x, grad)[0] for y in (found, expected))
    assert torch.allclose(mine, plain, rtol=1e-14, atol=1e-14)


def test_under_a_compiler_they_step_aside() -> None:
    """Traced into one graph, with no function of ours left in it, and the same numbers."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = RMSNorm(24, eps=1e-5).double()

    def block(x: Tensor, heads: Tensor) -> Tensor:
        return swiglu(module(x), x).sum() + apply_rotary(heads, TABLE).sum()

    inputs = drawn(2, 5, 24), drawn(2, 4, 5, 6)
    compiled = torch.compile(block, backend=backend, fullgraph=True)(*inputs)
    assert torch.allclose(compiled, block(*inputs), rtol=1e-13)
    assert len(graphs) == 1
    assert "autograd_function" not in graphs[0].code
