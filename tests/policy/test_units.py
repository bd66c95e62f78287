"""Text with units: what it means, what comes back out, and what is refused because nobody could tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import InputError
from kvlane.policy.units import (
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
    show_bytes,
    show_rate,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("55 GB/s", 55e9),
        ("55GB/s", 55e9),
        ("  55 GB/s ", 55e9),
        (".5 TB/s", 0.5e12),
        ("5e1 GB/s", 50e9),
        ("1,250 MB/s", 1.25e9),
        ("12 B/s", 12.0),
        ("3 kB/s", 3e3),
        ("1 GB/ms", 1e12),
        ("25 GBps", 25e9),
        ("1.5 GiB/s", 1.5 * 2**30),
        ("1 MiB/ms", 2**20 * 1e3),
        ("1 KiB/us", 2**10 * 1e6),
        # Eight bits a byte, however it is spelled.
        ("200 Gb/s", 25e9),
        ("200 Gbit/s", 25e9),
        ("200 Gbps", 25e9),
        ("8 Mib/s", 2**20),
    ],
)
def test_rates_are_read_as_bytes_per_second(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == pytest.approx(bytes_per_s, rel=1e-12)


def test_a_spelled_out_bit_is_a_bit_and_a_spelled_out_byte_a_byte_whatever_its_case() -> None:
    # "GBit/s" and "Gbyte/s" are both in use; reading the case of the B instead of the word is off by 8.
    for text, right in (("200 GBit/s", 25e9), ("25 Gbyte/s", 25e9), ("25 Gbytes/s", 25e9)):
        try:
            rate = parse_rate(text)
        except InputError:
            continue
        assert rate == pytest.approx(right), text


@pytest.mark.parametrize(
    ("text", "count"),
    [("80 GB", 80e9), ("64 KiB", 65536), ("1.5 GiB", 1.5 * 2**30), ("512 B", 512), ("8 Mb", 1e6)],
)
def test_sizes_are_read_as_bytes(text: str, count: float) -> None:
    assert parse_bytes(text) == pytest.approx(count, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "seconds"), [("3.43 us", 3.43e-6), ("3.43 µs", 3.43e-6), ("10 ms", 0.01), ("2 s", 2), ("0 s", 0)]
)
def test_times_are_read_as_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["989 TFLOP/s", "989 TFLOPS", "989 TFLOPs", "0.989 PFLOP/s"])
def test_compute_rates_are_read_as_flop_per_second(text: str) -> None:
    assert parse_flops(text) == pytest.approx(989e12, rel=1e-12)


GOOD: list[tuple[Callable[..., float], str, str]] = [
    (parse_rate, "5", "GB/s"),
    (parse_bytes, "5", "GB"),
    (parse_seconds, "5", "ms"),
    (parse_flops, "5", "TFLOP/s"),
]
NOT_AMOUNTS = ["-5", "nan", "inf", "-inf", "1e999", "", "five", "5 5", "0x10", "5.5.5", "५"]


@pytest.mark.parametrize(("parse", "number", "unit"), GOOD)
@pytest.mark.parametrize("amount", NOT_AMOUNTS)
def test_what_is_not_a_plain_finite_amount_is_refused(
    parse: Callable[..., float], number: str, unit: str, amount: str
) -> None:
    assert parse(f"{number} {unit}", "device.thing") > 0
    with pytest.raises(InputError) as caught:
        parse(f"{amount} {unit}", "device.thing")
    assert caught.value.field == "device.thing"
    assert str(caught.value).startswith("device.thing: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("parse", "number", "unit"), GOOD)
@pytest.mark.parametrize(
    "text", ["", "   ", "5", "5 parsecs", "GB/s", "5 GW", 5, 5.0, None, True, ["5 GB/s"]]
)
def test_an_amount_without_its_unit_is_refused(
    parse: Callable[..., float], number: str, unit: str, text: object
) -> None:
    with pytest.raises(InputError, match="unit") as caught:
        parse(text, "device.thing")
    assert caught.value.field == "device.thing"
    assert unit.split("/")[0][-1].lower() in caught.value.expected.lower()


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_rate, "5 GB"),
        (parse_rate, "5 ms"),
        (parse_rate, "5 gb/s"),
        (parse_rate, "5 GB/h"),
        (parse_rate, "1 iB/s"),
        (parse_rate, "989 TFLOP/s"),
        (parse_bytes, "5 GB/s"),
        (parse_bytes, "1 iB"),
        (parse_bytes, "5 m"),
        (parse_seconds, "5 min"),
        (parse_seconds, "5 GB"),
        (parse_flops, "5 GB/s"),
        (parse_flops, "989 TFLOP"),
    ],
)
def test_the_unit_of_another_quantity_is_refused(parse: Callable[..., float], text: str) -> None:
    with pytest.raises(InputError, match="unit"):
        parse(text)


@pytest.mark.parametrize("parse_and_unit", [(parse_rate, "GB/s"), (parse_flops, "TFLOP/s")])
@pytest.mark.parametrize("amount", ["0", "0.0", "1e-400", "1e308"])
def test_a_rate_is_above_zero_and_finite_also_once_scaled(
    parse_and_unit: tuple[Callable[..., float], str], amount: str
) -> None:
    parse, unit = parse_and_unit
    with pytest.raises(InputError, match="above zero and finite"):
        parse(f"{amount} {unit}")


def test_a_size_is_finite_also_once_scaled() -> None:
    with pytest.raises(InputError):
        parse_bytes("1e308 GB")


def test_a_decimal_comma_is_not_taken_for_thousands() -> None:
    # In much of the world "1,5" is one and a half; ten times that is the worst reading of it.
    try:
        rate = parse_rate("1,5 GB/s")
    except InputError:
        return
    assert rate == pytest.approx(1.5e9)


# What a machine can have: from a byte a second to far beyond any link, from a nanosecond to a month.
# The last number is how far rounding for the eye may go.
SHOWN: list[tuple[Callable[[float], str], Callable[[str], float], int, int, float]] = [
    (show_rate, parse_rate, 0, 15, 0.0051),
    (show_bytes, parse_bytes, 0, 15, 0.0051),
    (show_seconds, parse_seconds, -9, 6, 0.051),
]


@pytest.mark.parametrize(("show", "parse", "low", "high", "rounding"), SHOWN)
@given(data=st.data())
def test_what_is_shown_reads_back(
    show: Callable[[float], str],
    parse: Callable[[str], float],
    low: int,
    high: int,
    rounding: float,
    data: st.DataObject,
) -> None:
    value = 10 ** data.draw(st.floats(low, high))
    assert parse(show(value)) == pytest.approx(value, rel=rounding)


@pytest.mark.parametrize(("show", "low", "high"), [(show, low, high) for show, _, low, high, _ in SHOWN])
@given(data=st.data())
def test_nobody_is_shown_an_exponent(
    show: Callable[[float], str], low: int, high: int, data: st.DataObject
) -> None:
    # Just under a power of ten is where rounding to three digits turns 999.7 into 1e+03.
    value = 10.0 ** data.draw(st.integers(low, high)) * data.draw(st.floats(0.99, 1.01))
    assert "e" not in show(value)


def test_zero_is_shown_plainly() -> None:
    assert (show_bytes(0), show_rate(0), show_seconds(0)) == ("0 B", "0 B/s", "0 ms")


def test_the_published_unit_mix_ups(shared: Path) -> None:
    known = {case["id"]: case for case in json.loads((shared / "known_answers.json").read_text())["units"]}
    gib = known["gib_is_not_gb"]
    rate = gib["bytes"] / gib["seconds"]
    assert parse_rate(f"{gib['gib_per_s']} GiB/s") == pytest.approx(rate, rel=1e-4)
    assert parse_rate(f"{gib['gb_per_s']} GB/s") == pytest.approx(rate, rel=1e-4)
    assert show_rate(rate) == f"{gib['gb_per_s']:.3g} GB/s"
    assert parse_rate(known["bits"]["text"]) == known["bits"]["bytes_per_s"]
    assert parse_rate(known["mib_per_ms"]["text"]) == known["mib_per_ms"]["gb_per_s"] * 1e9


def slowly(value: float, units: tuple[str, ...]) -> str:
    """Three significant digits in the largest unit that leaves one before the point, step by step."""
    for number, unit in enumerate(units):
        scale = 10.0 ** (9 - 3 * number)
        if value >= 0.9995 * scale or unit == units[-1]:
            break
    value /= scale
    if value >= 99.95:
        return f"{value:,.0f} {unit}"
    text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return f"{text.rstrip('0').rstrip('.')} {unit}"


# Around where the number of decimals changes, where a unit does, and where halves are rounded.
edges = st.builds(
    lambda number, places, exponent, step: (number / 10**places) * 10.0**exponent * (1 + step * 2.0**-52),
    st.sampled_from((1, 999, 9985, 9990, 9994, 9995, 9996, 99949, 99950, 99951, 999500, 100500, 12345)),
    st.integers(0, 4),
    st.integers(-2, 12),
    st.integers(-2, 2),
)


@given(value=edges | st.floats(1e-3, 1e15))
def test_quickly_shown_is_what_is_shown_step_by_step(value: float) -> None:
    assert show_bytes(value) == slowly(value, ("GB", "MB", "kB", "B"))
    assert show_rate(value) == slowly(value, ("GB/s", "MB/s", "kB/s", "B/s"))
