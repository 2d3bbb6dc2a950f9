"""What one layout costs: memory on each rank, bytes on each link, FLOPs and time, by arithmetic alone."""

import argparse
import json
from pathlib import Path

import msgspec

from fivefold.cli.arguments import add_config_arguments, add_json_argument, new_file, number
from fivefold.config.huggingface import read_model
from fivefold.config.load import load
from fivefold.ledger.total import estimate
from fivefold.planner import importing
from fivefold.planner.compression import own_verdict
from fivefold.planner.document import course_of, document, layout_text, run_cost, title_of
from fivefold.planner.explain import explain, lines
from fivefold.planner.figures import gantt
from fivefold.planner.jobs import job_of
from fivefold.render.gantt import gantt_text
from fivefold.render.html import page
from fivefold.render.ledger import cost_text, ledger_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--explain", metavar="LINE", help='where a line comes from, e.g. memory.optimizer; "list" names them'
    )
    parser.add_argument("--from-hf", metavar="DIR", help="the model of a Hugging Face config.json")
    parser.add_argument("--from-accelerate", metavar="FILE", help="the layout of an accelerate config")
    parser.add_argument("--from-deepspeed", metavar="FILE", help="the layout of a DeepSpeed config")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write a page with pictures")
    parser.add_argument(
        "--tokens", type=number, default=0.0, help="also say days and cost for so many tokens"
    )


def run(arguments: argparse.Namespace) -> int:
    """0 = fits, 1 = does not."""
    overrides = list(arguments.overrides)
    if arguments.from_deepspeed:
        overrides = importing.deepspeed(Path(arguments.from_deepspeed)) + overrides
    if arguments.from_accelerate:
        overrides = importing.accelerate(Path(arguments.from_accelerate)) + overrides
    config = load(arguments.config, overrides)
    if arguments.from_hf:
        config = msgspec.structs.replace(config, model=read_model(arguments.from_hf))
    ledger = estimate(job_of(config))
    if arguments.explain:
        print("\n".join(lines(ledger)) if arguments.explain == "list" else explain(ledger, arguments.explain))
        return 0
    found = document(ledger)
    if arguments.tokens:
        found["run"] = run_cost(ledger, arguments.tokens, course_of(config, ledger.job))
    picture = gantt(ledger.job) if ledger.job.pp > 1 and (arguments.html or not arguments.json) else None
    if arguments.html:
        text = page(title_of(config), layout_text(ledger.job), found, picture, found.get("run"))
        arguments.html.write_text(text, encoding="utf-8")
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(ledger_text(found))
        if verdict := own_verdict(ledger.job):
            print("\n" + verdict)
        if picture:
            print("\n" + gantt_text(picture))
        if arguments.tokens:
            print("\n" + cost_text(found["run"]))
    return int(not ledger.fits)
