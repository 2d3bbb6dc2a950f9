"""`fivefold.verify`: modules parallelised by hand, right and wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fivefold
from fivefold import Layout
from fivefold.config.errors import BadInput
from fivefold.proof.ranks import RankError

ROWS = 8


class Regression(nn.Module):
    """Two layers and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(6, 10), nn.Linear(10, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.outer(self.inner(x).tanh()).squeeze(1) - y).square().mean()


def plain(rank: int, world_size: int) -> nn.Module:
    return Regression()


def wrapped(rank: int, world_size: int) -> nn.Module:
    return Regression() if world_size == 1 else DistributedDataParallel(Regression())


def unseeded(rank: int, world_size: int) -> nn.Module:
    module = Regression()
    nn.init.constant_(module.outer.bias, float(rank))
    return module


def rows(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Of the global batch, every rank's own."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, generator=generator)
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def same_rows(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    return rows(step, 0, world_size)


def mean_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def summed_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)


def bias_forgotten(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if name != "inner.bias":
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Columns(nn.Module):
    """Tensor parallel: each rank has some of the inner columns, and the sum of their outputs is everyone's."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        whole = Regression()
        self.inner, self.outer = nn.Linear(6, 10 // world_size), nn.Linear(10 // world_size, 1)
        with torch.no_grad():
            self.inner.weight.copy_(whole.inner.weight.chunk(world_size)[rank])
            self.inner.bias.copy_(whole.inner.bias.chunk(world_size)[rank])
            self.outer.weight.copy_(whole.outer.weight.chunk(world_size, dim=1)[rank])
            self.outer.bias.copy_(whole.outer.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        part = nn.functional.linear(self.inner(x).tanh(), self.outer.weight)
        out = Summed.apply(part) + self.outer.bias
        return (out.squeeze(1) - y).square().mean()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def columns(rank: int, world_size: int) -> nn.Module:
    return Regression() if world_size == 1 else Columns(rank, world_size)


def all_rows(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    return rows(step, 0, 1)


SHARDS = {"inner.weight": 0, "inner.bias": 0, "outer.weight": 1}


def test_data_parallel_by_hand_holds() -> None:
    verdict = fivefold.verify(plain, Layout(2), rows, finish_fn=mean_gradients)
    assert verdict.passed, verdict
    assert 0 <= verdict.gradient_error <= 1e-12
    assert str(verdict).startswith("holds: loss ")


def test_torchs_own_wrapper_holds() -> None:
    verdict = fivefold.verify(wrapped, Layout(2), rows)
    assert verdict.passed, verdict


def test_tensor_parallel_by_hand_holds() -> None:
    verdict = fivefold.verify(columns, Layout(2, shards=SHARDS, loss="whole"), all_rows)
    assert verdict.passed, verdict


def test_a_factor_is_named() -> None:
    verdict = fivefold.verify(plain, Layout(2), rows, finish_fn=summed_gradients)
    assert not verdict.passed
    assert verdict.first == "outer.bias (gradient)"
    assert verdict.kind == "a constant factor, 2"
    assert "gradient norm: error 1.0e+00" in verdict.wrong
    assert str(verdict).startswith("DOES NOT HOLD: ")


def test_the_parameter_that_is_not_reduced_is_named() -> None:
    verdict = fivefold.verify(plain, Layout(2), rows, finish_fn=bias_forgotten)
    assert verdict.first == "inner.bias (gradient)"
    assert "gradients of inner.bias differ between ranks" in verdict.wrong
    assert "gradients of inner.weight differ between ranks" not in verdict.wrong


def test_what_ranks_read_and_begin_with_matters() -> None:
    repeated = fivefold.verify(plain, Layout(2), same_rows, finish_fn=mean_gradients)
    assert any(line.startswith("loss: error") for line in repeated.wrong)
    apart = fivefold.verify(unseeded, Layout(2), rows, finish_fn=mean_gradients)
    assert "initial of outer.bias differ between ranks" in apart.wrong


def test_a_shard_not_told_of_is_explained() -> None:
    verdict = fivefold.verify(columns, Layout(2, loss="whole"), all_rows)
    assert "is it in layout.shards?" in (verdict.kind or "")


class Normed(Regression):
    """With a norm over the batch, of which a rank sees its own rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.outer(self.norm(self.inner(x))).squeeze(1) - y).square().mean()


def normed(rank: int, world_size: int) -> nn.Module:
    return Normed() if world_size == 1 else torch.compile(Normed(), backend="eager")  # type: ignore[return-value]


def test_the_module_that_makes_the_loss_wrong_is_named() -> None:
    verdict = fivefold.verify(normed, Layout(2), rows, finish_fn=mean_gradients)
    assert verdict.first == "norm (forward)"
    assert not any(line.startswith("initial") for line in verdict.wrong)  # the compiler's names are taken off


def only_the_first(module: nn.Module) -> None:
    if dist.get_rank() == 0:
        mean_gradients(module)


def test_a_collective_that_a_rank_leaves_out_is_told_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.proof.verify_module.PATIENCE_SECONDS", 1.0)
    with pytest.raises(RankError, match=r"ranks \[0\] had not finished 1 s after ranks \[1\] had"):
        fivefold.verify(plain, Layout(2), rows, finish_fn=only_the_first)


def no_loss(rank: int, world_size: int) -> nn.Module:
    return nn.Bilinear(6, 1, 3)


def no_module(rank: int, world_size: int) -> nn.Module:
    return Regression  # type: ignore[return-value]


def one_tensor(step: int, rank: int, world_size: int) -> Tensor:
    return rows(step, rank, world_size)[0]


def two_inputs(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6), torch.ones(4, 1)


@pytest.mark.parametrize(
    ("model_fn", "layout", "batch_fn", "says"),
    [
        (plain, Layout(1), rows, "layout.ranks = 1: expected at least 2"),
        (plain, Layout(2, loss="men"), rows, 'layout.loss = "men": expected one of whole, mean, sum'),  # type: ignore[arg-type]
        (
            plain,
            Layout(2, shards={"iner.bias": 0}),
            rows,
            'no parameter "iner.bias"; did you mean "inner.bias"',
        ),
        (plain, Layout(2, shards={"inner.bias": 1}), rows, r"inner.bias is \[10\] and has no dim 1"),
        (lambda rank, n: Regression(), Layout(2), rows, "model_fn: ranks import it"),
        (no_module, Layout(2), rows, "model_fn: gave a type, expected a torch.nn.Module"),
        (no_loss, Layout(2), two_inputs, r"its module gave a tensor \[4, 3\], expected its loss"),
        (plain, Layout(2), one_tensor, "batch_fn: gave a Tensor, expected a tuple"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_be_compared_is_refused(model_fn: Any, layout: Layout, batch_fn: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        fivefold.verify(model_fn, layout, batch_fn)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "verify.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    shown = page.partition("  first wrong: bias")[2].splitlines()[0]
    script = tmp_path / "mine.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("DOES NOT HOLD: loss ")
    assert f"  first wrong: bias{shown}\n" in done.stdout


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, fivefold; assert 'torch' not in sys.modules; print(fivefold.verify.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "verify\n"
