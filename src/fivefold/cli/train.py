"""Train a model: `fivefold train CONFIG`, or go on with a run: `fivefold train RUN --resume`."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.arguments import add_config_arguments
from fivefold.cli.extras import load_torch, require_torch
from fivefold.config.errors import BadInput, RunFailed
from fivefold.config.load import load
from fivefold.config.tree import Config
from fivefold.render.account import account_text, is_equal
from fivefold.spec.legal import Resolved, check_trainable, resolve_config

if TYPE_CHECKING:
    from fivefold.trainer.place import Place

WORKER = ("fivefold.trainer.worker",)
"""What a rank imports first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument(
        "--account",
        action="store_true",
        help="take only the first steps, and print what they cost beside what was predicted; leaves no run behind",
    )


def run(arguments: argparse.Namespace) -> int:
    """Starts the local ranks the layout needs; under a launcher, is one rank.

    Returns:
        0 = the last step is done, 1 = a signal stopped the run before.

    Raises:
        RunFailed: with --account, a byte that crossed a link was not predicted.
    """
    if arguments.account and arguments.resume:
        raise BadInput("--account takes the first steps of a run and keeps nothing: leave out --resume")
    from fivefold.trainer.launch import as_rank
    from fivefold.trainer.place import place_from

    place = place_from(os.environ)
    with as_rank(place, debug=arguments.debug):
        return _run(arguments, place)


def _run(arguments: argparse.Namespace, place: "Place | None") -> int:
    config = load(arguments.config, arguments.overrides)
    resolved = resolve_config(config, place.world_size if place else 0)
    check_trainable(resolved)
    require_torch()
    from fivefold.trainer.compiler import check_compiler

    check_compiler(config.machine)
    if place is None:
        directory = _check_inputs(resolved.config, arguments.resume, arguments.account)
        if resolved.mesh.world_size > 1:
            return _start(arguments, resolved.mesh.world_size, directory)
    load_torch(*WORKER)
    if arguments.account:
        return _account(resolved, place)

    from fivefold.trainer.worker import run_worker

    done = run_worker(resolved, place, arguments.resume)
    return 0 if done or place else 1  # a rank that stopped as asked has not failed: its launcher tells


def _account(resolved: Resolved, place: "Place | None") -> int:
    from fivefold.proof.run_account import account_of
    from fivefold.trainer.worker import first_steps

    found = first_steps(resolved, place, account_of)
    if found is None:  # rank 0 tells
        return 0
    print(account_text(found))
    if not is_equal(found):
        raise RunFailed("--account: bytes of a step are not as predicted, see the lines marked NOT EQUAL")
    return 0


def _check_inputs(config: Config, resume: bool, account: bool) -> str:
    """Refuses what can be seen to be wrong before a process is started; returns the run directory, if there is to be
    one."""
    from fivefold.data.check import check_data
    from fivefold.data.tokenizer import load_tokenizer
    from fivefold.observe.sinks import check_sinks
    from fivefold.trainer.directory import CHECKPOINTS, choose_directory
    from fivefold.trainer.identity import check_resume

    check_data(config.data)
    if config.data.tokenizer:
        load_tokenizer(Path(config.data.tokenizer).expanduser(), config.model.vocab)
    check_sinks(config.log.sinks)
    directory = config.run.dir if account else str(choose_directory(config.run, resume))
    if resume:
        check_resume(config, Path(directory) / CHECKPOINTS, lambda: _samples_digest(config))
    if config.model.path and not resume:
        _check_weights(config)
    return directory


def _samples_digest(config: Config) -> str | None:
    load_torch(*WORKER)
    from fivefold.data.mixture import prepared_digest

    return prepared_digest(config.data, config.model.vocab, config.batch.sequence_length, config.run.seed)


def _check_weights(config: Config) -> None:
    from fivefold.nn.hub.weights import given_weights

    if given_weights(config.model) and not config.data.tokenizer:
        raise BadInput(
            f"model.path = {config.model.path}: no tokenizer.json there, and weights mean nothing without "
            "theirs; give data.tokenizer"
        )


def _start(arguments: argparse.Namespace, ranks: int, directory: str) -> int:
    from fivefold.trainer.launch import start_local

    words = ["-m", "fivefold", "train", arguments.config]
    for override in [*arguments.overrides, f"run.dir={directory}"]:
        words += ["--set", override]
    for name in ("resume", "account", "debug"):
        words += [f"--{name}"] * getattr(arguments, name)
    sys.stdout.flush()
    if arguments.account:
        return start_local(words, ranks, imports=WORKER, saves=False)
    return start_local(words, ranks, Path(directory) / "failure.txt", imports=WORKER)
