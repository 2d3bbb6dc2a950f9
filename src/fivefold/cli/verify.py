"""Prove that a layout computes what one process computes, and moves the bytes that were predicted."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.cli.arguments import add_config_arguments, add_json_argument, new_file, whole_number
from fivefold.cli.extras import load_torch
from fivefold.config.errors import BadInput
from fivefold.config.load import load
from fivefold.config.tree import Config
from fivefold.render.verdict import case_lines, case_title, summary_line
from fivefold.spec.legal import check_trainable, resolve_config

DEFAULT_RANKS = 4
MOST_RANKS = 64
DTYPES = ("float64", "float32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--layouts",
        metavar="all|pairs|FILE",
        help="verify other layouts than the config's: every legal one of --ranks ranks, a few that show every pair of "
        "choices, or those of a JSON list of [parallel] tables",
    )
    parser.add_argument(
        "--ranks",
        type=whole_number,
        default=0,
        help=f"ranks of the layouts (default {DEFAULT_RANKS}), started on this host",
    )
    parser.add_argument(
        "--dtypes",
        type=_dtypes,
        metavar="DTYPE,…",
        help="compute in these: float64, float32, bf16, fp16; by default float64, and of one layout the config's too",
    )
    parser.add_argument(
        "--save",
        type=new_file,
        metavar="FILE",
        help="keep each verdict there as a line of JSON, and run none again that it holds",
    )


def run(arguments: argparse.Namespace) -> int:
    """0 = every layout holds, 1 = one does not."""
    config = load(arguments.config, arguments.overrides)
    layouts, ranks = _layouts(arguments, config)
    known = _known(arguments.save)
    load_torch("fivefold.proof.verify")
    from fivefold.proof.verify import Verifier
    from fivefold.trainer.compiler import check_compiler

    check_compiler(config.machine)

    documents: list[dict[str, Any]] = []
    started = time.monotonic()
    with Verifier(ranks) as verifier:
        for number, laid_out in enumerate(layouts, start=1):
            dtypes = arguments.dtypes or _usual_dtypes(laid_out, len(layouts) > 1)
            key = _key(laid_out, dtypes)
            documents.append(found := known.get(key) or verifier.case(laid_out, dtypes).document())
            if arguments.save and key not in known:
                with arguments.save.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found | {"key": key}) + "\n")
            if not arguments.json:
                _tell(found, number, len(layouts))
    passed = all(found["passed"] for found in documents)
    if arguments.json:
        print(json.dumps({"passed": passed, "cases": documents}, indent=1))
    else:
        print(summary_line(documents, time.monotonic() - started))
    return 0 if passed else 1


def _layouts(arguments: argparse.Namespace, config: Config) -> tuple[list[Config], int]:
    """The configs to verify, and the most ranks one of them takes."""
    from msgspec.structs import replace

    from fivefold.proof.layouts import covering, every_layout

    if arguments.layouts is None:
        laid_out = _on_ranks(config, arguments.ranks)
        return [laid_out], laid_out.run.ranks
    ranks = arguments.ranks or DEFAULT_RANKS
    if arguments.layouts not in ("all", "pairs"):
        found = []
        for number, parallel in enumerate(_read(Path(arguments.layouts))):
            try:
                found.append(_on_ranks(replace(config, parallel=parallel), arguments.ranks))
            except BadInput as error:
                raise BadInput(f"--layouts {arguments.layouts}[{number}]: {error}") from None
        return found, max(laid_out.run.ranks for laid_out in found)
    _check_has_reference(config)
    if ranks > MOST_RANKS:
        raise BadInput(f"--ranks {ranks}: all start on this host; expected at most {MOST_RANKS}")
    every = every_layout(config, ranks)
    if not every:
        raise BadInput(f"--ranks {ranks}: the model allows no layout of so many ranks; try 2, 4 or 8")
    return every if arguments.layouts == "all" else covering(every), ranks


def _on_ranks(config: Config, ranks: int) -> Config:
    """`config` on so many ranks; 0 = as many as it says, or needs."""
    from msgspec.structs import replace

    resolved = resolve_config(config, ranks)
    check_trainable(resolved)
    _check_has_reference(config)
    world_size = resolved.mesh.world_size
    if world_size > MOST_RANKS:
        raise BadInput(
            f"the layout takes {world_size} ranks; verify starts at most {MOST_RANKS} on this host"
        )
    return replace(config, run=replace(config.run, ranks=world_size))


def _check_has_reference(config: Config) -> None:
    """Refuses what one process would not compute alike, however right the layout is."""
    if config.parallel.compression != "none":
        raise BadInput(
            f"parallel.compression = {config.parallel.compression}: what it sums is approximate by design; verify the "
            "layout with compression = none"
        )


def _read(path: Path) -> list[Any]:
    """A JSON list of [parallel] tables."""
    import msgspec

    from fivefold.config.tree import Parallel

    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Parallel])
    except OSError as error:
        raise BadInput(f"--layouts {path}: {error.strerror}; expected all, pairs or a file") from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"--layouts {path}: {error}; expected a JSON list of [parallel] tables") from None
    if not found:
        raise BadInput(f"--layouts {path}: an empty list; expected at least one [parallel] table")
    return found


def _known(path: Path | None) -> dict[str, dict[str, Any]]:
    """Verdicts of an earlier sweep; a last line cut short by its end is dropped."""
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError):
        raise BadInput(f"--save {path}: not a readable text file; name another") from None
    found = {}
    for line in text.splitlines():
        try:
            verdict = json.loads(line)
            found[verdict.pop("key")] = verdict
        except (ValueError, KeyError, AttributeError):
            continue
    return found


def _dtypes(text: str) -> tuple[str, ...]:
    """The type of --dtypes; float64 before what its errors explain."""
    given = text.split(",")
    if unknown := [dtype for dtype in given if dtype not in DTYPES]:
        raise argparse.ArgumentTypeError(f'"{unknown[0]}": expected some of {", ".join(DTYPES)}')
    return tuple(dtype for dtype in DTYPES if dtype in given)


def _usual_dtypes(config: Config, is_sweep: bool) -> tuple[str, ...]:
    dtypes = dict.fromkeys(("float64", config.precision.dtype))
    return ("float64",) if is_sweep else tuple(dtypes)


def _key(config: Config, dtypes: Sequence[str]) -> str:
    """What a verdict depends on."""
    import msgspec

    parts = (config.model, config.parallel, config.batch, config.precision, config.optimizer, config.schedule)
    more = (
        config.data.document_mask,
        config.run.seed,
        dtypes,
        *(["compiled"] if config.machine.compile else []),
    )
    return msgspec.json.encode((*parts, *more)).decode()


def _tell(found: dict[str, Any], number: int, count: int) -> None:
    """Every verdict where there are few; of a sweep the failures, and how far it is."""
    if count == 1 or not found["passed"]:
        print("\n".join(case_lines(found)))
    if count > 1 and sys.stderr.isatty():
        print(f"\r{number}/{count} {case_title(found):<70.70}", end="", file=sys.stderr, flush=True)
        if number == count:
            print(file=sys.stderr)
