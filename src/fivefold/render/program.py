"""A collective program as characters and as a page: its transfers, and how far every chunk is on every rank."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from fivefold.ledger.programs.steps import Program, Transfer, step
from fivefold.render.html import STYLE

COLOURS = ("#31688e", "#35b779", "#d1495b", "#edae49", "#8d5fd3", "#2a9d8f", "#e76f51", "#577590")
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
LANE, ROW = 86, 62  # pixels


def program_text(program: Program) -> str:
    """Round by round: the messages ("0→1 c3+": chunk 3 from 0 to 1, which adds it), then what every rank holds."""
    reduces = any(transfer.reduce for round_ in program for transfer in round_)
    head = f"{program.name} {program.primitive} over {program.ranks} ranks: {program.length} rounds, "
    head += f"{program.chunks} chunk{'s' * (program.chunks > 1)}"
    key = (
        "a digit says how many ranks' values a chunk holds, █ all" if reduces else "█ the rank has the chunk"
    )
    lines = [head, f"one column a chunk, · not there; {key}", ""]
    before, *after = _states(program)
    lines.append("at first")
    lines += _grid(program, before, reduces)
    for index, (round_, state) in enumerate(zip(program, after, strict=True), start=1):
        lines += ["", f"round {index}:  " + "   ".join(_messages(round_))]
        lines += _grid(program, state, reduces)
    return "\n".join(lines)


def _states(program: Program) -> Iterator[list[dict[int, float]]]:
    """What every rank holds before the first round and after each: how many ranks' values are in each chunk."""
    held = [dict.fromkeys(program.starts(rank), 1.0) for rank in range(program.ranks)]
    yield [dict(own) for own in held]
    for round_ in program:
        step(held, round_)
        yield [dict(own) for own in held]


def _messages(round_: Sequence[Transfer]) -> list[str]:
    found = []
    for (source, target), group in groupby(sorted(round_), key=lambda t: (t.source, t.target)):
        items = list(group)
        plus = "+" if items[0].reduce else ""
        found.append(f"{source}→{target} c{_ranges([t.chunk for t in items])}{plus}")
    return found


def _ranges(chunks: Sequence[int]) -> str:
    """0,1,2,5 → "0-2,5"."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _grid(program: Program, state: Sequence[dict[int, float]], reduces: bool) -> list[str]:
    width = len(str(program.ranks - 1))
    return [
        f"  rank {rank:>{width}}  "
        + "".join(_mark(own.get(chunk), program.ranks, reduces) for chunk in range(program.chunks))
        for rank, own in enumerate(state)
    ]


def _mark(count: float | None, ranks: int, reduces: bool) -> str:
    if count is None:
        return "·"
    return "█" if not reduces or count == ranks else DIGITS[min(int(count), len(DIGITS) - 1)]


def program_page(program: Program) -> str:
    """A page: ranks from left to right, rounds downwards, an arrow a message, coloured by its first chunk."""
    title = f"{program.name} {program.primitive} over {program.ranks} ranks"
    lead = f"{program.length} rounds, {program.chunks} chunks; + means the receiver adds. Boxes: the chunks of a rank, "
    lead += "the fuller the more ranks' values they hold."
    body = f"<h1>{escape(title)}</h1><p class='lead'>{lead}</p>{_picture(program)}"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _picture(program: Program) -> str:
    drawn = []
    width, height = 60 + program.ranks * LANE, 50 + (program.length + 1) * ROW
    for rank in range(program.ranks):
        x = _lane(rank)
        drawn.append(f"<text x='{x}' y='14' text-anchor='middle'>rank {rank}</text>")
        drawn.append(f"<line x1='{x}' x2='{x}' y1='22' y2='{height - 20}' stroke='#dee2e6'/>")
    for index, state in enumerate(_states(program)):
        y = 26 + index * ROW
        drawn.append(f"<text x='0' y='{y + 9}'>{'start' if index == 0 else index}</text>")
        for rank, own in enumerate(state):
            drawn += _boxes(program, own, _lane(rank), y)
    for index, round_ in enumerate(program):
        drawn += _arrows(round_, 26 + index * ROW)
    marker = (
        "<defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
        "orient='auto-start-reverse'><path d='M0 0L8 4L0 8z' fill='context-stroke'/></marker></defs>"
    )
    return f"<svg viewBox='0 0 {width} {height}' style='max-width:{width}px'>{marker}{''.join(drawn)}</svg>"


def _lane(rank: int) -> int:
    return 76 + rank * LANE


def _boxes(program: Program, own: dict[int, float], x: int, y: int) -> list[str]:
    side = min(12.0, (LANE - 14) / program.chunks)
    left = x - side * program.chunks / 2
    found = []
    for chunk in range(program.chunks):
        opacity = own.get(chunk, 0.0) / program.ranks if _reducing(program) else float(chunk in own)
        colour = COLOURS[chunk % len(COLOURS)]
        found.append(
            f"<rect x='{left + chunk * side:.1f}' y='{y}' width='{side:.1f}' height='12' fill='{colour}' "
            f"fill-opacity='{opacity:.2f}' stroke='#adb5bd' stroke-width='.5'>"
            f"<title>chunk {chunk}: values of {int(own.get(chunk, 0))} ranks</title></rect>"
        )
    return found


def _reducing(program: Program) -> bool:
    return program.primitive in ("all_reduce", "reduce_scatter")


def _arrows(round_: Sequence[Transfer], y: int) -> list[str]:
    found = []
    for (source, target), group in groupby(sorted(round_), key=lambda t: (t.source, t.target)):
        items = list(group)
        colour = COLOURS[items[0].chunk % len(COLOURS)]
        text = f"{source} → {target}: chunk {_ranges([t.chunk for t in items])}"
        text += ", added" if items[0].reduce else ""
        found.append(
            f"<line x1='{_lane(source)}' y1='{y + 14}' x2='{_lane(target)}' y2='{y + ROW - 3}' stroke='{colour}' "
            f"stroke-width='{1.2 + 0.4 * min(len(items), 6):.1f}' marker-end='url(#tip)' "
            f"stroke-dasharray='{'none' if items[0].reduce else '5 3'}'><title>{text}</title></line>"
        )
    return found
