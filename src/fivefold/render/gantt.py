"""A pipeline schedule in characters: one row a rank, one column a slice of time."""

from statistics import median
from typing import Any

from fivefold.render.units import seconds_text


def gantt_text(found: dict[str, Any], width: int = 100) -> str:
    """Forward F, backward or input gradient B, weight gradient W, each begun by a capital, idle ·."""
    rows = found["panels"][0]["rows"]
    usual = median(end - start for _, actions in rows for _, _, _, start, end in actions)
    until = min(found["panels"][0]["end"], width / 3 * usual)  # most actions are three columns at least
    lines = []
    for rank, actions in rows:
        cells = ["·"] * width
        for letter, _, _, start, end in actions:
            first = round(start / until * width)
            for column in range(first, max(first + 1, round(end / until * width))):
                if column < width:
                    cells[column] = letter if column == first else letter.lower()
        lines.append(f"{rank:>3} {''.join(cells)}")
    part = "" if until >= found["makespan"] else f" (its first {seconds_text(until)})"
    some = f", {len(rows)} of {found['ranks']} ranks" if len(rows) < found["ranks"] else ""
    return (
        f"schedule {found['schedule']}{part}{some}: F forward, B backward, W weight gradient, · idle\n"
        + "\n".join(lines)
    )
