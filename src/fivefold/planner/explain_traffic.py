"""Where a row of the ledger's traffic comes from: sizes and times of its collectives, and what they add up to."""

from collections import Counter
from math import isclose

from fivefold.ledger import gloo, pipeline
from fivefold.ledger.job import Job
from fivefold.ledger.total import Ledger, slowest
from fivefold.ledger.traffic import Row
from fivefold.render.units import seconds_text

PAPERS = {
    "tp": "Shoeybi 2019 (Megatron-LM), with sequence parallel Korthikanti 2022",
    "cp": "Liu 2023 (ring attention), Jacobs 2023 (Ulysses)",
    "ep": "Lepikhin 2020 (GShard): dispatch and combine",
    "pp": "Narayanan 2021 (Megatron-LM on clusters)",
    "embedding": "Narayanan 2021: gradients of tied ends",
}


def plain(value: float) -> str:
    """A number of an explanation: whole ones to the digit, others to twelve."""
    return f"{round(value):,}" if value == round(value) and abs(value) < 1e18 else f"{value:.12g}"


def names(ledger: Ledger) -> list[str]:
    """A name for every row; of rows that share axis, primitive and phase (experts have their own) the second is .2."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    for row in ledger.traffic:
        name = f"traffic.{row.axis}.{row.primitive}.{row.phase}"
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return found


def text(ledger: Ledger, row: Row) -> str:
    """Three lines: what is sent, times · bytes of one and the seconds they take, source."""
    job = ledger.job
    pieces = _pieces(ledger, row)
    formulas = dict.fromkeys(piece.formula + _put_in(job, piece) for piece in pieces)
    sizes = " + ".join(f"{piece.times} · {plain(_each(piece.bytes_per_rank, piece))}" for piece in pieces)
    times = " + ".join(f"{piece.times} · {_each(piece.seconds, piece):.9g}" for piece in pieces)
    return (
        f"{'; '.join(formulas)}; {row.times} times a step on the rank that is through last, "
        f"{row.link}: {_link(job, row)}\n"
        f"{sizes} → {plain(row.bytes_per_rank)} B; on the wire {row.wire_bytes:,.0f} B; "
        f"{times} → {plain(row.seconds)} s; exposed {plain(row.exposed_seconds)} s\n"
        f"source: {_source(row)}; α-β costs: Thakur 2005, Sanders 2009"
    )


def _source(row: Row) -> str:
    """Where the volume of a row is derived."""
    if row.primitive == "all_to_all" and row.phase == "optimizer":
        return "Jordan et al. 2024 (Muon): whole matrices; ledger/muon.py"
    return PAPERS.get(row.axis, "Rajbhandari 2020 (ZeRO)")


def _each(total: float, piece: Row) -> float:
    return total / max(piece.times, 1)


def _pieces(ledger: Ledger, row: Row) -> list[Row]:
    """The row as it was before equal rows of stages were joined: one piece for each size."""
    job = ledger.job
    built = pipeline.stages(job, pipeline.costs(job))
    rank = slowest(job, built, ledger.timeline, pipeline.shares(job, built))[1]
    found: dict[tuple[str, float], Row] = {}
    for index in pipeline.own_stages(job, rank):
        for item, layers in built[index].rows:
            if (item.axis, item.primitive, item.phase) != (row.axis, row.primitive, row.phase):
                continue
            count, key = round(layers * job.microbatches), (item.formula, _each(item.bytes_per_rank, item))
            old = found.get(key)
            found[key] = item._replace(
                times=item.times * count + (old.times if old else 0),
                bytes_per_rank=item.bytes_per_rank * count + (old.bytes_per_rank if old else 0.0),
                seconds=item.seconds * count + (old.seconds if old else 0.0),
            )
    whole = sum(piece.bytes_per_rank for piece in found.values())
    return list(found.values()) if isclose(whole, row.bytes_per_rank, rel_tol=1e-9) and whole else [row]


def _put_in(job: Job, piece: Row) -> str:
    """The size of one message as a product: tokens · elements of a token · bytes, or elements · bytes."""
    each = _each(piece.bytes_per_rank, piece)
    if piece.phase in ("gradient", "optimizer") and piece.primitive != "all_to_all":
        item = job.stack.reduce if piece.phase == "gradient" else job.stack.gather
        if item and piece.primitive != "send":
            return f" = {plain(each / item)} · {item} B{'' if each % item == 0 else ' on average'}"
        return ""
    for rows in (job.tokens, job.tokens / job.sequence_split):
        if piece.axis != "world" and each % (rows * job.itemsize) == 0:
            return f" = {plain(rows)} · {plain(each / rows / job.itemsize)} · {job.itemsize} B"
    return ""


def _link(job: Job, row: Row) -> str:
    if job.hardware.measured:
        return "seconds as measured, where a measurement fits"
    found = job.wires
    link = found.between if row.link == "between nodes" else found.inside
    text = f"α = {seconds_text(link.latency)}, 1/β = {link.bandwidth / 1e9:.4g} GB/s"
    if found.backend != "gloo" or row.primitive not in gloo.GLOO_PROGRAMS:
        return text
    primitive, name = gloo.GLOO_PROGRAMS[row.primitive]
    return f"{text}, a {name} {primitive}, which is what gloo runs"
