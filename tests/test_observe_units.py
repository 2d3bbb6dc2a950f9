"""Numbers for people."""

import math

import pytest

from fivefold.render.units import (
    bytes_text,
    clock_text,
    count_text,
    duration_text,
    flops_text,
    loss_text,
    lr_text,
    percent_text,
    rate_text,
    seconds_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1012 * 1024, "1,012 KiB"),
        (1023.9 * 1024, "1.00 MiB"),  # never "1,024 KiB"
        (26_214_400, "25.0 MiB"),
        (1_288_490_188, "1.20 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**60, "3,072 PiB"),  # beyond the last unit
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (92.13e9, "92.1 GFLOP/s"),
        (989e12, "989 TFLOP/s"),
        (9.999e12, "10.0 TFLOP/s"),
        (999.9e9, "1.00 TFLOP/s"),
        (1.2e15, "1.20 PFLOP/s"),
    ],
)
def test_flops(rate: float, text: str) -> None:
    assert flops_text(rate) == text


def test_counts_and_rates() -> None:
    assert [count_text(n) for n in (0, 940, 999_600, 6_290_000, 1.24e9)] == [
        "0",
        "940",
        "1.00 M",
        "6.29 M",
        "1.24 B",
    ]
    assert rate_text(12_345.6, "tokens") == "12.3 K tokens/s"
    assert rate_text(940.4, "tokens") == "940 tokens/s"


def test_short_times() -> None:
    assert [seconds_text(s) for s in (0, 38e-6, 999.7e-6, 0.0123, 0.9999, 1.25, 90)] == [
        "0 s",
        "38.0 µs",
        "1.00 ms",
        "12.3 ms",
        "1.00 s",
        "1.25 s",
        "90.0 s",
    ]


def test_long_times() -> None:
    assert [duration_text(s) for s in (0.4, 59.6, 125, 3599.7, 3780, 3 * 86400 + 4 * 3600)] == [
        "0 s",
        "1 min 00 s",
        "2 min 05 s",
        "1 h 00 min",
        "1 h 03 min",
        "3 d 04 h",
    ]
    assert [clock_text(s) for s in (42, 125, 3780, 90000)] == ["0:42", "2:05", "1:03:00", "1 d 01 h"]
    assert duration_text(math.inf) == clock_text(math.nan) == "?"


def test_training_numbers() -> None:
    assert (lr_text(3e-4), lr_text(2.12132e-4), lr_text(0.0)) == ("3.00e-4", "2.12e-4", "0.00e0")
    assert (loss_text(4.21336), loss_text(12_345.0), loss_text(math.nan)) == ("4.213", "1.2e+04", "nan")
    assert percent_text(0.412) == "41.2%"


def test_non_finite_numbers_are_shown_as_they_are() -> None:
    assert (bytes_text(math.nan), flops_text(math.inf), count_text(math.inf)) == (
        "nan B",
        "inf FLOP/s",
        "inf",
    )
