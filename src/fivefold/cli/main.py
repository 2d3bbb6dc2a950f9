"""The `fivefold` command: finds the module of a command, turns errors into one line and an exit code."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, Protocol, cast

from fivefold.config.errors import BadInput, RunFailed, did_you_mean, shortened

COMMANDS = (
    "estimate",
    "plan",
    "batch",
    "comm",
    "validate",
    "train",
    "verify",
    "generate",
    "convert",
    "config",
    "doctor",
)


class Command(Protocol):
    """What a command's module provides; the first line of its docstring is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{self.prog.removeprefix('fivefold ')}: {message}; try {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 = done, 1 = ran and the answer is no, 2 = bad input, told in one line on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _fill_standard_streams()
    try:
        return _dispatch(words)
    except BadInput as error:
        if "--debug" in words:
            raise
        _say(str(error))
        return 2
    except RunFailed as error:
        if "--debug" in words:
            raise
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("stopped by SIGINT")
        return 1
    except BrokenPipeError:
        return 1


def _fill_standard_streams() -> None:
    """Opens /dev/null as the standard streams that are closed: the next file to be opened would become what libraries,
    and the processes started here, print into."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, as these are
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, encoding="utf-8", closefd=False))


def _say(problem: str) -> None:
    print(f"fivefold: {_one_line(problem)}", file=sys.stderr)


def _one_line(text: str) -> str:
    """`text` with what would break the line, or the output, such as a line end in a path, written as escapes."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda found: repr(found[0])[1:-1], text)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"fivefold {version('fivefold')}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        raise BadInput(f'"{shortened(name)}": unknown command; {did_you_mean(name, COMMANDS)}')
    command = _module(name)
    parser = Parser(
        prog=f"fivefold {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(words[1:]))


def _module(name: str) -> Command:
    return cast(Command, import_module(f"fivefold.cli.{name}"))


def _overview() -> str:
    lines = [
        "Plan, prove and run distributed training of language models.",
        "",
        "usage: fivefold COMMAND …",
        "",
    ]
    for name in COMMANDS:
        summary = (_module(name).__doc__ or "").strip().splitlines()[0]
        lines.append(f"  {name:<10} {summary}")
    lines += ["", "fivefold COMMAND --help explains one; fivefold config explain KEY explains a config key."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
