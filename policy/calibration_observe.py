"""Observations taken one at a time, in bounded memory, and the parameters they amount to.

Recency: sample `k` from the newest weighs `0.5 ** (k / half_life)`. With the default half-life of 12 samples a change
has the majority of the weight after 12 samples and the fits, which follow the majority, have moved by 20 or so; one
outlier never has it. `half_life=None` weighs all alike, for measurements taken on purpose in one go.

Nothing here reads a clock: times come with the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvlane.policy.calibration_cost import (
    LinkEstimate,
    PassEstimate,
    PrefillSample,
    TransferSample,
    calibrate_link,
    calibrate_pass,
    transfer_s,
    unchecked,
)
from kvlane.policy.calibration_fit import weighted_quantile
from kvlane.policy.calibration_intake import (
    PrefillLimits,
    Reason,
    Refusal,
    Span,
    Window,
    refuse_prefill,
    refuse_transfer,
)
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link
from kvlane.policy.prefill_cost import PassCost, PrefillCost

HALF_LIFE_SAMPLES = 12.0
WINDOW_SAMPLES = 128
_COLD_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    """The two kinds of pass as calibrated, where they were measured, and how many samples were refused why."""

    fresh: PassEstimate
    extend: PassEstimate
    resident_tokens: Span
    new_tokens: Span
    refused: Mapping[Reason, int] = field(default_factory=dict)

    @property
    def relative_error(self) -> float:
        """Of the kind that is less sure."""
        return max(self.fresh.relative_error, self.extend.relative_error)

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            *(f"passes from token 0: {note}" for note in self.fresh.notes),
            *(f"passes after a prefix: {note}" for note in self.extend.notes),
        )


@dataclass(frozen=True, slots=True)
class LinkObserved:
    """A link as calibrated, where it was measured (bytes of a transfer, bytes of one copy), and the refusals."""

    estimate: LinkEstimate
    bytes: Span
    copy_bytes: Span
    refused: Mapping[Reason, int] = field(default_factory=dict)

    def with_latency(self, extra_s: float) -> LinkObserved:
        """The same with something more to do before each transfer, such as a lookup."""
        link = self.estimate.link.with_latency(self.estimate.link.latency_s + extra_s)
        return replace(self, estimate=replace(self.estimate, link=link))


class LinkCalibrator:
    """One link's transfers, taken one at a time. Not for use from several threads at once.

    Args:
        name: of the link.
        ceiling_bytes_per_s: no transfer can be faster; None where nobody knows.
        prior: what was known before, scaled where samples alone do not show a rate. A well-posed fit takes its
            place, so that a diet of equal transfers later scales that.
        half_life: of the recency weights, in samples; None for equal weights.
        window: the most samples kept.

    Raises:
        InputError: a window or half-life that is none.
    """

    def __init__(
        self,
        name: str,
        *,
        ceiling_bytes_per_s: float | None = None,
        prior: Link | None = None,
        half_life: float | None = HALF_LIFE_SAMPLES,
        window: int = WINDOW_SAMPLES,
    ) -> None:
        self.name = name
        self.ceiling_bytes_per_s = ceiling_bytes_per_s
        self.refused: dict[Reason, int] = {}
        self.cold_discarded = 0
        self._prior = prior
        self._warm: Window[TransferSample] = Window(window, half_life)
        self._cold: Window[TransferSample] = Window(_COLD_SAMPLES, None)
        self._first = True

    def begin_series(self) -> None:
        """The next sample is a series' first: cold, whatever it says."""
        self._first = True

    def add(self, sample: TransferSample) -> Refusal | None:
        """Takes a sample, or says why not. A cold one counts towards `first_use_s` only."""
        refusal = refuse_transfer(sample, self.ceiling_bytes_per_s)
        if refusal is not None:
            self.refused[refusal.kind] = self.refused.get(refusal.kind, 0) + 1
            return refusal
        if sample.cold or self._first:
            self._first = False
            self.cold_discarded += 1
            self._cold.add(sample)
            return None
        self._warm.add(sample)
        return None

    def estimate(self) -> LinkObserved:
        """The link as its samples have it now; raises `InputError` naming `samples` where they show nothing."""
        samples = self._warm.samples()
        found = calibrate_link(
            self.name,
            samples,
            self._warm.weights(),
            prior=self._prior,
            ceiling_bytes_per_s=self.ceiling_bytes_per_s,
        )
        if not found.scaled:
            self._prior = found.link
        found = replace(found, first_use_s=self._first_use_s(found.link))
        return LinkObserved(
            found,
            Span.of([sample.bytes for sample in samples]),
            Span.of([sample.bytes / sample.copies for sample in samples]),
            dict(self.refused),
        )

    def _first_use_s(self, link: Link) -> float | None:
        extra = [max(0.0, sample.seconds - transfer_s(link, sample)) for sample in self._cold.samples()]
        if not extra:
            return None
        return weighted_quantile(np.array(extra), np.ones(len(extra)), 0.5)


