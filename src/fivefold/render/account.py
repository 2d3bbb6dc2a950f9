"""The account of a few steps for people: predicted beside measured, line by line."""

from typing import Any

from fivefold.render.tables import table
from fivefold.render.units import percent_text, seconds_text


def account_text(found: dict[str, Any]) -> str:
    """The document of `proof.run_account.account_of` as text."""
    parts = [_traffic(found["traffic"]), _memory(found["memory"]), _time(found), _communication(found)]
    return "\n\n".join(part for part in parts if part)


def is_equal(found: dict[str, Any]) -> bool:
    """Whether every byte that crossed a link was predicted."""
    return all(line["equal"] for line in found["traffic"])


def _traffic(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "bytes of a step: one rank sends none"
    rows = [
        [
            f"{line['axis']} {line['primitive']}",
            line["phase"],
            f"{line['predicted']:,}",
            f"{line['measured']:,}",
            "equal" if line["equal"] else "NOT EQUAL",
        ]
        for line in lines
    ]
    notes = "bytes of a step, of the first rank of each pipeline stage"
    if any(line["axis"] == "ep" for line in lines):
        notes += "; over ep, whose ranks' shares follow the routing, of all ranks"
    return notes + "\n" + table(("collective", "phase", "predicted", "measured", ""), rows, left=2)


def _memory(lines: list[dict[str, Any]]) -> str:
    rows, notes = [], []
    for line in lines:
        measured, predicted = line["measured"], line["predicted"]
        if measured is None:
            rows.append([line["category"], f"{predicted:,}", "", ""])
        else:
            told = "equal" if measured == predicted else _change(measured, predicted)
            rows.append([line["category"], f"{predicted:,}", f"{measured:,}", told])
        if line["note"] and measured != predicted:
            notes.append(f"{line['category']}: {line['note']}")
    head = ("memory in bytes, on the fullest rank", "predicted", "measured", "")
    return "\n".join([table(head, rows), *notes])


def _time(found: dict[str, Any]) -> str:
    rows = [
        [name, seconds_text(predicted), seconds_text(measured), _change(measured, predicted)]
        for name, (measured, predicted) in found["time"].items()
    ]
    head = (f"time, mean of {found['ranks']} ranks and {found['steps']} steps", "predicted", "measured", "")
    return table(head, rows)


def _communication(found: dict[str, Any]) -> str:
    step, predicted_step = found["time"]["step"]
    rows = []
    for axis, line in found["communication"].items():
        cells = [axis + (" with the bubble" if axis == "pp" else "")]
        for kind, whole in (("predicted", predicted_step), ("measured", step)):
            total, exposed = line[kind], line[f"{kind}_exposed"]
            hidden = max(0.0, total - exposed)
            cells += [
                seconds_text(total),
                seconds_text(hidden),
                seconds_text(exposed),
                percent_text(exposed / whole),
            ]
        rows.append(cells)
    if not rows:
        return ""
    head = ("communication", "predicted", "hidden", "exposed", "of a step")
    return table((*head, "measured", "hidden", "exposed", "of a step"), rows)


def _change(measured: float, predicted: float) -> str:
    return f"{measured / predicted - 1:+.1%}" if predicted else "not predicted"
