"""Where one rank's time goes, in processor time, so that a busy machine disturbs it less.

    python benchmarks/one_rank.py                    # rates of matmuls; milliseconds of a layer and of the loss
    python benchmarks/one_rank.py --against ../main  # beside another checkout, taking turns
    python benchmarks/one_rank.py --compile          # a layer beside itself under machine.compile, taking turns

One thread, float32, size S1 of peers.py: 2048 tokens, forward and backward.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from msgspec import structs

from fivefold.config.model import Experts, Model
from fivefold.config.tree import Machine

if TYPE_CHECKING:
    import torch

SETTINGS = Machine(matmul="medium", malloc="keep", peak_flops=1.0)
SHAPES = ((2048, 256, 256), (2048, 256, 688), (2048, 688, 256), (1024, 512, 1376), (1024, 256, 4096))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout of Fivefold")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; minutes to compile")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.wait:
        serve(options.compile)
        return
    if not (options.against or options.compile):
        matmul_rates()
    here = Path(__file__).parents[1]
    checkouts = [here, options.against.resolve()] if options.against else [here]
    ranks = {checkout: _start(checkout, options.compile) for checkout in checkouts}
    seen: dict[tuple[Path, str], list[float]] = {}
    for _ in range(options.rounds):
        for checkout, rank in ranks.items():
            assert rank.stdin is not None
            assert rank.stdout is not None
            print(file=rank.stdin, flush=True)
            for name, seconds in json.loads(rank.stdout.readline()).items():
                seen.setdefault((checkout, name), []).append(1e3 * seconds)
    for (checkout, name), found in seen.items():
        print(f"{checkout.name:12} {name:28} least {min(found):7.1f} ms, median {median(found):7.1f} ms")
    for rank in ranks.values():
        rank.kill()


def _start(checkout: Path, compiles: bool) -> subprocess.Popen[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONPATH=str(checkout / "src"))
    command = [sys.executable, __file__, "--wait", *["--compile"] * compiles]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def serve(compiles: bool) -> None:
    """For each line on stdin, one pass of each part; answers with its seconds of processor time."""
    parts = _compiled_parts() if compiles else _parts()
    for part in parts.values():
        part()
    for _ in sys.stdin:
        seconds = {}
        for name, part in parts.items():
            before = time.process_time()
            part()
            seconds[name] = time.process_time() - before
        print(json.dumps(seconds), flush=True)


def _compiled_parts() -> dict[str, Callable[[], None]]:
    import torch

    whole = Model(layers=1, hidden=256, heads=8, kv_heads=4, ffn=688, vocab=4096)
    part = Model(layers=1, hidden=256, heads=4, head_dim=32, kv_heads=2, ffn=344, vocab=4096)
    kinds = (
        ("layer", whole, torch.float32),
        ("one tp rank of 2", part, torch.float32),
        ("with dropout", structs.replace(whole, dropout=0.1), torch.float32),
        ("in bf16", whole, torch.bfloat16),
    )
    return {
        f"{name}{', compiled' * compiled}": _layer(model, dtype, compiled)
        for name, model, dtype in kinds
        for compiled in (False, True)
    }


def _layer(model: Model, dtype: "torch.dtype", compiled: bool = False) -> Callable[[], None]:
    """Forward and backward of one layer on S1's micro-batch."""
    import torch

    from fivefold.nn.attention import Segments
    from fivefold.nn.decoder import Decoder
    from fivefold.nn.dropout import step_key, token_keys
    from fivefold.nn.rotary import rotary_table
    from fivefold.trainer import machine

    machine.apply(SETTINGS)
    generator = torch.Generator().manual_seed(0)
    segments, positions = Segments((512,) * 4), torch.arange(512)
    x = torch.randn(4, 512, model.hidden, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(4, 512, model.hidden, generator=generator).to(dtype)
    keys = token_keys(step_key(0, 0), torch.arange(4), positions) if model.dropout else None
    decoder = Decoder(model).to(dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    if compiled:
        decoder.compile_layers()

    def run() -> None:
        out, _ = decoder.layers["0"](x, rotary_table(model, positions), segments, keys=keys)
        out.backward(grad)

    return run


def _parts() -> dict[str, Callable[[], None]]:
    import torch

    from fivefold.nn.loss import cross_entropy_sum

    dense = Model(layers=1, hidden=256, heads=8, kv_heads=4, ffn=688, vocab=4096)
    sparse = structs.replace(dense, experts=Experts(count=8, top_k=2, ffn=344))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2048, 256, generator=generator, requires_grad=True)
    head = torch.randn(4096, 256, generator=generator, requires_grad=True)
    labels = torch.randint(4096, (2048,), generator=generator)
    return {
        "layer": _layer(dense, torch.float32),
        "MoE layer": _layer(sparse, torch.float32),
        "loss": lambda: cross_entropy_sum(hidden, head, labels).backward(),
    }


def matmul_rates() -> None:
    """GFLOP/s of the three products of each shape, by torch's two float32 paths."""
    import torch

    torch.set_num_threads(1)
    for rows, inner, columns in SHAPES:
        inputs, weight, grad = (
            torch.randn(rows, inner),
            torch.randn(columns, inner),
            torch.randn(rows, columns),
        )
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            rates = [
                2e-9 * rows * inner * columns / _least_seconds(product)
                for product in (
                    lambda x=inputs, w=weight: x @ w.T,
                    lambda g=grad, w=weight: g @ w,
                    lambda g=grad, x=inputs: g.T @ x,
                )
            ]
            print(
                f"{rows} x {inner} x {columns} {precision:8}", *(f"{rate:5.0f}" for rate in rates), "GFLOP/s"
            )


def _least_seconds(product: Callable[[], object]) -> float:
    found = []
    for _ in range(9):
        before = time.thread_time()
        product()
        found.append(time.thread_time() - before)
    return min(found)


if __name__ == "__main__":
    main()
