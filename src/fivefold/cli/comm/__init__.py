"""Collectives: measure them here, see their steps, calibrate a cluster file, or predict their cost."""

import argparse
from typing import cast

from fivefold.cli.comm import bench, calibrate, cost, trace

ACTIONS = {"bench": bench, "trace": trace, "calibrate": calibrate, "cost": cost}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="|".join(ACTIONS))
    for name, module in ACTIONS.items():
        summary = (module.__doc__ or "").strip()
        formatter = argparse.RawDescriptionHelpFormatter
        child = actions.add_parser(
            name, help=summary.splitlines()[0], description=summary, formatter_class=formatter
        )
        module.add_arguments(child)


def run(arguments: argparse.Namespace) -> int:
    return cast(int, ACTIONS[arguments.action].run(arguments))
