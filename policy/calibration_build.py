"""What calibrators have come to, as a record to keep."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvlane.policy.calibration_cost import PassEstimate
from kvlane.policy.calibration_intake import Span
from kvlane.policy.calibration_observe import LinkObserved, PrefillEstimate
from kvlane.policy.calibration_record import (
    Fingerprint,
    LinkRecord,
    PassRecord,
    PrefillRecord,
    Record,
    SpanRecord,
    TierRecord,
)
from kvlane.policy.machine import Tier
from kvlane.policy.prefill_cost import PrefillCost


def build_record(
    fingerprint: Fingerprint,
    at_s: float,
    *,
    prefill: tuple[PrefillEstimate, PrefillCost] | None = None,
    links: Mapping[str, LinkObserved] | None = None,
    tiers: Mapping[str, Tier] | None = None,
    model_config: dict[str, Any] | None = None,
) -> Record:
    """The record of what was calibrated; `at_s` is when, seconds since 1970 UTC.

    `prefill` pairs the estimate with the cost it belongs to (its layers and LM head). `model_config` is needed where
    the fingerprint's model is no built-in one.
    """
    return Record(
        format="kvlane-calibration/1",
        date=datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        model_config=model_config,
        prefill=None if prefill is None else _prefill(*prefill),
        links={name: _link(link) for name, link in (links or {}).items()},
        tiers={
            name: TierRecord(tier.link, tier.layout, tier.run_tokens, tier.runs_per_layer)
            for name, tier in (tiers or {}).items()
        },
    )


def _prefill(estimate: PrefillEstimate, cost: PrefillCost) -> PrefillRecord:
    return PrefillRecord(
        layers=cost.layers,
        fresh=_pass(estimate.fresh),
        extend=_pass(estimate.extend),
        head_s=cost.head_s,
        floor_s=cost.floor_s,
        floor_context_s=cost.floor_context_s,
        resident_tokens=_span(estimate.resident_tokens),
        new_tokens=_span(estimate.new_tokens),
        refused={str(reason): count for reason, count in estimate.refused.items()},
    )


def _pass(estimate: PassEstimate) -> PassRecord:
    cost, errors = estimate.cost, estimate.standard_errors
    return PassRecord(
        overhead_s=cost.overhead_s,
        token_s=cost.token_s,
        pair_s=cost.pair_s,
        context_s=cost.context_s,
        rectangle=cost.rectangle,
        overhead_error_s=errors.overhead_s,
        token_error_s=errors.token_s,
        pair_error_s=errors.pair_s,
        context_error_s=errors.context_s,
        relative_error=estimate.relative_error,
        samples=estimate.samples,
        outliers=estimate.outliers,
        scaled=estimate.scaled,
        notes=list(estimate.notes),
    )


def _link(observed: LinkObserved) -> LinkRecord:
    estimate = observed.estimate
    link = estimate.link
    return LinkRecord(
        rate_bytes_per_s=link.rate_bytes_per_s,
        per_copy_s=link.per_copy_s,
        latency_s=link.latency_s,
        first_use_s=estimate.first_use_s,
        ceiling_bytes_per_s=link.ceiling_bytes_per_s,
        rate_table=list(link.rate_table),
        rate_error_bytes_per_s=estimate.rate_error_bytes_per_s,
        per_copy_error_s=estimate.per_copy_error_s,
        latency_error_s=estimate.latency_error_s,
        relative_error=estimate.relative_error,
        samples=estimate.samples,
        outliers=estimate.outliers,
        scaled=estimate.scaled,
        bytes=_span(observed.bytes),
        copy_bytes=_span(observed.copy_bytes),
        refused={str(reason): count for reason, count in observed.refused.items()},
        notes=list(estimate.notes),
    )


def _span(span: Span) -> SpanRecord:
    return SpanRecord(float(span.low), float(span.high))
