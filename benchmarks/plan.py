"""How long the search takes: Llama-3-405B on 16,384 GPUs, all axes free.

python benchmarks/plan.py
"""

import tomllib
from importlib.resources import files
from time import perf_counter, process_time

import msgspec

from fivefold.config.model import Model
from fivefold.ledger import hardware
from fivefold.ledger.job import Stack
from fivefold.planner.search import search
from fivefold.planner.space import Request, size

PRESET = files("fivefold") / "presets" / "models" / "llama3-405b.toml"


def main() -> None:
    model = msgspec.convert(tomllib.loads(PRESET.read_text()), Model)
    stack = Stack(compute_copy=0, chunked_loss=True, fused_loss=True)
    request = Request(model, hardware.preset("2048x8 h100"), 2048, 8192, "bf16", 2, stack)
    wall, processor = perf_counter(), process_time()
    found = search(request)
    wall, processor = perf_counter() - wall, process_time() - processor
    print(
        f"{size(request):,} layouts, {found.simulated} simulated: {wall:.2f} s ({processor:.2f} s of one core)"
    )


if __name__ == "__main__":
    main()
