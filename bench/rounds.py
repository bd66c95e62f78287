"""Calibrates the passes of one prompt's neighbourhood round by round, so that a drifting machine is followed."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from kvlane.bench.tuning import PassSamples, Tuner, whole_units
from kvlane.policy.calibration import PrefillSample, fit_pass

# In shares of the prompt: full prefills, and passes (prefix, new), a new of 0 being the few tokens that are left when
# everything usable is loaded.
_FRESH = (0.14, 0.3, 0.46, 0.73, 1.17)
_EXTEND = (
    (1.1, 0.0),
    (0.9, 0.0),
    (0.7, 0.0),
    (0.9, 0.15),
    (0.75, 0.2),
    (0.7, 0.4),
    (0.5, 0.25),
    (0.5, 0.45),
    (0.3, 0.6),
    (0.1, 0.8),
)
# Paths end and begin at whole load units, and so none of these is measured later.
_OFF_UNIT = 5
# A median of three lets one disturbance pass.
KEPT = 3


def calibration_points(tokens: int, unit_tokens: int) -> list[tuple[int, int]]:
    """What to measure for a prompt of so many tokens: resident and new tokens.

    None of its own lengths and prefixes is among them, apart from the bare suffix, after other prefixes.
    """

    def off_unit(share: float) -> int:
        return whole_units(share * tokens, unit_tokens) + _OFF_UNIT

    bare = tokens - (tokens - 1) // unit_tokens * unit_tokens
    points = [(0, off_unit(share)) for share in _FRESH]
    points += [(off_unit(prefix), off_unit(new) if new else bare) for prefix, new in _EXTEND]
    return points


def longest_point(tokens: int, unit_tokens: int) -> int:
    """Tokens that all of them fit into, in whole units."""
    longest = max(resident + new for resident, new in calibration_points(tokens, unit_tokens))
    return -(-longest // unit_tokens) * unit_tokens


class Rounds:
    """Passes measured round by round: of each point the median of the newest few counts."""

    def __init__(self, tuner: Tuner, tokens: int) -> None:
        self._tuner = tuner
        self._points = calibration_points(tokens, tuner.store.unit_tokens)
        self._taken: dict[tuple[int, int], deque[PrefillSample]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._heads: deque[float] = deque(maxlen=KEPT * len(self._points))

    def measure(self) -> None:
        """One round."""
        tuner = self._tuner
        for resident, new in self._points:
            if resident:
                tuner.lab.hold(tuner.store, tuner.ids, resident)
            sample, head_s = tuner.lab.sample_prefill(tuner.ids, resident, new)
            self._taken[resident, new].append(sample)
            self._heads.append(head_s)
            after = f" after {resident:,}" if resident else ""
            tuner.tick(f"calibrating on {new:,} tokens{after}", 0.0)

    def fresh(self) -> PassSamples:
        """Passes from token 0: their causal kernel skips what is masked."""
        return self._fitted([point for point in self._points if not point[0]], rectangle=False)

    def extend(self) -> PassSamples:
        """Passes after a prefix: theirs computes masked entries, too."""
        return self._fitted([point for point in self._points if point[0]], rectangle=True)

    def _fitted(self, points: Sequence[tuple[int, int]], *, rectangle: bool) -> PassSamples:
        samples = []
        for point in points:
            taken = self._taken[point]
            samples.append(replace(taken[0], seconds=statistics.median(each.seconds for each in taken)))
        head_s = statistics.median(self._heads)
        return PassSamples(tuple(samples), fit_pass(samples, rectangle=rectangle), head_s)
