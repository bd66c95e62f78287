"""What comes in: samples that may be used, the limits that refuse others, and the window that is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from kvlane.policy.calibration_cost import PrefillSample, TransferSample, is_duration
from kvlane.policy.errors import InputError
from kvlane.policy.units import show_rate, show_seconds

Reason = Literal["not_a_measurement", "above_ceiling", "above_peak"]

# Beyond it a float no longer holds every whole number.
_LARGEST = 1 << 53

Sample = TypeVar("Sample", PrefillSample, TransferSample)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sample is not used: a kind for counting, the field at fault, and a sentence."""

    kind: Reason
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """What no pass on this device can beat: `flop(resident, new)` over `peak_flops` (of all its ranks)."""

    peak_flops: float
    flop: Callable[[int, int], float]

    @property
    def token_s(self) -> float:
        """Seconds at peak of one further token, its attention apart: second differences are the attention."""
        one, two, three = (self.flop(0, count) for count in (1, 2, 3))
        return max(0.0, (two - one) - 2 * (three - 2 * two + one)) / self.peak_flops


@dataclass(frozen=True, slots=True)
class Span:
    """The least and the most that was measured."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        return cls(min(values), max(values))


class Window(Generic[Sample]):
    """The newest samples and their weights."""

    def __init__(self, size: int, half_life: float | None) -> None:
        if size < 1:
            raise InputError("window", f"is {size}", "1 sample or more")
        if half_life is not None and not half_life > 0:
            raise InputError("half_life", f"is {half_life!r}", "samples above zero, or None")
        self._kept: deque[Sample] = deque(maxlen=size)
        self._half_life = half_life

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sample: Sample) -> None:
        self._kept.append(sample)

    def samples(self) -> list[Sample]:
        return list(self._kept)

    def weights(self) -> list[float]:
        if self._half_life is None:
            return [1.0] * len(self._kept)
        newest = len(self._kept) - 1
        return [float(0.5 ** ((newest - at) / self._half_life)) for at in range(len(self._kept))]


def refuse_transfer(sample: TransferSample, ceiling_bytes_per_s: float | None) -> Refusal | None:
    """Why a transfer is no measurement of a link with that ceiling, None where it may be one."""
    for name, value in (("bytes", sample.bytes), ("copies", sample.copies)):
        if not _is_count(value, 1):
            return Refusal(
                "not_a_measurement", name, f"{value!r} is not a whole number of 1 or more, or too large"
            )
    if sample.copies > sample.bytes:
        return Refusal(
            "not_a_measurement", "copies", f"{sample.copies} copies of {sample.bytes} bytes in all"
        )
    if not _is_count(sample.submissions, 0):
        return Refusal("not_a_measurement", "submissions", f"{sample.submissions!r} is not a whole number")
    if not is_duration(sample.seconds):
        return Refusal(
            "not_a_measurement",
            "seconds",
            f"{sample.seconds!r} is not a time from a nanosecond to eleven days",
        )
    ceiling = ceiling_bytes_per_s
    if ceiling is not None and sample.bytes / sample.seconds > ceiling:
        rate = show_rate(sample.bytes / sample.seconds)
        return Refusal(
            "above_ceiling", "seconds", f"{rate} is above the link's ceiling of {show_rate(ceiling)}"
        )
    return None


def refuse_prefill(sample: PrefillSample, limits: PrefillLimits | None) -> Refusal | None:
    """Why a pass is no measurement of a device with those limits, None where it may be one."""
    for name, value, least in (
        ("resident_tokens", sample.resident_tokens, 0),
        ("new_tokens", sample.new_tokens, 1),
    ):
        if not _is_count(value, least):
            return Refusal(
                "not_a_measurement", name, f"{value!r} is not a whole number of {least} or more, or too large"
            )
    if not is_duration(sample.seconds):
        return Refusal(
            "not_a_measurement",
            "seconds",
            f"{sample.seconds!r} is not a time from a nanosecond to eleven days",
        )
    if limits is not None:
        flop = limits.flop(sample.resident_tokens, sample.new_tokens)
        if flop / sample.seconds > limits.peak_flops:
            least_s = show_seconds(flop / limits.peak_flops)
            took = show_seconds(sample.seconds)
            return Refusal(
                "above_peak", "seconds", f"{took} is less than {least_s}, what the device's peak allows"
            )
    return None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
