"""A pipeline schedule in characters: one row a rank, one column a slice of time."""

from typing import Any

from fivefold.render.units import seconds_text


def gantt_text(found: dict[str, Any], width: int = 100) -> str:
    """Forward F (digits of the micro-batch), backward or input gradient B, weight gradient W, idle ·."""
    lengths = [end - start for actions in found["ranks"] for _, _, _, start, end in actions]
    until = min(found["until"], width / 3 * min(lengths))  # an action is three columns at least
    lines = []
    for rank, actions in enumerate(found["ranks"]):
        cells = ["·"] * width
        for letter, _, _, start, end in actions:
            first = round(start / until * width)
            for column in range(first, max(first + 1, round(end / until * width))):
                if column < width:
                    cells[column] = letter if column == first else letter.lower()
        lines.append(f"{rank:>3} {''.join(cells)}")
    note = "" if until >= found["makespan"] else f" (its first {seconds_text(until)})"
    return (
        f"schedule {found['schedule']}{note}: F forward, B backward, W weight gradient, · idle\n"
        + "\n".join(lines)
    )
