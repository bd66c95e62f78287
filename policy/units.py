"""Text with units in, plain SI numbers out, and back.

Inside the code everything is bytes, seconds, tokens and FLOP. People write "55 GB/s" (1e9 bytes),
"200 Gb/s" (bits: 25 GB/s) or "1.5 GiB" (2**30 bytes); a bare number is refused, since nobody can tell
which of these it meant. Byte and bit differ by the case of one letter, so case is significant.
"""

from __future__ import annotations

import math
import re

from kvlane.policy.errors import InputError

# Commas between thousands only: "1,5" is one and a half to some and fifteen to others.
_NUMBER = (
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)\.?[0-9]*(?:[eE][+-]?[0-9]+)?"
    r"|\.[0-9]+(?:[eE][+-]?[0-9]+)?)"
)
_AMOUNT = r"([kKMGTP]?)(i?)(B|b|[Bb]ytes?|[Bb]its?)"
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PREFIX = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}

LONGEST_S = 1e6

_BYTES = re.compile(rf"\s*{_NUMBER}\s*{_AMOUNT}\s*")
_RATE = re.compile(rf"\s*{_NUMBER}\s*{_AMOUNT}\s*(?:/\s*|p)(s|ms|us|µs|ns)(?:ec)?\s*")
_TIME = re.compile(rf"\s*{_NUMBER}\s*(s|ms|us|µs|ns)\s*")
_FLOPS = re.compile(rf"\s*{_NUMBER}\s*([kKMGTP]?)(?:FLOP/s|FLOPS|FLOPs)\s*")


def _number(text: str, field: str, original: str) -> float:
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise InputError(field, f"{original!r} is not a number with a unit") from None
    if not math.isfinite(value):
        raise InputError(field, f"{original!r} is not finite", "a finite number with a unit")
    return value


def _scale(prefix: str, binary: str, unit: str) -> float:
    step = 1024.0 if binary else 1000.0
    is_bit = unit == "b" or unit[1:2] == "i"  # "b", "bit", "Bits"; else "B", "byte", "Bytes"
    return float(step ** _PREFIX[prefix]) / (8.0 if is_bit else 1.0)


def _match(pattern: re.Pattern[str], text: object, field: str, expected: str) -> re.Match[str]:
    if not isinstance(text, str):
        raise InputError(field, f"{text!r} has no unit", expected)
    found = pattern.fullmatch(text)
    if found is None or (len(found.groups()) >= 3 and found[3] and not found[2]):
        # The second test refuses "1 iB": a binary mark without a prefix.
        raise InputError(field, f"{text!r} is not a number with a known unit", expected)
    return found


def parse_rate(text: object, field: str = "rate") -> float:
    """Bytes per second from text such as "50 GB/s", "200 Gb/s", "1.5 GiB/s" or "1 MiB/ms".

    Raises `InputError` naming `field` for a missing or unknown unit, or a rate that is not above zero.
    """
    expected = 'a rate with its unit, such as "50 GB/s" or "200 Gb/s"'
    found = _match(_RATE, text, field, expected)
    rate = _number(found[1], field, found[0]) * _scale(found[2], found[3], found[4]) / _SECONDS[found[5]]
    if not 1 <= rate < math.inf:
        # A slower one would make times that no longer fit a float.
        raise InputError(field, f"{text!r} is not above zero and finite, 1 B/s being the slowest", expected)
    return rate


def parse_bytes(text: object, field: str = "size") -> float:
    """Bytes from text such as "80 GB", "64 KiB" or "512 B"; raises `InputError` naming `field`."""
    expected = 'a size with its unit, such as "80 GB" or "64 KiB"'
    found = _match(_BYTES, text, field, expected)
    size = _number(found[1], field, found[0]) * _scale(found[2], found[3], found[4])
    if size == math.inf:
        raise InputError(field, f"{text!r} is not finite", expected)
    return size


def parse_seconds(text: object, field: str = "time") -> float:
    """Seconds from text such as "3.3 us", "10 ms" or "1 s"; raises `InputError` naming `field`."""
    found = _match(_TIME, text, field, 'a time with its unit, such as "3.3 us"')
    seconds = _number(found[1], field, found[0]) * _SECONDS[found[2]]
    if seconds > LONGEST_S:
        raise InputError(field, f"{text!r} is longer than any cost can be", f"at most {LONGEST_S:g} s")
    return seconds


def parse_flops(text: object, field: str = "peak") -> float:
    """FLOP per second from text such as "989 TFLOP/s"; raises `InputError` naming `field`."""
    expected = 'a compute rate with its unit, such as "989 TFLOP/s"'
    found = _match(_FLOPS, text, field, expected)
    peak = _number(found[1], field, found[0]) * 1000.0 ** _PREFIX[found[2]]
    if not 0 < peak < math.inf:
        raise InputError(field, f"{text!r} is not above zero and finite", expected)
    return peak


def _three_digits(value: float) -> str:
    """Three significant digits without an exponent: "1.62", "51.4", "989", "2,199"."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """The value in the largest unit that leaves a digit before the point, after rounding."""
    for scale, unit in steps:
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)} {unit}"
    scale, unit = steps[-1]
    return f"{_three_digits(value / scale)} {unit}"


# A reason holds half a dozen of these. Of most `g` says in one step what `_scaled` would: away from where three digits
# round up to a fourth, which it shows as another number of decimals, or as an exponent.


def show_rate(bytes_per_s: float) -> str:
    """A rate as people read it, 1 GB = 1e9 bytes: "51.2 GB/s"."""
    if 1e9 <= bytes_per_s < 9.99e9 or 1e10 <= bytes_per_s < 9.99e11:
        return f"{bytes_per_s / 1e9:.3g} GB/s"
    return _scaled(bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")))


def show_bytes(count: float) -> str:
    """A size as people read it, 1 GB = 1e9 bytes: "1.62 GB"."""
    if 1e9 <= count < 9.99e9 or 1e10 <= count < 9.99e11:
        return f"{count / 1e9:.3g} GB"
    if 1e7 <= count < 9.99e8:
        return f"{count / 1e6:.3g} MB"
    return _scaled(count, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")))


def show_seconds(seconds: float) -> str:
    """A time as people read it: "92.0 ms", "1.25 s"."""
    if 0.009995 <= seconds < 0.99995:  # most of them
        return f"{seconds * 1e3:.1f} ms"
    if seconds == 0:
        return "0 ms"
    size = abs(seconds)
    if size >= 9.995:
        return f"{seconds:,.1f} s"
    if size >= 0.99995:
        return f"{seconds:.2f} s"
    if size >= 0.009995:
        return f"{seconds * 1e3:.1f} ms"
    if size >= 1e-4:
        return f"{seconds * 1e3:.2f} ms"
    return _scaled(seconds, ((1e-6, "us"), (1e-9, "ns")))
