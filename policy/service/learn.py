"""What observations teach about a deployment: calibrators fed one sample at a time, and the record they amount to."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from kvlane.policy import calibration_record
from kvlane.policy.calibration_apply import model_config_of
from kvlane.policy.calibration_build import build_record
from kvlane.policy.calibration_cost import PrefillSample, TransferSample
from kvlane.policy.calibration_intake import PrefillLimits, Refusal
from kvlane.policy.calibration_observe import (
    Calibrator,
    LinkCalibrator,
    LinkObserved,
    PrefillCalibrator,
    PrefillEstimate,
)
from kvlane.policy.calibration_record import Fingerprint, Record
from kvlane.policy.catalog import model_config, model_names
from kvlane.policy.errors import InputError
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.service.deployments import Deployment, Sample
from kvlane.policy.service.types import PrefillObservation

# Fewer samples of a kind than that are too few to go before what was known.
LEAST_SAMPLES = 8


class Learner:
    """One deployment's calibrators. `add` and `learn` may run in different threads.

    `mark` stands for the model, device, engine and dtypes: what was learnt of others is not for this one.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.mark = blake2b(msgspec.json.encode(_fingerprint(deployment)), digest_size=8).hexdigest()
        self.accepted = 0
        self._unused = 0
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        told, planner = deployment.told, deployment.in_force.planners["bulk"]
        self._prefill = PrefillCalibrator(
            len(told.model.layers),
            head_s=planner.prefill.head_s,
            limits=_limits(deployment),
            prior=planner.prefill,
            rectangle=planner.prefill.extend.rectangle,
        )
        self._calibrator = Calibrator(
            self._prefill,
            [
                LinkCalibrator(link.name, ceiling_bytes_per_s=link.ceiling_bytes_per_s, prior=link)
                for link in planner.machine.links.values()
            ],
        )

    @property
    def fresh(self) -> bool:
        """Whether samples came in since the last `learn`."""
        return self._unused > 0

    @property
    def refused(self) -> dict[str, int]:
        """Samples refused by reason, since the start."""
        total: dict[str, int] = {}
        by_kind = [self._prefill.refused, *(link.refused for link in self._calibrator.links.values())]
        for refused in by_kind:
            for reason, count in refused.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def add(self, sample: Sample) -> Refusal | None:
        """Takes a sample, or says why not; raises `InputError` naming `link` for one nobody configured."""
        with self._lock:
            if isinstance(sample, PrefillObservation):
                kind = "prefill"
                refusal = self._calibrator.add_prefill(
                    PrefillSample(sample.resident_tokens, sample.new_tokens, sample.seconds)
                )
            else:
                kind = sample.link
                refusal = self._calibrator.add_transfer(
                    sample.link,
                    TransferSample(
                        sample.bytes,
                        sample.copies,
                        sample.end_s - sample.start_s,
                        cold=sample.cold,
                        at_s=sample.end_s,
                    ),
                )
            if refusal is None:
                self.deployment.samples.append(sample)
                self.accepted += 1
                self._unused += 1
                self._counts[kind] = self._counts.get(kind, 0) + 1
            return refusal

    def replay(self, samples: Iterable[Sample]) -> None:
        """Takes samples that were accepted before; one that no longer fits is left out."""
        for sample in samples:
            try:
                self.add(sample)
            except InputError:
                continue

    def learn(self, at_s: float) -> Record | None:
        """The record that what is in force and the samples amount to; None where they are too few to say anything.

        `at_s` is now, in seconds since 1970 UTC. Takes some ten milliseconds: for another thread than the loop's.
        """
        with self._lock:
            self._unused = 0
            prefill = self._prefill_estimate()
            links = self._link_estimates()
        if prefill is None and not links:
            return None
        deployment = self.deployment
        new = build_record(
            _fingerprint(deployment), at_s, prefill=prefill, links=links, model_config=_config(deployment)
        )
        old = deployment.in_force.record
        if old is None:
            return new
        merged = msgspec.structs.replace(
            old,
            date=new.date,
            prefill=new.prefill or old.prefill,
            links={**old.links, **new.links},
        )
        # Decoding checks what structs put together by hand do not.
        return calibration_record.decode(calibration_record.encode(merged))

    def _prefill_estimate(self) -> tuple[PrefillEstimate, PrefillCost] | None:
        if self._counts.get("prefill", 0) < LEAST_SAMPLES:
            return None
        try:
            return self._prefill.estimate(), self._prefill.cost()
        except InputError:
            return None

    def _link_estimates(self) -> dict[str, LinkObserved]:
        found: dict[str, LinkObserved] = {}
        for name, link in self._calibrator.links.items():
            if self._counts.get(name, 0) >= LEAST_SAMPLES:
                try:
                    found[name] = link.estimate()
                except (InputError, ValueError):
                    continue
        return found


def _limits(deployment: Deployment) -> PrefillLimits | None:
    told = deployment.told
    try:
        peak = told.machine.device.peak(told.model.weight_dtype) * told.tp
    except InputError:
        return None
    head = told.model.head_flop
    return PrefillLimits(peak, lambda resident, new: told.model.prefill_flop(resident, new) - head)


def _fingerprint(deployment: Deployment) -> Fingerprint:
    if deployment.base is not None:
        return deployment.base.fingerprint
    told = deployment.told
    return Fingerprint(
        model=told.model.name,
        device=told.machine.device.name,
        engine=told.engine,
        dtype=told.model.weight_dtype,
        kv_dtype=told.kv_dtype or told.model.form().name,
        tp=told.tp,
    )


def _config(deployment: Deployment) -> dict[str, object] | None:
    if deployment.base is not None:
        return deployment.base.model_config
    if deployment.told.model.name in model_names():
        return None
    return model_config_of(model_config(deployment.model_name)[1])
