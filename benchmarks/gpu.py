"""A step of a 1B Llama in bf16 on one GPU: tokens/s, MFU, peak memory; compiled and not, beside transformers.

    pip install -e '.[train]' transformers
    python benchmarks/gpu.py                            # an accelerator with 40 GB or more
    python benchmarks/gpu.py --micro-batch 1 --json gpu.json
    python benchmarks/gpu.py --device cpu --size tiny   # only shows that it runs

Fivefold takes the step of `fivefold train` with precision.dtype = "bf16" (products in bf16, float32 master weights,
clipping); transformers' model is trained in a plain loop under bf16 autocast, with float32 weights and torch's fused
AdamW. Each system runs in a process of its own, so that none inherits another's memory.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fivefold.config.model import Model
from fivefold.config.tree import Batch, Config, Machine, Precision
from fivefold.data.rows import Batch as Rows
from fivefold.ledger.flops import forward_per_token
from fivefold.spec.legal import resolve_config
from fivefold.spec.parameters import total
from fivefold.trainer.batches import MicroBatch
from fivefold.trainer.loop import Loop
from fivefold.trainer.session import open_session

SIZES = {
    # Llama-3.2-1B's shape with an output head of its own.
    "1b": (Model(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, rope_theta=5e5), 4096),
    "tiny": (Model(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=512), 64),
}
# Dense bf16 FLOP/s from the vendors' data sheets, by a part of the device's name; --peak for others.
PEAKS = {
    "GB200": 2.5e15,
    "B300": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "MI300X": 1307e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
SYSTEMS = ("fivefold", "fivefold compiled", "transformers", "transformers compiled")
WARM_UP_STEPS = 3  # the first one compiles


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if options.system:
        print(json.dumps(measure(options.system, options)))
        return 0
    rows = [_in_own_process(system, arguments) for system in SYSTEMS]
    print(f"{'system':24} {'tokens/s':>10} {'MFU':>7} {'peak GiB':>9} {'first step s':>13}")
    for row in rows:
        if "failed" in row:
            print(f"{row['system']:24} failed: {row['failed']}")
            continue
        mfu = f"{row['mfu']:7.1%}" if row["mfu"] else "      -"
        peak = f"{row['peak_bytes'] / 2**30:9.2f}" if row["peak_bytes"] else "        -"
        print(
            f"{row['system']:24} {row['tokens_per_second']:10,.0f} {mfu} {peak} {row['first_step_seconds']:13.1f}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


def measure(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s (median step), MFU, peak memory and time to the first step of one system, in this process."""
    device = torch.device(options.device)
    model, sequence = SIZES[options.size]
    shape = (options.micro_batch, sequence + 1)
    rows = torch.randint(model.vocab, shape, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(0)
    started = time.perf_counter()
    make = _fivefold if "fivefold" in system else _transformers
    step = make(model, device, rows, "compiled" in system)
    seconds: list[float] = []
    first = loss = 0.0
    for index in range(WARM_UP_STEPS + options.steps):
        before = time.perf_counter()
        loss = step()
        _wait(device)
        seconds.append(time.perf_counter() - before)
        if index == 0:
            first = time.perf_counter() - started
    rate = options.micro_batch * sequence / median(seconds[WARM_UP_STEPS:])
    peak_rate = options.peak or _peak_rate(device)
    flops = 3 * forward_per_token(model, sequence, "causal").total
    return {
        "system": system,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "parameters": total(model),
        "loss": loss,
        "tokens_per_second": rate,
        "mfu": rate * flops / peak_rate if peak_rate else None,
        "peak_bytes": int(torch.accelerator.max_memory_allocated(device)) if device.type != "cpu" else None,
        "first_step_seconds": first,
    }


Step = Callable[[], float]
"""Takes one optimizer step; returns its mean loss."""


def _fivefold(model: Model, device: torch.device, rows: Tensor, compiled: bool) -> Step:
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    count, sequence = tokens.shape
    config = Config(
        model=model,
        batch=Batch(global_batch=count, micro_batch=count, sequence_length=sequence),
        precision=Precision(dtype="bf16"),
        machine=Machine(matmul="highest", malloc="default", peak_flops=1.0),
    )
    session = open_session(None, "default", 300.0).__enter__()  # ends with the process
    if session.device.type != device.type:
        raise SystemExit(f"--device {device.type}: Fivefold trains on {session.device.type} here")
    loop = Loop(session, resolve_config(config, 1), None, None, lambda: False)  # type: ignore[arg-type]  # no data
    if compiled:
        loop.model.module.compile()
    documents = torch.zeros(count, sequence, dtype=torch.int32)
    batch = MicroBatch.of(Rows(tokens.cpu(), labels.cpu(), documents), device)
    return lambda: loop.stepper.step([batch], 1e-4).loss


def _transformers(model: Model, device: torch.device, rows: Tensor, compiled: bool) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab,
        max_position_embeddings=rows.shape[1],
        rope_theta=model.rope_theta,
        use_cache=False,
    )
    with device:
        llama = LlamaForCausalLM(config).train()
    if compiled:
        llama.compile()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, fused=True)
    tokens = rows[:, :-1].contiguous()

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16):
            loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _in_own_process(system: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = [sys.executable, __file__, *words, "--system", system]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"system": system, "failed": said[-1]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences of a step (default 2)")
    parser.add_argument("--steps", type=int, default=10, help="steps timed (default 10)")
    parser.add_argument("--peak", type=float, default=0.0, help="dense bf16 FLOP/s of the device, for MFU")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    parser.add_argument("--system", choices=SYSTEMS, default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _peak_rate(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAKS.items() if part in name), None)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
