"""Convert a run to a Hugging Face model directory, or back: `fivefold convert IN OUT`."""

import argparse
from pathlib import Path

from fivefold.cli.arguments import add_debug_argument
from fivefold.cli.extras import load_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="IN",
        help="a run directory, one checkpoint in it, or a Hugging Face model directory",
    )
    parser.add_argument("target", metavar="OUT", help="the directory to make")
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Converts in this one process, whatever layout the run had."""
    load_torch("fivefold.trainer.convert")
    from fivefold.trainer.convert import convert

    print(f"{arguments.target}: {convert(Path(arguments.source), Path(arguments.target))}")
    return 0
