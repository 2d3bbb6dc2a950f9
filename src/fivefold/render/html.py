"""One self-contained page of a ledger or a plan: drawn from the document, nothing computed, nothing loaded."""

from collections.abc import Sequence
from html import escape
from typing import Any

from fivefold.render.ledger import same_text, traffic_text
from fivefold.render.pictures import bars_picture, front_picture, gantt_picture, legend, memory_picture
from fivefold.render.units import bytes_text, count_text, percent_text, seconds_text

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; margin: 0 auto; max-width: 1080px; padding: 32px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 10px; }
.lead { color: #495057; margin: 0 0 6px; } .lead + .cards { margin-top: 20px; } svg + .lead { margin-top: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; }
.card { border: 1px solid #dee2e6; border-radius: 8px; padding: 12px 14px; }
.card b { display: block; font-size: 21px; } .card span { color: #6c757d; font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: right; color: #6c757d; font-weight: 600; border-bottom: 2px solid #dee2e6; padding: 5px 8px; }
td { white-space: nowrap; text-align: right; border-bottom: 1px solid #f1f3f5; padding: 5px 8px;
font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
tr.best td { background: #e7f5ff; font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #495057; paint-order: stroke; stroke: #fff; stroke-width: 3px; }
svg text.on { font-size: 9px; fill: #fff; stroke: none; text-anchor: middle; }
.legend { font-size: 13px; color: #495057; } .legend i { display: inline-block; width: 11px; height: 11px;
border-radius: 2px; margin: 0 5px 0 0; vertical-align: -1px; } .legend span { margin-right: 16px; }
ul { padding-left: 20px; font-size: 14px; }
"""


def page(
    title: str,
    layout: str,
    found: dict[str, Any],
    gantt: dict[str, Any] | None,
    run: dict[str, float] | None = None,
    ranking: Sequence[dict[str, Any]] = (),
    neighbours: Sequence[str] = (),
    front: Sequence[dict[str, float]] = (),
) -> str:
    """The page as text. `layout` says in a line what is shown; `run` is what a budget of tokens costs."""
    parts = [
        f"<h1>{escape(title)}</h1><p class='lead'>{escape(layout)}</p><p class='lead'>{escape(found['reason'])}</p>",
        _cards(found, run),
        "<h2>Memory of each rank class</h2>"
        + memory_picture(found["rank_classes"], found["mean_load_classes"], found["memory"]["capacity"]),
    ]
    if gantt:
        parts.append("<h2>Pipeline</h2>" + gantt_picture(gantt))
    parts.append("<h2>One step of the rank that is through last</h2>" + _time(found))
    parts.append("<h2>Its traffic, by axis and link</h2>" + _traffic(found))
    if len(front) > 1:  # else memory buys no time
        parts.append("<h2>Step time against memory</h2>" + front_picture(front))
    if ranking:
        parts.append("<h2>Ranking</h2>" + _ranking(ranking))
    if neighbours:
        lines = "".join(f"<li>{escape(line)}</li>" for line in neighbours)
        parts.append(f"<h2>Its neighbours, one change away</h2><ul>{lines}</ul>")
    body = "\n".join(parts)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _cards(found: dict[str, Any], run: dict[str, float] | None) -> str:
    cells = [
        (seconds_text(found["time"]["step"]), "one step"),
        (count_text(found["tokens_per_second_per_gpu"]), "tokens/s a device"),
        (percent_text(found["mfu"]), "MFU, causal attention"),
        (percent_text(found["bubble_fraction"]), "bubble of the busiest pipeline rank"),
        (
            bytes_text(found["memory"]["peak"]),
            f"of {bytes_text(found['memory']['capacity'])} on the fullest rank",
        ),
        (count_text(found["parameters"]["total"]), f"parameters on {found['world_size']:,} devices"),
    ]
    if run:
        tokens = count_text(run["tokens"])
        cells.append((f"{run['days']:.1f} days", f"for {tokens} tokens"))
        if run["price"]:
            cells.append((f"{run['price']:,.0f}", f"at {run['price_per_hour']:,.2f} a device-hour"))
    return (
        "<div class='cards'>"
        + "".join(f"<div class='card'><b>{a}</b><span>{b}</span></div>" for a, b in cells)
        + "</div>"
    )


def _time(found: dict[str, Any]) -> str:
    time = found["time"]
    return bars_picture(
        [
            (
                name.replace("_", " "),
                value,
                f"{seconds_text(value)} ({percent_text(value / time['step'])})",
                "#31688e",
            )
            for name, value in time.items()
            if name != "step"
        ]
    )


def _traffic(found: dict[str, Any]) -> str:
    colours = {"inside node": "#35b779", "between nodes": "#d1495b"}
    items = [
        (
            f"{traffic_text(row)} ({row['phase']})",
            row["wire_bytes"],
            f"{bytes_text(row['wire_bytes'])} in {seconds_text(row['seconds'])}, "
            f"{seconds_text(row['exposed_seconds'])} exposed",
            colours[row["link"]],
        )
        for row in sorted(found["traffic"], key=lambda row: -float(row["wire_bytes"]))
    ]
    if not items:
        return "<p>none</p>"
    return bars_picture(items) + legend(colours)


def _ranking(ranking: Sequence[dict[str, Any]]) -> str:
    names = {"dp_replicate": "replicas", "dp_shard": "shards", "sequence_parallel": "sp"}
    keys = ("pp", "schedule", "chunks", "dp_replicate", "dp_shard", "zero", "cp", "tp", "sequence_parallel", "ep",
            "recompute")  # fmt: skip
    titles = ["#", *(names.get(key, key) for key in keys), "micro", "step", "MFU", "memory", "bubble"]
    head = "".join(f"<th>{title}</th>" for title in titles)
    rows = []
    for place, item in enumerate(ranking, start=1):
        cells = [
            str(place),
            *(_cell(item["parallel"][key]) for key in keys),
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


def _cell(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
