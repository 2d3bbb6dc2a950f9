"""Predict what collectives cost on a cluster's links: ring against tree and the rest, from α and β."""

import argparse
import json
from typing import Any

from fivefold.cli.arguments import add_debug_argument, add_json_argument
from fivefold.cli.comm.sizes import read_sizes
from fivefold.ledger import hardware
from fivefold.ledger.network import algorithms, collective_seconds, wires
from fivefold.ledger.physics import Physics
from fivefold.render.tables import table
from fivefold.render.units import bytes_text, seconds_text

SIZES = "1K,64K,1M,16M,128M,1G"
PRIMITIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cluster", metavar="CLUSTER", help='e.g. "1x8 a100-40": nodes, devices a node, kind')
    parser.add_argument("--sizes", default=SIZES, help=f"bytes with K, M or G; default {SIZES}")
    parser.add_argument("--primitive", default="all_reduce", choices=PRIMITIVES, help="default all_reduce")
    add_json_argument(parser)
    add_debug_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    found = hardware.preset(arguments.cluster)
    on = wires(found, Physics(), "shm" if found.device.is_cpu else "nccl")
    local, domains = min(found.devices, found.fast_domain), max(1, found.devices // found.fast_domain)
    rows: list[dict[str, Any]] = []
    for size in read_sizes(arguments.sizes):
        if domains == 1:
            times = dict(algorithms(arguments.primitive, size, local, on)) if local > 1 else {"none": 0.0}
        else:
            times = {"hierarchical": collective_seconds(arguments.primitive, size, local, domains, on)}
        factor = (2 if arguments.primitive == "all_reduce" else 1) * (local * domains - 1) / (local * domains)
        for name, seconds in times.items():
            fastest = seconds == min(times.values())
            rate = size / seconds if seconds else 0.0
            rows.append(
                {
                    "bytes": size,
                    "algorithm": name,
                    "seconds": seconds,
                    "algbw": rate,
                    "busbw": rate * factor,
                    "fastest": fastest,
                }
            )
    if arguments.json:
        print(json.dumps({"primitive": arguments.primitive, "ranks": found.devices, "rows": rows}, indent=1))
        return 0
    cells = [
        [
            bytes_text(row["bytes"]),
            f"{row['algorithm']}{' *' if row['fastest'] else ''}",
            seconds_text(row["seconds"]),
            f"{row['busbw'] / 1e9:.1f} GB/s",
        ]
        for row in rows
    ]
    print(f"{arguments.primitive} over {found.devices} × {found.device.name}; * = fastest")
    print(table(("size", "algorithm", "time", "bus bandwidth"), cells, left=2))
    return 0
