"""The pictures of a page as SVG: memory bars, the pipeline in time, bars, a front. They draw, and compute nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from fivefold.render.units import bytes_text, seconds_text

PARTS = {
    "parameters": "#1f4e79",
    "gradients": "#4f8fc0",
    "optimizer": "#a9cce3",
    "activations": "#d1495b",
    "buffers": "#edae49",
    "overhead": "#ced4da",
}
KINDS = {
    "F": ("forward", "#31688e"),
    "B": ("backward", "#d1495b"),
    "W": ("weight gradient", "#edae49"),
}
WIDTH = 1060


def _svg(height: float, parts: Sequence[str]) -> str:
    return f"<svg viewBox='0 0 {WIDTH} {height:.0f}'>{''.join(parts)}</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{escape(text)}</text>"


def legend(colours: Mapping[str, str]) -> str:
    items = "".join(
        f"<span><i style='background:{c}'></i>{escape(name)}</span>" for name, c in colours.items()
    )
    return f"<p class='legend'>{items}</p>"


def memory_picture(
    classes: Sequence[dict[str, Any]], at_mean: Sequence[dict[str, Any]], capacity: float
) -> str:
    """A bar for each rank class, in parts, against the capacity."""
    shown = _rank_classes(classes, at_mean)
    left, top, height = 170.0, 18, 26
    scale = (WIDTH - 70 - left) / max(capacity, *(item["memory"]["peak"] for _, item in shown))
    limit, bottom = left + capacity * scale, top + len(shown) * height + 4
    parts = [
        f"<path d='M{limit:.1f} {top - 2}V{bottom}' stroke='#212529' stroke-dasharray='4 3'/>",
        _text(limit, top - 7, f"capacity {bytes_text(capacity)}", "end"),
    ]
    for index, (label, item) in enumerate(shown):
        x, y = left, top + index * height + 4
        parts.append(_text(0, y + 14, label))
        for name, colour in PARTS.items():
            width = item["memory"][name] * scale
            parts.append(f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='18' fill='{colour}'/>")
            x += width
        beside = limit if x < limit < x + 64 else x  # no number across the line
        parts.append(_text(beside + 6, y + 14, bytes_text(item["memory"]["peak"])))
    return _svg(bottom + 2, parts) + legend(PARTS)


def _rank_classes(
    classes: Sequence[dict[str, Any]], at_mean: Sequence[dict[str, Any]], most: int = 16
) -> list[tuple[str, dict[str, Any]]]:
    """(label, class) with neighbours of the same memory as one; of many, evenly spaced ones and the fullest."""
    runs: list[list[dict[str, Any]]] = []
    for item in classes:
        if runs and bytes_text(runs[-1][0]["memory"]["peak"]) == bytes_text(item["memory"]["peak"]):
            runs[-1].append(item)
        else:
            runs.append([item])
    step = -(-len(runs) // most)
    fullest = max(runs, key=lambda run: float(run[0]["memory"]["peak"]))
    found = []
    for index, run in enumerate(runs):
        if index % step and run is not fullest and run is not runs[-1]:
            continue
        first, last = run[0]["pp_rank"], run[-1]["pp_rank"]
        label = f"pp rank {first}" if first == last else f"pp ranks {first} to {last}"
        if at_mean:  # the busiest experts' ranks, and those with the mean load
            found.append((f"{label}, load × {run[0]['expert_load']:g}", run[0]))
            found.append((f"{label}, mean load", at_mean[first]))
        else:
            found.append((label, run[0]))
    return found


def gantt_picture(found: dict[str, Any]) -> str:
    """The pipeline in time: one row a rank, what it waits for left grey."""
    panels, kinds = found["panels"], set()
    parts = []
    for number, panel in enumerate(panels):
        kinds |= {action[0] for _, actions in panel["rows"] for action in actions}
        if len(panels) > 1:
            span = seconds_text(panel["end"] - panel["start"])
            parts.append(f"<p class='lead'>its {'last' if number else 'first'} {span}</p>")
        parts.append(_panel(panel))
    rows = panels[0]["rows"]
    chunks = 1 + max(action[1] for _, actions in rows for action in actions)
    some = f" ({len(rows)} of {found['ranks']} drawn)" if len(rows) < found["ranks"] else ""
    split = "input gradient" if "W" in kinds else "backward"
    colours = {split if kind == "B" else name: c for kind, (name, c) in KINDS.items() if kind in kinds}
    return (
        f"<p class='lead'>schedule {found['schedule']}, a row for each pipeline rank{some}, "
        f"{seconds_text(found['makespan'])} in all"
        + ("; numbers are micro-batches" if any(map(_has_room, panels)) else "")
        + ("; a rank's later chunks are paler" if chunks > 1 else "")
        + "</p>"
        + "".join(parts)
        + legend({**colours, "idle": "#e9ecef"})
    )


def _has_room(panel: dict[str, Any]) -> bool:
    """Whether most actions are wide enough for the longest number of a micro-batch."""
    drawn = [action for _, actions in panel["rows"] for action in actions]
    usual = median(finish - begin for _, _, _, begin, finish in drawn) if drawn else 0.0
    digits = max((len(str(action[2])) for action in drawn), default=1)
    wide = usual / (panel["end"] - panel["start"]) * WIDTH
    return len(panel["rows"]) <= 24 and wide > 6 * digits


def _panel(panel: dict[str, Any]) -> str:
    rows, start, end = panel["rows"], panel["start"], panel["end"]
    height, left = max(10, min(24, 420 // len(rows))), 30.0
    scale = (WIDTH - 5 - left) / (end - start)
    chunks = 1 + max((action[1] for _, actions in rows for action in actions), default=0)
    parts, numbered = [], _has_room(panel)
    for index, (rank, actions) in enumerate(rows):
        y = index * height
        if height > 12 or index % 2 == 0:
            parts.append(_text(0, y + height * 0.5 + 4, str(rank)))
        parts.append(f"<path fill='#e9ecef' d='M{left} {y + 1}H{WIDTH - 5}v{height - 2}H{left}z'/>")
        boxes: dict[tuple[str, int], list[str]] = {}
        numbers = []
        for letter, chunk, micro, begin, finish in actions:
            x = left + (max(begin, start) - start) * scale
            width = (min(finish, end) - max(begin, start)) * scale
            gap = 0.6 if width > 3 else 0.0
            boxes.setdefault((letter, chunk), []).append(
                f"M{x:.1f} {y + 1}h{width - gap:.1f}v{height - 2}h{gap - width:.1f}z"
            )
            if numbered and width > 6 * len(str(micro)):
                numbers.append(
                    f"<text class='on' x='{x + width / 2:.1f}' y='{y + height / 2 + 3.5:.1f}'>{micro}</text>"
                )
        for (letter, chunk), path in boxes.items():
            opacity = 1 - 0.5 * chunk / max(1, chunks - 1)
            parts.append(
                f"<path fill='{KINDS[letter][1]}' fill-opacity='{opacity:.2f}' d='{''.join(path)}'/>"
            )
        parts += numbers
    bottom = len(rows) * height
    for tick in range(5):
        at = start + (end - start) * tick / 4
        anchor = ("start", "middle", "middle", "middle", "end")[tick]
        parts.append(_text(left + (at - start) * scale, bottom + 16, seconds_text(at), anchor))
    return _svg(bottom + 24, parts)


def bars_picture(items: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars: (label, value, text, colour)."""
    most = max((value for _, value, _, _ in items), default=1.0) or 1.0
    parts = []
    for index, (label, value, text, colour) in enumerate(items):
        y, width = index * 24, value / most * 480
        parts.append(_text(0, y + 15, label))
        parts.append(f"<rect x='290' y='{y + 3}' width='{width:.1f}' height='16' rx='2' fill='{colour}'/>")
        parts.append(_text(297 + width, y + 15, text))
    return _svg(len(items) * 24 + 4, parts)


