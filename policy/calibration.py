"""Measurements of a machine become the parameters of its costs.

Three steps, each a module of its own: samples to costs (`calibration_cost`), observations taken one at a time
(`calibration_observe`), and records on disk (`calibration_record`, which alone needs neither numpy nor scipy). This
module is their face; `kvlane.policy` itself does not import it.
"""

from __future__ import annotations

from kvlane.policy.calibration_cost import (
    LinkEstimate,
    LinkFit,
    PassEstimate,
    PassFit,
    PrefillSample,
    TransferSample,
    calibrate_link,
    calibrate_pass,
    fit_link,
    fit_pass,
)
from kvlane.policy.calibration_intake import PrefillLimits, Refusal, Span
from kvlane.policy.calibration_observe import (
    Calibrator,
    LinkCalibrator,
    LinkObserved,
    PrefillCalibrator,
    PrefillEstimate,
)

__all__ = [
    "Calibrator",
    "LinkCalibrator",
    "LinkEstimate",
    "LinkFit",
    "LinkObserved",
    "PassEstimate",
    "PassFit",
    "PrefillCalibrator",
    "PrefillEstimate",
    "PrefillLimits",
    "PrefillSample",
    "Refusal",
    "Span",
    "TransferSample",
    "calibrate_link",
    "calibrate_pass",
    "fit_link",
    "fit_pass",
]
