"""Write text with a trained model: `fivefold generate RUN --prompt "import "`."""

import argparse
from pathlib import Path

from fivefold.cli.arguments import add_debug_argument, add_json_argument, number, whole_number
from fivefold.cli.extras import load_torch
from fivefold.config.errors import BadInput
from fivefold.trainer.directory import check_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory, or one checkpoint in it")
    parser.add_argument("--prompt", default="", help="text to continue; empty = the start of a document")
    parser.add_argument(
        "--tokens", type=whole_number, default=200, help="tokens to write, at most (default 200)"
    )
    parser.add_argument(
        "--temperature", type=number, default=0.8, help="0 = always the likeliest token (default 0.8)"
    )
    parser.add_argument(
        "--top-k", type=whole_number, default=40, help="draw among this many tokens; 0 = all (default 40)"
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="another seed, another text (default 0)")
    add_json_argument(parser)
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Generates in this one process, whatever layout the run had."""
    path = Path(arguments.run)
    check_run(path)
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError:
        raise BadInput("--prompt: not UTF-8; give text, and set a UTF-8 locale if this is text") from None
    load_torch("fivefold.trainer.generate")
    from fivefold.trainer.generate import write_text

    text = write_text(
        path,
        arguments.prompt,
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    if arguments.json:
        import json

        print(json.dumps({"prompt": arguments.prompt, "text": text}))
    else:
        print(arguments.prompt + text)
    return 0
