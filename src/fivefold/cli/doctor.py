"""Look this machine over: software, devices, network, limits, settings, and a real collective."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING

from fivefold.cli.arguments import add_debug_argument, add_json_argument
from fivefold.trainer.doctor.finding import Finding
from fivefold.trainer.doctor.host import check_host
from fivefold.trainer.doctor.network import check_network
from fivefold.trainer.doctor.settings import check_settings

if TYPE_CHECKING:
    from rich.console import Console

MARKS = {"good": ("✓", "green"), "fact": ("·", "dim"), "note": ("!", "yellow"), "problem": ("✗", "bold red")}
NAME_WIDTH = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 = nothing is wrong, 1 = something is."""
    if arguments.json:
        findings = list(_findings())
        wrong = any(finding.state == "problem" for finding in findings)
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"passed": not wrong, "findings": rows}, indent=1))
        return int(wrong)
    from rich.console import Console

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a mark that an old code page lacks is no reason to fail
    console = Console(highlight=False, markup=False, emoji=False)
    return int(_show(console, _findings()))


def _findings() -> Iterator[Finding]:
    yield from check_host(os.environ)
    yield from check_network(os.environ)
    yield from check_settings(os.environ)
    if find_spec("torch") is None:
        return
    try:
        from fivefold.trainer.doctor.engine import check_engine, check_loopback
    except (ImportError, OSError) as error:  # a library of torch's is missing, or does not fit this system
        mend = 'reinstall it: pip install --force-reinstall "fivefold[train]"'
        yield Finding("Compute", "torch", f"does not load: {error}", "problem", mend)
        return
    yield from check_engine()
    yield check_loopback()


def _show(console: "Console", findings: Iterator[Finding]) -> bool:
    """Prints each finding as it comes, for the last ones take seconds; returns whether something is wrong."""
    from rich.text import Text

    section, counts = "", dict.fromkeys(MARKS, 0)
    for finding in findings:
        counts[finding.state] += 1
        if finding.section != section:
            section = finding.section
            console.print(Text(f"\n{section}", style="bold"))
        mark, style = MARKS[finding.state]
        line = Text("  ").append(mark, style).append(f" {finding.name:<{NAME_WIDTH}} {finding.value}")
        console.print(line, soft_wrap=True)
        if finding.mend:
            console.print(Text(f"    → {finding.mend}", style=style), soft_wrap=True)
    problems, notes = counts["problem"], counts["note"]
    verdict = f"{problems} problem{'s' * (problems > 1)}" if problems else "Nothing is wrong"
    console.print(Text(f"\n{verdict}" + (f", {notes} note{'s' * (notes > 1)}" if notes else "") + "."))
    return problems > 0
