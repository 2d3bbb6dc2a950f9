"""Measured collectives as a table, and as a page of measured against predicted times."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import Any

from fivefold.render.html import STYLE
from fivefold.render.tables import table
from fivefold.render.units import bytes_text, seconds_text

COLOURS = ("#31688e", "#d1495b", "#35b779", "#edae49", "#8d5fd3", "#2a9d8f", "#e76f51", "#577590")
HEAD = (
    "primitive",
    "algorithm",
    "size",
    "count",
    "type",
    "redop",
    "time",
    "algbw",
    "busbw",
    "predicted",
    "#wrong",
)
FLAT = 1e15  # bytes/s that no link has: latency is all
WIDTH, HEIGHT, LEFT, TOP = 1060, 380, 70, 16


def bench_text(rows: Sequence[dict[str, Any]]) -> str:
    """nccl-tests' columns, and the time that was predicted."""
    cells = [
        [
            row["primitive"],
            row["algorithm"],
            bytes_text(row["bytes"]),
            f"{row['count']:,}",
            row["type"],
            row["redop"],
            seconds_text(row["seconds"]),
            _rate(row["algbw"]),
            _rate(row["busbw"]),
            "-" if row["predicted_seconds"] is None else seconds_text(row["predicted_seconds"]),
            str(row["wrong"]),
        ]
        for row in rows
    ]
    head = f"{rows[0]['ranks']} ranks\n" if rows else ""
    return head + table(HEAD, cells, left=2)


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3f} GB/s"


def bench_page(rows: Sequence[dict[str, Any]]) -> str:
    """One picture a primitive: time against size, both logarithmic; lines measured, dashes predicted."""
    parts = ["<h1>Collectives, measured against predicted</h1>"]
    parts.append("<p class='lead'>lines and dots: measured; dashes: predicted; both axes are logarithmic</p>")
    for primitive in dict.fromkeys(row["primitive"] for row in rows):
        own = [row for row in rows if row["primitive"] == primitive]
        parts.append(f"<h2>{escape(primitive)}, {own[0]['ranks']} ranks</h2>" + _chart(own))
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    lines = bench_text(rows).splitlines()[3:]
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in filter(None, line.split("  "))) + "</tr>"
        for line in lines
    )
    parts.append(f"<h2>Rows</h2><table><tr>{head}</tr>{body}</table>")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>fivefold comm bench</title>"
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _chart(rows: Sequence[dict[str, Any]]) -> str:
    times = [t for row in rows for t in (row["seconds"], row["predicted_seconds"]) if t]
    low, high = floor(log10(min(times))), ceil(log10(max(times)))
    small, large = log10(min(row["bytes"] for row in rows)), log10(max(row["bytes"] for row in rows))

    def at(size: float, seconds: float) -> str:
        x = LEFT + (log10(size) - small) / ((large - small) or 1) * (WIDTH - LEFT - 20)
        y = TOP + (high - log10(seconds)) / ((high - low) or 1) * (HEIGHT - TOP - 40)
        return f"{x:.1f},{y:.1f}"

    drawn = []
    for power in range(low, high + 1):
        y = at(10**small, 10.0**power).split(",")[1]
        drawn.append(f"<line x1='{LEFT}' x2='{WIDTH - 20}' y1='{y}' y2='{y}' stroke='#e9ecef'/>")
        drawn.append(f"<text x='0' y='{y}'>{seconds_text(10.0**power)}</text>")
    for size in sorted({row["bytes"] for row in rows}):
        x = at(size, 10.0**low).split(",")[0]
        drawn.append(f"<text x='{x}' y='{HEIGHT - 18}' text-anchor='middle'>{bytes_text(size)}</text>")
    names = list(dict.fromkeys(row["algorithm"] for row in rows))
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        own = sorted((row for row in rows if row["algorithm"] == name), key=lambda row: float(row["bytes"]))
        places = [at(row["bytes"], row["seconds"]) for row in own]
        drawn.append(
            f"<polyline points='{' '.join(places)}' fill='none' stroke='{colour}' stroke-width='2'/>"
        )
        for row, place in zip(own, places, strict=True):
            x, y = place.split(",")
            tip = f"{name} {bytes_text(row['bytes'])}: {seconds_text(row['seconds'])}"
            drawn.append(f"<circle cx='{x}' cy='{y}' r='3' fill='{colour}'><title>{tip}</title></circle>")
        expected = [at(row["bytes"], row["predicted_seconds"]) for row in own if row["predicted_seconds"]]
        drawn.append(
            f"<polyline points='{' '.join(expected)}' fill='none' stroke='{colour}' stroke-dasharray='5 4'/>"
        )
    legend = "".join(
        f"<i style='background:{COLOURS[index % len(COLOURS)]}'></i>{escape(name)}"
        for index, name in enumerate(names)
    )
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}'>{''.join(drawn)}</svg><p class='legend'>{legend}</p>"


def calibration_text(rows: Sequence[dict[str, Any]]) -> str:
    """The fits of `comm calibrate`."""
    cells = []
    for row in rows:
        far = row.get("knee")
        beyond = f"{row['far_bandwidth'] / 1e9:.3f} GB/s beyond {bytes_text(far)}" if far else "-"
        cells.append(
            [
                row["backend"],
                row["primitive"],
                f"{row['hosts']} × {row['local']}",
                seconds_text(row["latency"]),
                _rate(row["bandwidth"]) if row["bandwidth"] < FLAT else "flat",
                beyond,
                f"{bytes_text(row['smallest'])} … {bytes_text(row['largest'])}",
                f"{row['error'] * 100:.1f}%",
            ]
        )
    head = (
        "backend",
        "primitive",
        "hosts × ranks",
        "latency",
        "S / time",
        "then",
        "fitted",
        "median error, held out",
    )
    return table(head, cells, left=3)