class PrefillCalibrator:
    """One engine's passes, taken one at a time. Not for use from several threads at once.

    Args:
        layers: of the model, for the cost made of the passes.
        head_s: seconds of the LM head, which is not in the samples.
        limits: what no pass can beat, None where nobody knows the device's peak.
        prior: what was known before; see `LinkCalibrator`.
        rectangle: passes after a prefix compute masked entries too, by another kernel: they are never fitted
            together with those from token 0.
        half_life: as of `LinkCalibrator`.
        window: the most samples kept of each of the two kinds.

    Raises:
        InputError: a window or half-life that is none.
    """

    def __init__(
        self,
        layers: int,
        *,
        head_s: float = 0.0,
        limits: PrefillLimits | None = None,
        prior: PrefillCost | None = None,
        rectangle: bool = False,
        half_life: float | None = HALF_LIFE_SAMPLES,
        window: int = WINDOW_SAMPLES,
    ) -> None:
        self.layers = layers
        self.head_s = head_s
        self.limits = limits
        self.rectangle = rectangle
        self.refused: dict[Reason, int] = {}
        self.cold_discarded = 0
        self._floor = (prior.floor_s, prior.floor_context_s) if prior is not None else (0.0, 0.0)
        self._prior_fresh = prior.fresh if prior is not None else None
        self._prior_extend = prior.extend if prior is not None else None
        self._fresh: Window[PrefillSample] = Window(window, half_life)
        self._extend: Window[PrefillSample] = Window(window, half_life)
        self._first = True

    def begin_series(self) -> None:
        """The next sample is a series' first, and not used: it pays for compiling and for caches."""
        self._first = True

    def add(self, sample: PrefillSample) -> Refusal | None:
        """Takes a sample, or says why not."""
        refusal = refuse_prefill(sample, self.limits)
        if refusal is not None:
            self.refused[refusal.kind] = self.refused.get(refusal.kind, 0) + 1
            return refusal
        if self._first:
            self._first = False
            self.cold_discarded += 1
            return None
        (self._extend if sample.resident_tokens else self._fresh).add(sample)
        return None

    def estimate(self) -> PrefillEstimate:
        """Both kinds of pass as the samples have them now.

        A kind with too few different samples takes the other's, where one kernel serves both, or else its prior
        scaled by one factor; its notes say so. Raises `InputError` naming `samples` where there is neither.
        """
        fresh, extend = self._both()
        if any(self._floor) and not (_unsure(fresh) and _unsure(extend)):
            # A fit has no floor of its own, and the cost made of both has one for both.
            self._give_up_floor()
            fresh, extend = self._both()
        if not self.rectangle and (_unsure(fresh) or _unsure(extend)):
            together = self._together()
            if together is not None:
                fresh = together if fresh is None or _unsure(fresh) else fresh
                extend = together if extend is None or _unsure(extend) else extend
        if fresh is None and extend is None:
            found = len(self._fresh) + len(self._extend)
            raise InputError(
                "samples",
                f"of passes are {found}, too few or too alike to tell their coefficients apart",
                "at least 3 clearly different lengths",
            )
        if fresh is None:
            assert extend is not None
            fresh = unchecked(extend, "not measured: taken to cost as those after a prefix")
        if extend is None:
            extend = unchecked(fresh, "not measured: taken to cost as those from token 0")
        if not fresh.scaled:
            self._prior_fresh = fresh.cost
        if not extend.scaled:
            self._prior_extend = extend.cost
        samples = self._fresh.samples() + self._extend.samples()
        return PrefillEstimate(
            fresh,
            extend,
            Span.of([sample.resident_tokens for sample in samples]),
            Span.of([sample.new_tokens for sample in samples]),
            dict(self.refused),
        )

    def cost(self) -> PrefillCost:
        """`estimate` as the planner takes it."""
        found = self.estimate()
        factor = min(found.fresh.factor, found.extend.factor)
        return PrefillCost(
            self.layers,
            found.fresh.cost,
            found.extend.cost,
            self.head_s,
            floor_s=self._floor[0] * factor,
            floor_context_s=self._floor[1] * factor,
        )

    def _both(self) -> tuple[PassEstimate | None, PassEstimate | None]:
        """Each kind by its own samples."""
        return (
            self._pass(self._fresh, self._prior_fresh, False),
            self._pass(self._extend, self._prior_extend, self.rectangle),
        )

    def _give_up_floor(self) -> None:
        """What reading weights and KV takes at least becomes part of each prior's fixed cost, the safer side."""
        floor_s, floor_context_s = self._floor
        self._floor = (0.0, 0.0)
        self._prior_fresh, self._prior_extend = (
            None
            if prior is None
            else replace(
                prior,
                overhead_s=prior.overhead_s + floor_s,
                context_s=prior.context_s + floor_context_s,
            )
            for prior in (self._prior_fresh, self._prior_extend)
        )

    def _pass(
        self, window: Window[PrefillSample], prior: PassCost | None, rectangle: bool
    ) -> PassEstimate | None:
        """One kind by its own samples, None where they and the prior do not make one."""
        try:
            return calibrate_pass(
                window.samples(),
                window.weights(),
                prior=prior,
                floor=self._floor,
                rectangle=rectangle,
                least_token_s=self._least_token_s,
            )
        except InputError:
            return None

    def _together(self) -> PassEstimate | None:
        samples = self._fresh.samples() + self._extend.samples()
        weights = self._fresh.weights() + self._extend.weights()
        try:
            found = calibrate_pass(samples, weights, least_token_s=self._least_token_s)
        except InputError:
            return None
        return replace(found, notes=(*found.notes, "fitted together with the other kind"))

    @property
    def _least_token_s(self) -> float:
        return 0.0 if self.limits is None else self.limits.token_s


class Calibrator:
    """Everything observed of one engine: its passes, and the links its KV comes over.

    A link not named at the start is not taken: names come from a configuration, never from a sample.
    """

    def __init__(self, prefill: PrefillCalibrator, links: Sequence[LinkCalibrator] = ()) -> None:
        self.prefill = prefill
        self.links = {link.name: link for link in links}

    def add_prefill(self, sample: PrefillSample) -> Refusal | None:
        """Takes a pass, or says why not."""
        return self.prefill.add(sample)

    def add_transfer(self, link: str, sample: TransferSample) -> Refusal | None:
        """Takes a transfer, or says why not; raises `InputError` naming `link` for one nobody configured."""
        try:
            found = self.links[link]
        except KeyError:
            raise InputError("link", f"there is no link {link!r}", ", ".join(self.links)) from None
        return found.add(sample)


def _unsure(estimate: PassEstimate | None) -> bool:
    return estimate is None or estimate.scaled
