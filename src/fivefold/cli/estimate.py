"""What one layout costs: memory on each rank, bytes on each link, FLOPs and time, by arithmetic alone."""

import argparse
import json

from fivefold.cli.arguments import add_config_arguments, add_json_argument
from fivefold.config.load import load
from fivefold.ledger.total import estimate
from fivefold.planner.document import document, run_cost
from fivefold.planner.explain import explain, lines
from fivefold.planner.jobs import job_of
from fivefold.render.ledger import ledger_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--explain", metavar="LINE", help='where a line comes from, e.g. memory.optimizer; "list" names them'
    )
    parser.add_argument("--tokens", type=float, default=0.0, help="also say days and cost for so many tokens")


def run(arguments: argparse.Namespace) -> int:
    """0 = fits, 1 = does not."""
    ledger = estimate(job_of(load(arguments.config, arguments.overrides)))
    if arguments.explain:
        print("\n".join(lines(ledger)) if arguments.explain == "list" else explain(ledger, arguments.explain))
        return 0
    found = document(ledger)
    if arguments.tokens:
        found["run"] = run_cost(ledger, arguments.tokens)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(ledger_text(found))
        if arguments.tokens:
            cost = found["run"]
            print(
                f"\n{cost['days']:.2f} days, {cost['device_hours']:,.0f} device-hours, price {cost['price']:,.0f}"
            )
    return int(not ledger.fits)
