"""Rows of the ledger: what one rank communicates in one optimizer step, by the design's conventions."""

from typing import NamedTuple

from fivefold.ledger.hardware import Measured
from fivefold.ledger.job import Job
from fivefold.ledger.network import Primitive, collective_seconds, wire_bytes


class Row(NamedTuple):
    """`times` collectives of bytes_per_rank / times bytes each; seconds in all, and those compute does
    not hide.

    bytes_per_rank as in the design's ledger conventions: all_reduce the tensor, all_gather the output,
    reduce_scatter and all_to_all the input, send the message; `times` times that. `measured` is what the seconds
    follow from, if the cluster file has it.
    """

    axis: str
    primitive: Primitive
    phase: str
    times: int
    bytes_per_rank: float
    wire_bytes: float
    seconds: float
    exposed_seconds: float
    link: str
    formula: str
    measured: Measured | None = None

    def exposing(self, seconds: float) -> "Row":
        """The row with `seconds` of it exposed."""
        return self._replace(exposed_seconds=min(self.seconds, max(0.0, seconds)))


def row(
    job: Job,
    axis: str,
    primitive: Primitive,
    phase: str,
    *,
    count: float,
    size: float,
    group: tuple[int, int],
    formula: str,
) -> Row:
    """`count` collectives of `size` bytes each over `group`; exposed until someone hides it."""
    local, domains = group
    on = job.wires
    once = collective_seconds(primitive, size, local, domains, on)
    return Row(
        axis,
        primitive,
        phase,
        round(count),
        count * size,
        count * wire_bytes(primitive, size, local * domains),
        count * once,
        count * once,
        "between nodes" if domains > 1 else "inside node",
        formula,
        on.found(primitive, local, domains) if on.measured else None,
    )
