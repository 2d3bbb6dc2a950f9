"""Two runs over four axes on 8 ranks beside one process, on real text: are the loss curves one?

    python benchmarks/curves.py --steps 200 --svg docs/curves.svg

Each run is `fivefold train` with nothing but another layout; losses are read from its metrics.jsonl. Prints the largest
difference of each layout from one process, and draws the curves.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 300, 44
COLORS = ("#bbbbbb", "#c0392b")


@dataclass(frozen=True)
class Pair:
    """A preset, and the layout that is held against one process."""

    preset: str
    layout: dict[str, int]

    @property
    def title(self) -> str:
        words = [f"{axis} {degree}" for axis, degree in self.layout.items() if axis != "zero"]
        return f"{self.preset}: {' × '.join(words)}"


PAIRS = (
    Pair("quickstart-moe", {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 2, "zero": 1}),
    Pair("quickstart", {"pp": 2, "cp": 2, "dp_shard": 2, "zero": 1}),
)
ALONE = {"pp": 1, "tp": 1, "cp": 1, "dp_shard": 1}


def losses(preset: str, layout: dict[str, int], steps: int, directory: Path) -> list[float]:
    """Trains, and returns the loss of every step."""
    keys = {f"parallel.{axis}": degree for axis, degree in ({"dp_replicate": 1} | layout).items()}
    keys |= {"run.steps": steps, "run.eval_every": 0, "run.sample_tokens": 0, "checkpoint.every": 0}
    pairs = [f"{key}={value}" for key, value in keys.items()] + [
        f"run.dir={directory}",
        f"data.cache_dir={directory.parent / 'data'}",
        "batch.micro_batch=2",
    ]
    words = [word for pair in pairs for word in ("--set", pair)]
    subprocess.run([sys.executable, "-m", "fivefold", "train", preset, *words], check=True, stdout=sys.stderr)
    rows = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def largest_difference(found: list[float], expected: list[float]) -> tuple[float, int]:
    """Relative, and the step where it is."""
    apart = [abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True)]
    return max(apart), apart.index(max(apart)) + 1


def panel(top: int, title: str, curves: list[list[float]]) -> str:
    """One process broad and grey, the layout thin on top of it."""
    highest, lowest = max(map(max, curves)), min(map(min, curves))
    span, last = (highest - lowest) or 1.0, max(len(curves[0]) - 1, 1)

    def point(step: int, loss: float) -> str:
        x = MARGIN + step / last * (WIDTH - 2 * MARGIN)
        y = top + MARGIN + (highest - loss) / span * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    lines = [f'<text x="{MARGIN}" y="{top + 24}" font-weight="bold">{title}</text>']
    for loss in (highest, lowest):
        y = point(0, loss).partition(",")[2]
        lines.append(f'<text x="{MARGIN - 6}" y="{y}" text-anchor="end">{loss:.2f}</text>')
    foot = top + HEIGHT - 16
    lines.append(f'<text x="{MARGIN}" y="{foot}">step 1</text>')
    lines.append(f'<text x="{WIDTH - MARGIN}" y="{foot}" text-anchor="end">step {len(curves[0])}</text>')
    for losses_of, color, width in zip(curves, COLORS, (6, 1.5), strict=True):
        points = " ".join(point(step, loss) for step, loss in enumerate(losses_of))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>')
    return "\n".join(lines)


def picture(panels: list[str]) -> str:
    height = HEIGHT * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(panels) + "\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--svg", type=Path, default=Path("docs/curves.svg"))
    arguments = parser.parse_args()
    panels = []
    with tempfile.TemporaryDirectory() as place:
        for number, pair in enumerate(PAIRS):
            alone = losses(pair.preset, ALONE, arguments.steps, Path(place) / f"{pair.preset}-alone")
            laid_out = losses(
                pair.preset, pair.layout, arguments.steps, Path(place) / f"{pair.preset}-laid-out"
            )
            error, step = largest_difference(laid_out, alone)
            print(f"{pair.title}: largest difference {error:.1e} of the loss, at step {step} of {len(alone)}")
            told = f"{pair.title}, red, on one process, grey; {error:.0e} apart at most"
            panels.append(panel(number * HEIGHT, told, [alone, laid_out]))
    arguments.svg.write_text(picture(panels))


if __name__ == "__main__":
    main()
