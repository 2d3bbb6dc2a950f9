"""Arguments that commands share."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser, what: str = "CONFIG") -> None:
    """CONFIG, --set and --debug."""
    parser.add_argument(
        "config", metavar=what, help="a TOML file, a run directory, or the name of a run preset"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="override one key; may be given any number of times",
    )
    add_debug_argument(parser)


def add_debug_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
