"""One self-contained page of a ledger or a plan: drawn from the document, nothing computed, nothing loaded."""

from collections.abc import Sequence
from html import escape
from typing import Any

from fivefold.render.ledger import same_text
from fivefold.render.units import bytes_text, count_text, percent_text, seconds_text

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "overhead")
COLOURS = ("#31688e", "#35b779", "#fde725", "#d1495b", "#8d99ae", "#ced4da")
KINDS = {"F": "#31688e", "B": "#d1495b", "W": "#edae49"}

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; margin: 0 auto; max-width: 1080px; padding: 32px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
.lead { color: #495057; margin: 0 0 20px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; }
.card { flex: 1 1 120px; border: 1px solid #dee2e6; border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 21px; } .card span { color: #6c757d; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: right; color: #6c757d; font-weight: 600; border-bottom: 2px solid #dee2e6; padding: 5px 8px; }
td { text-align: right; border-bottom: 1px solid #f1f3f5; padding: 5px 8px; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
tr.best td { background: #e7f5ff; font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { font: 12px system-ui, sans-serif; fill: #495057; }
.legend { font-size: 13px; color: #495057; } .legend i { display: inline-block; width: 11px; height: 11px;
border-radius: 2px; margin: 0 5px 0 14px; vertical-align: -1px; }
ul { padding-left: 20px; font-size: 14px; }
"""


def page(
    title: str,
    found: dict[str, Any],
    gantt: dict[str, Any] | None,
    ranking: Sequence[dict[str, Any]] = (),
    neighbours: Sequence[str] = (),
    front: Sequence[dict[str, float]] = (),
) -> str:
    """The page as text."""
    parts = [
        f"<h1>{escape(title)}</h1><p class='lead'>{escape(found['reason'])}</p>",
        _cards(found),
        "<h2>Memory of each rank class</h2>" + _memory(found),
    ]
    if gantt:
        parts.append("<h2>Pipeline</h2>" + _gantt(gantt))
    parts.append("<h2>One step</h2>" + _time(found))
    parts.append("<h2>Traffic of the rank that is through last, by axis and link</h2>" + _traffic(found))
    if front and front[-1]["step"] > 1.001 * front[0]["step"]:  # else memory buys no time
        parts.append("<h2>Step time against memory</h2>" + _front(front))
    if ranking:
        parts.append("<h2>Ranking</h2>" + _ranking(ranking))
    if neighbours:
        lines = "".join(f"<li>{escape(line)}</li>" for line in neighbours)
        parts.append(f"<h2>Why its neighbours are worse</h2><ul>{lines}</ul>")
    body = "\n".join(parts)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _cards(found: dict[str, Any]) -> str:
    cells = (
        (seconds_text(found["time"]["step"]), "one step"),
        (count_text(found["tokens_per_second_per_gpu"]), "tokens/s a device"),
        (percent_text(found["mfu"]), "MFU, causal attention"),
        (percent_text(found["bubble_fraction"]), "pipeline bubble"),
        (
            bytes_text(found["memory"]["peak"]),
            f"of {bytes_text(found['memory']['capacity'])} on the fullest rank",
        ),
        (count_text(found["parameters"]["total"]), f"parameters on {found['world_size']:,} devices"),
    )
    return (
        "<div class='cards'>"
        + "".join(f"<div class='card'><b>{a}</b><span>{b}</span></div>" for a, b in cells)
        + "</div>"
    )


def _legend(names: Sequence[str], colours: Sequence[str]) -> str:
    items = "".join(f"<i style='background:{c}'></i>{n}" for n, c in zip(names, colours, strict=True))
    return f"<p class='legend'>{items}</p>"


def _memory(found: dict[str, Any]) -> str:
    classes, capacity = found["rank_classes"], found["memory"]["capacity"]
    step = max(1, len(classes) // 16)
    shown = []
    for item in classes:
        if item["pp_rank"] % step == 0 or item is classes[-1]:
            shown.append((f"pp rank {item['pp_rank']}", item))
            if found["mean_load_classes"]:  # the busiest experts' ranks, and those with the mean load
                shown[-1] = f"pp rank {item['pp_rank']}, {item['expert_load']:g} ×", item
                shown.append(("… mean load", found["mean_load_classes"][item["pp_rank"]]))
    most = max(capacity, *(item["memory"]["peak"] for _, item in shown))
    scale, height = 860 / most, 26
    rows = []
    for index, (label, item) in enumerate(shown):
        x, y = 110.0, index * height + 4
        rows.append(f"<text x='0' y='{y + 14}'>{label}</text>")
        for name, colour in zip(PARTS, COLOURS, strict=True):
            width = item["memory"][name] * scale
            rows.append(f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='18' fill='{colour}'/>")
            x += width
        rows.append(f"<text x='{x + 6:.1f}' y='{y + 14}'>{bytes_text(item['memory']['peak'])}</text>")
    limit, bottom = 110 + capacity * scale, len(shown) * height + 4
    rows.append(
        f"<line x1='{limit:.1f}' x2='{limit:.1f}' y1='0' y2='{bottom}' stroke='#212529' stroke-dasharray='4 3'/>"
    )
    rows.append(
        f"<text x='{limit - 4:.1f}' y='{bottom + 14}' text-anchor='end'>capacity {bytes_text(capacity)}</text>"
    )
    return f"<svg viewBox='0 0 1060 {bottom + 22}'>{''.join(rows)}</svg>" + _legend(PARTS, COLOURS)


def _gantt(found: dict[str, Any]) -> str:
    ranks, until = found["ranks"], found["until"]
    height = max(10, min(26, 420 // len(ranks)))
    rows = []
    for rank, actions in enumerate(ranks):
        y = rank * height
        rows.append(f"<text x='0' y='{y + height * 0.7:.1f}'>{rank}</text>")
        for letter, stage, micro, start, end in actions:
            if start >= until:
                continue
            x, width = 30 + start / until * 1025, max(0.5, (min(end, until) - start) / until * 1025)
            tip = f"{letter} stage {stage} micro-batch {micro}: {seconds_text(end - start)}"
            rows.append(
                f"<rect x='{x:.2f}' y='{y + 1}' width='{width:.2f}' height='{height - 2}' fill='{KINDS[letter]}' "
                f"fill-opacity='{0.95 if stage < len(ranks) else 0.6}' stroke='#fff' stroke-width='.4'>"
                f"<title>{tip}</title></rect>"
            )
    bottom = len(ranks) * height
    part = f" (its first {seconds_text(until)})" if found["cut"] else ""
    rows.append(f"<text x='30' y='{bottom + 16}'>0</text>")
    rows.append(f"<text x='1055' y='{bottom + 16}' text-anchor='end'>{seconds_text(until)}</text>")
    names = ("forward", "backward / input gradient", "weight gradient")
    return (
        f"<p class='lead'>schedule {found['schedule']}, one row a pipeline rank{part}; later chunks are paler</p>"
        f"<svg viewBox='0 0 1060 {bottom + 22}'>{''.join(rows)}</svg>" + _legend(names, tuple(KINDS.values()))
    )


def _bars(items: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars: (label, value, text, colour)."""
    most = max((value for _, value, _, _ in items), default=1.0) or 1.0
    rows = []
    for index, (label, value, text, colour) in enumerate(items):
        y, width = index * 24, value / most * 420
        rows.append(f"<text x='0' y='{y + 15}'>{escape(label)}</text>")
        rows.append(f"<rect x='330' y='{y + 3}' width='{width:.1f}' height='16' rx='2' fill='{colour}'/>")
        rows.append(f"<text x='{336 + width:.1f}' y='{y + 15}'>{text}</text>")
    return f"<svg viewBox='0 0 1060 {len(items) * 24 + 4}'>{''.join(rows)}</svg>"


def _time(found: dict[str, Any]) -> str:
    time = found["time"]
    items = [
        (
            name.replace("_", " "),
            value,
            f"{seconds_text(value)} ({percent_text(value / time['step'])})",
            "#31688e",
        )
        for name, value in time.items()
        if name != "step"
    ]
    return _bars(items)


def _traffic(found: dict[str, Any]) -> str:
    items = []
    for row in sorted(found["traffic"], key=lambda row: -float(row["wire_bytes"])):
        colour = "#d1495b" if row["link"] == "between nodes" else "#35b779"
        text = (
            f"{bytes_text(row['wire_bytes'])} in {seconds_text(row['seconds'])}, "
            f"{seconds_text(row['exposed_seconds'])} exposed"
        )
        items.append((f"{row['axis']} {row['primitive']} ({row['phase']})", row["wire_bytes"], text, colour))
    if not items:
        return "<p>none</p>"
    return _bars(items) + _legend(("inside node", "between nodes"), ("#35b779", "#d1495b"))


def _front(points: Sequence[dict[str, float]]) -> str:
    right, top = max(p["memory"] for p in points), max(p["step"] for p in points)
    low = min(p["step"] for p in points)
    span = (top - low) or top

    def at(point: dict[str, float]) -> tuple[float, float]:
        return 70 + point["memory"] / right * 940, 190 - (point["step"] - low) / span * 160

    ordered = sorted(points, key=lambda p: p["memory"])
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, ordered))
    dots = "".join(
        f"<circle cx='{at(p)[0]:.1f}' cy='{at(p)[1]:.1f}' r='4.5' fill='#31688e'/>"
        f"<text x='{at(p)[0]:.1f}' y='{at(p)[1] - 9:.1f}' text-anchor='middle'>{seconds_text(p['step'])}</text>"
        f"<text x='{at(p)[0]:.1f}' y='216' text-anchor='middle'>{bytes_text(p['memory'])}</text>"
        for p in ordered
    )
    return (
        "<p class='lead'>the fastest layout that stays below each amount of memory</p>"
        f"<svg viewBox='0 0 1060 224'><polyline points='{line}' fill='none' stroke='#31688e' stroke-width='2'/>"
        f"{dots}</svg>"
    )


def _ranking(ranking: Sequence[dict[str, Any]]) -> str:
    keys = ("pp", "schedule", "chunks", "dp_replicate", "dp_shard", "zero", "cp", "tp", "ep", "recompute")
    head = "".join(f"<th>{name}</th>" for name in ("#", *keys, "micro", "step", "MFU", "memory", "bubble"))
    rows = []
    for place, item in enumerate(ranking, start=1):
        cells = [
            str(place),
            *(str(item["parallel"][key]) for key in keys),
            str(item["micro_batch"]),
            seconds_text(item["step"]),
            percent_text(item["mfu"]),
            bytes_text(item["memory_peak"]),
            percent_text(item["bubble_fraction"]),
        ]
        mark = " class='best'" if place == 1 else ""
        rows.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        for note in same_text(item):
            text = (
                f"<td colspan='{len(cells) - 1}' style='text-align: left; color: #6c757d'>{escape(note)}</td>"
            )
            rows.append(f"<tr><td></td>{text}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
