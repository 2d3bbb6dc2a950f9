"""Where an estimate goes beyond what a calibrated cluster file was fitted on."""

from fivefold.ledger.total import Ledger
from fivefold.ledger.traffic import Row
from fivefold.render.units import bytes_text, seconds_text

PART = 0.01
"""Of the step: collectives that take less of it may be mispredicted by much, and the step is not."""


def beyond_fitted(ledger: Ledger) -> list[str]:
    """A line for every primitive and link of which some collectives that matter are smaller or larger than any size
    that `comm calibrate` fitted; the worst of them is named."""
    worst: dict[tuple[str, str], tuple[float, Row]] = {}
    for row in ledger.traffic:
        beyond = _beyond(row)
        key = row.primitive, row.link
        if row.seconds >= PART * ledger.time.step and beyond > worst.get(key, (1.0, row))[0]:
            worst[key] = beyond, row
    return [_line(row) for _, row in worst.values()]


def _size(row: Row) -> float:
    return row.bytes_per_rank / row.times if row.times else 0.0


def _beyond(row: Row) -> float:
    """By which factor the row's collectives, on average, lie outside the fitted sizes; at most 1 inside."""
    size = _size(row)
    if row.measured is None or not size:
        return 1.0
    return max(size / row.measured.largest, row.measured.smallest / size)


def _line(row: Row) -> str:
    fitted = row.measured
    assert fitted is not None
    return (
        f"{row.axis} {row.primitive} {row.link}: {bytes_text(_size(row))} each, and the cluster file was fitted from "
        f"{bytes_text(fitted.smallest)} to {bytes_text(fitted.largest)}; {seconds_text(row.seconds)} a step "
        f"are extrapolated"
    )
