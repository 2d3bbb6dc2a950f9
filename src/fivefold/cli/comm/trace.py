"""Draw the steps of a collective algorithm: who sends which chunk to whom, and who has what afterwards."""

import argparse
import json

from fivefold.cli.arguments import add_debug_argument, add_json_argument, new_file, whole_number
from fivefold.config.errors import BadInput, did_you_mean
from fivefold.ledger.programs.catalogue import PRIMITIVES, PROGRAMS, Setting, program
from fivefold.render.program import program_page, program_text

MOST_RANKS = 64
MOST_PIECES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("algorithm", metavar="ALGORITHM", help=", ".join(_algorithms()))
    parser.add_argument("--primitive", choices=PRIMITIVES, help="default: the first that has the algorithm")
    parser.add_argument("--ranks", type=whole_number, default=4, help="default 4")
    parser.add_argument(
        "--per-host", type=whole_number, help="ranks a host, for hierarchical and two-hop; default half"
    )
    parser.add_argument(
        "--pieces", type=whole_number, default=2, help="of a double tree's pipeline; default 2"
    )
    parser.add_argument("--root", type=whole_number, default=0, help="of a broadcast; default 0")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with a picture")
    add_json_argument(parser)
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    ranks = arguments.ranks
    if not 1 <= ranks <= MOST_RANKS:
        raise BadInput(f"--ranks {ranks}: a drawing has 1 to {MOST_RANKS} ranks")
    if not 1 <= arguments.pieces <= MOST_PIECES:
        raise BadInput(f"--pieces {arguments.pieces}: a drawing has 1 to {MOST_PIECES} pieces")
    if arguments.root >= ranks:
        raise BadInput(f"--root {arguments.root}: the ranks are 0 to {ranks - 1}")
    local = arguments.per_host or max(1, ranks // 2)
    setting = Setting(ranks, local, arguments.pieces, arguments.root)
    drawn = program(_primitive(arguments), arguments.algorithm, setting)
    if arguments.html:
        arguments.html.write_text(program_page(drawn), encoding="utf-8")
    if arguments.json:
        rounds = [[transfer._asdict() for transfer in round_] for round_ in drawn]
        head = {"algorithm": drawn.name, "primitive": drawn.primitive, "ranks": ranks, "chunks": drawn.chunks}
        print(json.dumps(head | {"rounds": rounds}, indent=1))
    else:
        print(program_text(drawn))
    return 0


def _primitive(arguments: argparse.Namespace) -> str:
    having = [primitive for primitive, names in PROGRAMS.items() if arguments.algorithm in names]
    if not having:
        hint = did_you_mean(arguments.algorithm, _algorithms())
        raise BadInput(f'"{arguments.algorithm}": unknown algorithm; {hint}')
    return arguments.primitive or having[0]


def _algorithms() -> list[str]:
    return sorted({name for programs in PROGRAMS.values() for name in programs})
