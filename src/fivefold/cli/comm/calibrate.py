"""Measure this cluster's links and write a cluster file that `estimate` and `plan` read (cluster.path).

Starts local ranks, or is one under torchrun, srun or mpirun; every rank of a host should take part. Each collective
of every backend that parallel.backend can name here is fitted inside a host, between hosts and over all ranks; the
error is that on sizes the fit has not seen.
"""

import argparse
import json
import os
from statistics import median

import msgspec
import tomli_w

from fivefold.cli.arguments import add_debug_argument, add_json_argument, new_file, whole_number
from fivefold.cli.comm.bench import add_ranks_argument, check_room, progress, start, sys_words
from fivefold.cli.comm.sizes import read_sizes
from fivefold.cli.extras import require_torch
from fivefold.config.errors import BadInput
from fivefold.ledger.hardware import kind
from fivefold.render.comm import calibration_text

SIZES = "1K:16M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_ranks_argument(parser)
    parser.add_argument(
        "--output", type=new_file, metavar="FILE", required=True, help="the cluster file to write"
    )
    parser.add_argument(
        "--kind", default="cpu", help="the preset whose device the file takes over; default cpu"
    )
    parser.add_argument("--sizes", default=SIZES, help=f"smallest:largest bytes fitted; default {SIZES}")
    parser.add_argument("--per-host", type=whole_number, default=0, help="take so many ranks for a host")
    add_json_argument(parser)
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    require_torch()
    from fivefold.trainer.launch import as_rank
    from fivefold.trainer.place import place_from

    place = place_from(os.environ)
    with as_rank(place, debug=arguments.debug):
        from fivefold.collectives.calibrate import Sizes

        sizes, hardware, output = read_sizes(arguments.sizes), kind(arguments.kind), arguments.output
        fitted = Sizes.between(sizes[0], sizes[-1])
        if len(fitted.fitted) < 3:
            raise BadInput(
                f"--sizes {arguments.sizes}: a fit needs three sizes at least, fourfold from the first to the last, "
                f"e.g. {SIZES}"
            )
        check_room(sizes, arguments.ranks, place, 7)  # as many as bench has of one algorithm
        if place is None:
            return start(arguments.ranks, sys_words(arguments))
        from fivefold.trainer import machine
        from fivefold.trainer.comm import as_rows, calibrated_hardware, calibration, join

        backends = machine.backends(machine.device(place.local_rank))
        with join(place, backends, arguments.per_host) as joined:
            found = calibration(joined, fitted, progress(place.rank))
        if place.rank > 0:
            return 0
        made = calibrated_hardware(joined, hardware, found)
        output.write_text(_text(msgspec.to_builtins(made)), encoding="utf-8")
        rows = as_rows(found)
        error = median(row["error"] for row in rows)
        if arguments.json:
            print(json.dumps({"output": str(output), "median_error": error, "rows": rows}, indent=1))
        else:
            print(calibration_text(rows))
            print(
                f"median error on sizes not fitted: {error * 100:.1f}%\n"
                f"wrote {output}: give it to estimate and plan as cluster.path"
            )
    return 0


def _text(table: dict[str, object]) -> str:
    return "# Written by `fivefold comm calibrate`.\n" + tomli_w.dumps(table)
