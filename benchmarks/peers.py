"""Fivefold beside its peers on this machine: tokens/s, peak memory of a rank, time to the first step.

    pip install -c constraints.txt -e '.[train]' -r benchmarks/peers.txt
    python benchmarks/peers.py --json peers.json

Systems of one group are started once and then take turns, a few steps each, round after round: a machine that
drifts drifts under all of them. One thread a rank, float32. Everything but Fivefold trains transformers' Llama
or Mixtral of the same size with fused AdamW. Ratios are of medians within one group.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from side_by_side.pool import RefusedError, Running
from side_by_side.sizes import COMPARED, SIZES, Size
from side_by_side.systems import GROUPS, ONLY, Bar, Group, System


@dataclass(slots=True)
class Result:
    """What was seen of one system in one size, over all groups it took part in."""

    system: System
    size: str
    rates: list[float] = field(default_factory=list)  # tokens/s
    peak_bytes: int = 0
    first_step_seconds: float = 0.0
    refused: str = ""

    def row(self) -> dict[str, Any]:
        seen = bool(self.rates)
        row = {
            "size": self.size,
            "system": self.system.name,
            "ranks": self.system.ranks,
            "layout": self.system.layout,
            "tokens_per_second": statistics.median(self.rates) if seen else None,
            "peak_bytes": self.peak_bytes if seen else None,
            "first_step_seconds": self.first_step_seconds if seen else None,
        }
        return row | ({"refused": self.refused} if self.refused else {})


Results = dict[tuple[str, str], Result]  # by size and system


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    machine = _measured_machine() if options.settings == "same" else None
    results: Results = {}
    verdicts: list[str] = []
    for size in options.sizes:
        for group in GROUPS:
            if size in ONLY.get(group.name, SIZES) and group.name in options.groups:
                verdicts += _run(group, size, options, machine, results)
    rows = [result.row() for result in results.values()]
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    print(_table(results.values()))
    print(f"\nBars, peers' settings: {options.settings}")
    print("\n".join([*verdicts, *_memory(results.values())]))
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [group.name for group in GROUPS]
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=COMPARED)
    parser.add_argument(
        "--groups",
        nargs="+",
        choices=names,
        default=names,
        help="only these; systems of a group run together",
    )
    parser.add_argument(
        "--systems", nargs="+", default=[], help="only these (words of their names), e.g. fivefold"
    )
    parser.add_argument("--repeats", type=int, default=5, help="turns of each system (default 5)")
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn (default 2)")
    parser.add_argument(
        "--settings",
        choices=("peers", "same"),
        default="peers",
        help="peers: each as it comes; same: all get the matmul and malloc settings Fivefold measures",
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    return parser.parse_args(arguments)


def _run(
    group: Group, size: str, options: argparse.Namespace, machine: dict[str, Any] | None, results: Results
) -> list[str]:
    """Runs one group, adds to `results`, and returns the verdicts on its bars."""
    wanted = [
        s for s in group.systems if not options.systems or any(word in s.key for word in options.systems)
    ]
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        alive: list[Running] = []
        for system in wanted:
            result = results.setdefault((size, system.key), Result(system, size))
            try:
                running = stack.enter_context(Running(system, SIZES[size], machine))
            except RefusedError as refusal:
                result.refused = str(refusal)
                _say(f"{size} {group.name}: {system.key} refused: {refusal}")
                continue
            _say(f"{size} {group.name}: {system.key} started in {running.first_step_seconds:.1f} s")
            alive.append(running)
            result.first_step_seconds = running.first_step_seconds
        for turn in range(options.repeats):
            for running in alive:
                rate = _turn(running, SIZES[size], options.steps)
                rates.setdefault(running.system.key, []).append(rate)
                _say(
                    f"{size} {group.name} {turn + 1}/{options.repeats}: {running.system.key} {rate:,.0f} tokens/s"
                )
        for running in alive:
            result = results[size, running.system.key]
            result.rates += rates[running.system.key]
            result.peak_bytes = max(result.peak_bytes, running.peak_bytes)
    medians = {key: statistics.median(found) for key, found in rates.items()}
    return [_verdict(bar, size, medians) for bar in group.bars_of(size)]


def _turn(running: Running, size: Size, steps: int) -> float:
    """Tokens a second."""
    system = running.system
    tokens = size.micro_batch * size.sequence * system.replicas * system.micro_batches * steps
    return tokens / running.steps(steps)


def _verdict(bar: Bar, size: str, medians: dict[str, float]) -> str:
    ours = [system.key for system in bar.ours if system.key in medians]
    theirs = [system.key for system in bar.theirs if system.key in medians]
    factor = bar.factors[size]
    if not ours or not theirs:
        missing = bar.ours if not ours else bar.theirs
        return f"not run  {size}: {' / '.join(s.key for s in missing)}"
    best = max(theirs, key=medians.__getitem__)
    mine = max(ours, key=medians.__getitem__)
    ratio = medians[mine] / medians[best]
    return f"{'pass' if ratio >= factor else 'FAIL'}  {size}: {mine} = {ratio:.2f} x {best}, at least {factor:.2f}"


def _memory(results: Iterable[Result]) -> list[str]:
    """Peak memory of a rank must not be above that of any peer of the same kind."""
    lines = []
    seen = [result for result in results if result.rates]
    for ours in (result for result in seen if result.system.name == "fivefold"):
        peers = [
            r
            for r in seen
            if r.system.name != "fivefold" and r.size == ours.size and r.system.ranks == ours.system.ranks
        ]
        if peers:
            least = min(peers, key=lambda result: result.peak_bytes)
            word = "pass" if ours.peak_bytes <= least.peak_bytes else "FAIL"
            lines.append(
                f"{word}  {ours.size}: peak {_gib(ours.peak_bytes)} of {ours.system.key}, "
                f"least of the peers {_gib(least.peak_bytes)} ({least.system.key})"
            )
    return lines


def _table(results: Iterable[Result]) -> str:
    lines = [
        f"{'size':5} {'system':22} {'layout':14} {'ranks':>5} {'tokens/s':>9} {'peak GiB':>9} {'first step s':>12}"
    ]
    for result in results:
        system = result.system
        start = f"{result.size:5} {system.name:22} {system.layout:14} {system.ranks:5}"
        if not result.rates:
            lines.append(f"{start} refused: {result.refused}")
            continue
        rate, peak = statistics.median(result.rates), result.peak_bytes / 2**30
        lines.append(f"{start} {rate:9,.0f} {peak:9.2f} {result.first_step_seconds:12.1f}")
    return "\n".join(lines)


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def _measured_machine() -> dict[str, Any]:
    """Fivefold's choices on this machine, measured with one thread."""
    code = (
        "import json, msgspec, torch; torch.set_num_threads(1);"
        "from fivefold.config.tree import Machine; from fivefold.trainer.machine import measure;"
        "print(json.dumps(msgspec.to_builtins(measure(Machine(), 'float32', torch.device('cpu'))[0])))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    settings: dict[str, Any] = json.loads(found)
    _say(f"settings for all: {settings}")
    return settings


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