def front_picture(points: Sequence[dict[str, float]]) -> str:
    """Step time over memory, both from zero to a little above the most."""
    left, right, top, bottom = 60.0, WIDTH - 50.0, 24.0, 200.0
    most, slowest = max(p["memory"] for p in points), max(p["step"] for p in points)

    def at(point: dict[str, float]) -> tuple[float, float]:
        x = left + point["memory"] / most * (right - left)
        return x, bottom - point["step"] / slowest * (bottom - top)

    ordered = sorted(points, key=lambda p: p["memory"])
    path = f"M{at(ordered[0])[0]:.1f} {top}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in map(at, ordered))
    parts = [
        f"<path d='M{left} {top}V{bottom}H{right}' fill='none' stroke='#adb5bd'/>",
        f"<path d='{path}H{right}' fill='none' stroke='#31688e' stroke-width='2'/>",
        _text(left - 6, bottom + 4, "0 s", "end"),
        _text(left - 6, top + 4, seconds_text(slowest), "end"),
    ]
    labelled = 0.0
    for point in ordered:
        x, y = at(point)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='#31688e'/>")
        if x - labelled < 60 and point is not ordered[-1]:
            continue
        labelled = x
        parts.append(_text(x + 4, y - 9, seconds_text(point["step"])))
        parts.append(_text(x, bottom + 18, bytes_text(point["memory"]), "middle"))
    return "<p class='lead'>the fastest step for each amount of memory that a device may use</p>" + _svg(
        bottom + 26, parts
    )
