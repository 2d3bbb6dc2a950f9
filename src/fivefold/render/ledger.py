"""A ledger for people: memory, traffic and time as tables. Reads the document, computes nothing."""

from typing import Any

from fivefold.render.tables import bar, table
from fivefold.render.units import bytes_text, count_text, flops_text, percent_text, seconds_text


def ledger_text(found: dict[str, Any]) -> str:
    """The document of an estimate as text."""
    notes = "\n".join(f"note: {line}" for line in found["notes"])
    return "\n\n".join(
        [_head(found), _memory(found), _time(found), _traffic(found), *([notes] if notes else [])]
    )


def cost_text(cost: dict[str, float]) -> str:
    """Days, device-hours and, where the cluster has a price, what they cost."""
    price = f" at {cost['price_per_hour']:,.2f}: {cost['price']:,.0f}" if cost["price"] else ""
    return f"{cost['tokens']:,.0f} tokens: {cost['days']:.2f} days, {cost['device_hours']:,.0f} device-hours{price}"


def same_text(item: dict[str, Any]) -> list[str]:
    """The line about layouts that share a place in the ranking, if there are any."""
    if not item["same"]:
        return []
    return [f"and {len(item['same'])} more within 0.1% that differ only in {', '.join(item['same_but_for'])}"]


def traffic_text(row: dict[str, Any]) -> str:
    """Whose collective it is: experts' parameters have their own."""
    return f"{row['axis']} {row['primitive']}{' of experts' if row['experts'] else ''}"


def _head(found: dict[str, Any]) -> str:
    parameters = found["parameters"]
    return (
        f"{found['reason']}\n"
        f"{found['world_size']} ranks; {count_text(parameters['total'])} parameters "
        f"({count_text(parameters['active'])} active), at most {count_text(parameters['per_rank_max'])} a rank"
    )


def _memory(found: dict[str, Any]) -> str:
    names = ("parameters", "gradients", "optimizer", "activations", "buffers", "overhead", "peak")
    capacity = found["memory"]["capacity"]
    rows = []
    for item in _distinct(found["rank_classes"], found["mean_load_classes"]):
        cells = [bytes_text(item["memory"][name]) for name in names]
        rows.append([item["label"], str(item["layers"]), *cells, bar(item["memory"]["peak"], capacity, 20)])
    return "memory per rank\n" + table(("pp rank", "layers", *names, f"of {bytes_text(capacity)}"), rows)


def _distinct(classes: list[dict[str, Any]], at_mean: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """First, fullest and last; the ranks between hold no surprise. With expert parallel each twice: where experts
    are busiest, and where they get the mean load."""
    fullest = max(classes, key=lambda item: float(item["memory"]["peak"]))
    shown = {item["pp_rank"]: item for item in (classes[0], fullest, classes[-1])}
    notes = {classes[0]["pp_rank"]: " first", classes[-1]["pp_rank"]: " last"}
    notes[fullest["pp_rank"]] = notes.get(fullest["pp_rank"], "") + " fullest"
    rows = []
    for rank in sorted(shown):
        label = f"{rank}{notes[rank]}"
        busy = f", experts {shown[rank]['expert_load']:g} × mean" if at_mean else ""
        rows.append({**shown[rank], "label": label + busy})
        if at_mean:
            rows.append({**at_mean[rank], "label": f"{rank}, experts at mean load"})
    return rows


def _time(found: dict[str, Any]) -> str:
    time = found["time"]
    rows = [[name, seconds_text(value), percent_text(value / time["step"])] for name, value in time.items()]
    rate = found["tokens_per_second_per_gpu"]
    return (
        "time of one step\n" + table(("part", "time", "of the step"), rows) + "\n"
        f"{count_text(rate)} tokens/s a rank; {flops_text(found['tflops_per_gpu'] * 1e12)} a rank; "
        f"MFU {percent_text(found['mfu'])} (causal attention; {percent_text(found['mfu_full_attention'])} "
        f"counting all pairs), HFU {percent_text(found['hfu'])}; bubble {percent_text(found['bubble_fraction'])}"
    )


def _traffic(found: dict[str, Any]) -> str:
    rows = [
        [
            traffic_text(row),
            row["phase"],
            row["link"],
            str(row["count"]),
            bytes_text(row["bytes_per_rank"]),
            bytes_text(row["wire_bytes"]),
            seconds_text(row["seconds"]),
            seconds_text(row["exposed_seconds"]),
        ]
        for row in found["traffic"]
    ]
    if not rows:
        return "traffic: none"
    head = ("traffic", "phase", "link", "times", "bytes a rank", "on the wire", "time", "exposed")
    return table(head, rows, left=3)
