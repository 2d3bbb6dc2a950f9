"""Hold predictions against published runs: step time and peak memory of every row, errors by source."""

import argparse
import json
from pathlib import Path

from fivefold.cli.arguments import add_debug_argument, add_json_argument
from fivefold.planner.validation import summary, validate
from fivefold.render.tables import table
from fivefold.render.units import percent_text

BARS = {"step_time": 0.10, "peak_memory": 0.08}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="?", metavar="RUNS.tsv", help="columns as the shipped file; default: the shipped rows"
    )
    add_json_argument(parser)
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 = the median of the per-source medians is within the bar for each quantity, 1 = not."""
    found = validate(Path(arguments.runs) if arguments.runs else None)
    totals = summary(found)
    if arguments.json:
        print(json.dumps({"rows": [check.document() for check in found], "summary": totals}, indent=1))
    else:
        for name, total in totals.items():
            _show(name, total)
    return int(any(total.get("median_of_source_medians", 0.0) > BARS[name] for name, total in totals.items()))


def _show(name: str, total: dict) -> None:  # type: ignore[type-arg]
    if not total["predicted"]:
        print(f"{name}: no rows")
        return
    rows = [
        [source[:70], str(item["rows"]), percent_text(item["median_error"]), percent_text(item["bias"])]
        for source, item in total["sources"].items()
    ]
    print(table(("source", "rows", "median |error|", "bias"), rows))
    print(
        f"{name}: {total['predicted']} of {total['rows']} rows; median of the sources' medians "
        f"{percent_text(total['median_of_source_medians'])} (bar {percent_text(BARS[name])}); "
        f"{percent_text(total['within_25_percent'])} of rows within 25%\n"
    )
