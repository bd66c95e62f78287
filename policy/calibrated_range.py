"""Where a calibration was measured, and the words for a prediction made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlane.policy.units import show_bytes

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class CalibratedRange:
    """The least and the most measured: tokens of passes, and per link bytes of transfers and of single copies.

    None, or a link that is missing, was not measured at all: then its parameters are a profile's, and there is no
    range to leave.
    """

    new_tokens: Range | None = None
    resident_tokens: Range | None = None
    link_bytes: Mapping[str, Range] = field(default_factory=dict)
    link_copy_bytes: Mapping[str, Range] = field(default_factory=dict)

    def of_pass(self, resident: int, new: int, chunk: int | None = None) -> list[str]:
        """What is outside when `new` tokens are computed after `resident`, at most `chunk` a pass."""
        largest = new if chunk is None else min(chunk, new)
        notes = [_outside(largest, self.new_tokens, "new tokens in a pass")]
        # Whether anything is resident is a kind of pass, not a length: a first pass has none to measure.
        furthest = resident + (new - 1) // largest * largest
        if furthest > 0:
            notes.append(_outside(furthest, self.resident_tokens, "tokens before a pass"))
        return [note for note in notes if note]

    def of_load(self, link: str, count: float, copy_bytes: float) -> list[str]:
        """What is outside when so many bytes come over a link in copies of that size."""
        notes = [
            _outside(count, self.link_bytes.get(link), "to load", in_bytes=True),
            _outside(copy_bytes, self.link_copy_bytes.get(link), "a copy", in_bytes=True),
        ]
        return [f"{link}: {note}" for note in notes if note]

    def of_prefix(
        self, prefix: int | None, link: str | None, start: int, suffix: int, bytes_per_token: float
    ) -> str | None:
        """Whether a predicted prefix length, the crossover, lies among the lengths measured.

        Args:
            prefix: tokens, None where none was found.
            link: it would be loaded over, None for one that is not calibrated.
            start: resident tokens, neither loaded nor computed.
            suffix: tokens after the prefix.
            bytes_per_token: KV loaded for each.
        """
        lows, highs = [], []
        if self.new_tokens is not None:
            lows.append(self.new_tokens[0] - suffix + start)
            highs.append(self.new_tokens[1] - suffix + start)
        measured = None if link is None else self.link_bytes.get(link)
        if measured is not None and bytes_per_token > 0:
            lows.append(measured[0] / bytes_per_token + start)
            highs.append(measured[1] / bytes_per_token + start)
        if not lows:
            return None
        low, high = max(start + 1, round(max(lows))), round(min(highs))
        if low > high:
            return "no prefix length was calibrated both computed and loaded"
        span = f"the calibrated range of {low:,} to {high:,} tokens"
        if prefix is None:
            return f"outside {span} this is extrapolated"
        if low <= prefix <= high:
            return None
        return f"{'below' if prefix < low else 'above'} {span}: extrapolated"


def _outside(value: float, span: Range | None, what: str, *, in_bytes: bool = False) -> str | None:
    # Rounding to whole load units must not take a prediction at the very edge out of the range.
    if span is None or span[0] * (1 - 1e-9) <= value <= span[1] * (1 + 1e-9):
        return None
    low, high, this = (
        show_bytes(number) if in_bytes else f"{number:,.0f}" for number in (span[0], span[1], value)
    )
    side = "below" if value < span[0] else "above"
    return f"{this} {what} is {side} the calibrated range of {low} to {high}"
