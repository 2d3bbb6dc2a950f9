"""Numbers for people: three significant digits and the unit, always written."""

from math import isfinite

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "K", "M", "G", "T", "P", "E")
_COUNT = ("", " K", " M", " B", " T")  # parameters and tokens: the field says 7 B, not 7 G


def bytes_text(count: float) -> str:
    """Bytes with a binary unit: 25.2 MiB, 1.20 GiB."""
    number, unit = _scaled(count, 1024, _BINARY)
    return f"{number} {unit}"


def flops_text(per_second: float) -> str:
    """FLOP/s with a decimal unit: 92.1 GFLOP/s, 989 TFLOP/s."""
    number, unit = _scaled(per_second, 1000, _DECIMAL)
    return f"{number} {unit}FLOP/s"


def count_text(count: float) -> str:
    """A number of parameters, tokens or samples: 940, 6.29 M, 1.24 B."""
    number, unit = _scaled(count, 1000, _COUNT)
    return f"{number}{unit}"


def rate_text(per_second: float, what: str) -> str:
    """A rate: 12.3 K tokens/s."""
    return f"{count_text(per_second)} {what}/s"


def seconds_text(seconds: float) -> str:
    """A short time: 38.0 µs, 12.3 ms, 1.25 s."""
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1e6, "µs"), (1e3, "ms")):
        if isfinite(seconds) and abs(seconds) * scale < 999.5:
            return f"{_three(seconds * scale)} {unit}"
    return f"{_three(seconds)} s"


def change_text(seconds: float) -> str:
    """A difference of short times, signed: +16.6 s, -380 ms."""
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def duration_text(seconds: float) -> str:
    """A long time in its two largest units: 42 s, 2 min 05 s, 1 h 03 min, 3 d 04 h."""
    if not isfinite(seconds):
        return "?"
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part:02d} {smaller}"
    return f"{whole} s"


def clock_text(seconds: float) -> str:
    """A long time where columns are few: 0:42, 2:05, 1:03:00, 3 d 04 h."""
    if not isfinite(seconds) or seconds >= 86400:
        return duration_text(seconds)
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def percent_text(fraction: float) -> str:
    """A fraction as a percentage: 41.2%."""
    return f"{fraction * 100:.1f}%"


def lr_text(rate: float) -> str:
    """A learning rate with three significant digits: 3.00e-4."""
    mantissa, _, exponent = f"{rate:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def loss_text(loss: float) -> str:
    """A loss or a gradient norm, in nats or plain: 4.213, 0.052, 1.2e+04."""
    return f"{loss:.3f}" if not isfinite(loss) or abs(loss) < 1000 else f"{loss:.1e}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> tuple[str, str]:
    """`value` in the largest unit that leaves at least 1 of it, after rounding."""
    if not isfinite(value):
        return str(value), units[0]
    index = 0
    while index < len(units) - 1 and float(_three(abs(value)).replace(",", "")) >= base:
        value, index = value / base, index + 1
    return (f"{value:,.0f}" if index == 0 and value == int(value) else _three(value)), units[index]


def _three(value: float) -> str:
    """Three significant digits without an exponent; all digits before the point are kept."""
    if not isfinite(value):
        return str(value)
    for below, digits in ((9.995, 2), (99.95, 1)):
        if abs(value) < below:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"
