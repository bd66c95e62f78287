"""Which way to copy is the fastest for copies of a size, as measured on the device. No device is touched here."""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from kvlane.policy.errors import InputError

Method: TypeAlias = Literal["engine", "batch", "mapped", "staged"]
METHODS: tuple[Method, ...] = get_args(Method)
"""`engine` gives the copy engine one copy at a time, `batch` many in one call; `mapped` is a kernel that reads host
memory itself; `staged` brings whole stretches of the source into a buffer by the engine, and a kernel takes them on."""

# A kernel runs on what the model computes on. Where the engine all but fills the link, as of contiguous layers, the
# noise of a measurement must not put one in its place.
_KERNEL_GAIN = 1.05
_HANDICAP: Mapping[Method, float] = {"mapped": _KERNEL_GAIN, "staged": _KERNEL_GAIN}


@dataclass(frozen=True, slots=True)
class MethodTable:
    """Achieved rates by method and copy size. With none, every copy goes by the engine: it needs nothing to be known.

    Attributes:
        rates: bytes per second by copy size in bytes, of every method that was measured; `staged` of a source in one
            stretch.

    Raises:
        InputError: a method that does not exist, a size or a rate that is not positive.
    """

    rates: Mapping[Method, Mapping[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for method, rates in self.rates.items():
            if method not in METHODS:
                raise InputError("methods", f"names {method!r}", ", ".join(METHODS))
            for size, rate in rates.items():
                if size < 1 or not 0 < rate < math.inf:
                    raise InputError("methods", f"gives {method} {rate} at {size} bytes", "positive ones")

    @classmethod
    def only(cls, method: Method) -> MethodTable:
        """A table that chooses one method for everything, for measurements and tests."""
        return cls({method: {1: 1.0}})

    def choose(
        self, copy_bytes: float, stretch_bytes: float, possible: Collection[Method] = METHODS
    ) -> Method:
        """The fastest method for copies of a mean size, out of a source whose stretches have a mean size.

        A kernel has to be faster than the engine by more than the noise of a measurement.

        A staged copy is no faster than its way into the buffer, which is that of the engine for copies as long as the
        stretches.
        """
        speeds = {method: self._rate(method, copy_bytes) for method in METHODS if method in possible}
        into = max(self._rate("engine", stretch_bytes), self._rate("batch", stretch_bytes))
        if into and "staged" in speeds:
            speeds["staged"] = min(speeds["staged"], into)
        # Of equal ones, and of none, the first: the engine.
        return max(speeds, key=lambda method: speeds[method] / _HANDICAP.get(method, 1.0), default="engine")

    def thresholds(self) -> tuple[tuple[int, Method], ...]:
        """`(size, method)`: chosen from this copy size on, up to the next one's, for a source in one stretch."""
        sizes = sorted({size for rates in self.rates.values() for size in rates})
        steps: list[tuple[int, Method]] = []
        for size in sizes:
            method = self.choose(size, math.inf)
            if not steps or steps[-1][1] != method:
                steps.append((size, method))
        return tuple(steps)

    def _rate(self, method: Method, copy_bytes: float) -> float:
        """What was measured at the largest size up to this one, or else at the smallest; 0 if nothing was."""
        rates = self.rates.get(method)
        if not rates:
            return 0.0
        sizes = sorted(rates)
        return rates[sizes[max(0, bisect.bisect_right(sizes, copy_bytes) - 1)]]
