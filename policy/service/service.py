"""The service as one thing: its parts put together, started from what was kept, reloaded, and kept again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from time import monotonic, time

import msgspec
from prometheus_client.metrics_core import Metric

from kvlane.policy import calibration_record
from kvlane.policy.calibration_record import Record
from kvlane.policy.errors import InputError
from kvlane.policy.ledger import Ledger
from kvlane.policy.service import deployments as deployed
from kvlane.policy.service import kept
from kvlane.policy.service.auth import Gate, gate
from kvlane.policy.service.config import Settings
from kvlane.policy.service.decide import Desk
from kvlane.policy.service.deployments import Deployment
from kvlane.policy.service.kept import Part
from kvlane.policy.service.learn import Learner
from kvlane.policy.service.metrics import Cells, gauge
from kvlane.policy.service.observe import Intake
from kvlane.policy.service.report import calibration_age_s
from kvlane.policy.service.store import Entry, Learnt, Snapshot, Store

log = logging.getLogger("kvlane.serve")


class Service:
    """Deployments, ledger, calibration and store of one process.

    Raises `InputError` for settings that cannot be served, and for a folder of state that another process has.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cells = Cells()
        self.gate: Gate = gate(settings)
        found = deployed.build(settings)
        self.desk = Desk(found, settings.limits, self.cells)
        self.store = None if settings.state_dir is None else Store(Path(settings.state_dir))
        self.unwritten = False
        self._dirty = False
        self._newest: str | None = None
        self.intake = Intake(self.desk, {}, self._note)
        self.intake.learners = {each.name: Learner(each) for each in _distinct(found)}
        if self.store is not None:
            try:
                self._restore(*self.store.load())
            except BaseException:
                self.store.close()
                raise

    def reload(self, settings: Settings) -> None:
        """Serves other settings from now on, all of them or, raising `InputError`, none.

        What was learnt of a deployment stays as far as it is still the same model, device and engine. Where to
        listen and where state lies are not changed by a reload.
        """
        for name in ("listen", "state_dir", "limits"):
            if getattr(settings, name) != getattr(self.settings, name):
                log.warning("%s is changed by a restart only", name)
        settings = msgspec.structs.replace(
            settings,
            listen=self.settings.listen,
            state_dir=self.settings.state_dir,
            limits=self.settings.limits,
        )
        new_gate = gate(settings)
        found = deployed.build(settings)
        old = self.intake.learners
        learners = {
            each.name: _resumed(each, _learnt(old[each.name])) if each.name in old else Learner(each)
            for each in _distinct(found)
        }
        self.settings, self.gate, self.intake.learners = settings, new_gate, learners
        self.desk.serve(found, settings.limits)
        self._dirty = True

    def learn(self, name: str) -> Record | None:
        """The record that a deployment's samples amount to, if there are new ones; slow, and safe in a thread."""
        learner = self.intake.learners.get(name)
        if learner is None or not learner.fresh:
            return None
        return learner.learn(time())

    def put_in_force(self, name: str, record: Record) -> None:
        """Decides by what was learnt; a record that does not fit is logged and left."""
        learner = self.intake.learners.get(name)
        if learner is None:
            return
        try:
            learner.deployment.put_in_force(record)
        except InputError as error:
            log.warning("what was learnt of %s is not used: %s", name, error)
        else:
            log.info("calibrated", extra={"deployment": name, "observations": learner.accepted})
            self._dirty = True

    @property
    def to_keep(self) -> bool:
        """Whether something changed since the last snapshot."""
        newest = next(reversed(self.desk.made), None)
        return self._dirty or newest != self._newest or len(self.desk.ledger) > 0

    def snapshot(self) -> tuple[Snapshot, Iterator[Part]]:
        """Everything as it is now, its parts to be put together in any thread; the journal begun that goes on from
        here."""
        assert self.store is not None
        self._dirty = False
        self._newest = next(reversed(self.desk.made), None)
        now = monotonic()
        snapshot = Snapshot(
            format="kvlane-state/1",
            at_s=time(),
            journal=self.store.next_journal(),
            deployments={name: _learnt(learner) for name, learner in self.intake.learners.items()},
            seen=list(self.intake.seen),
            ledger=self.desk.ledger.snapshot(now),
        )
        return snapshot, kept.taken(self.desk, now)

    def gauges(self) -> Iterator[Metric]:
        """What is asked for at a scrape: queues, reservations, the age of calibrations."""
        ledger, now = self.desk.ledger, monotonic()
        bytes_: dict[tuple[str, ...], float] = {}
        seconds: dict[tuple[str, ...], float] = {}
        longest: dict[tuple[str, ...], float] = {}
        for key, (queued_s, queued_bytes) in ledger.links(now).items():
            labels: tuple[str, ...] = (key.link, key.scope)
            bytes_[labels] = bytes_.get(labels, 0.0) + queued_bytes
            seconds[labels] = seconds.get(labels, 0.0) + queued_s
            longest[labels] = max(longest.get(labels, 0.0), queued_s)
        of_link = ("link", "scope")
        yield gauge("kvlane_link_queue_bytes", "Booked bytes waiting, over all of a link.", bytes_, of_link)
        yield gauge(
            "kvlane_link_queue_seconds", "Seconds of copies waiting, over all of a link.", seconds, of_link
        )
        yield gauge(
            "kvlane_link_queue_longest_seconds", "The longest queue of any one such link.", longest, of_link
        )
        yield gauge("kvlane_reservations", "Reservations live.", {(): float(len(ledger))}, ())
        ages: dict[tuple[str, ...], float] = {}
        for name, learner in self.intake.learners.items():
            age = calibration_age_s(learner.deployment, time())
            if age is not None:
                ages[(name,)] = age
        yield gauge(
            "kvlane_calibration_age_seconds",
            "Since the calibration in force was measured.",
            ages,
            ("deployment",),
        )
        open_links: dict[tuple[str, ...], float] = {}
        for link in self.desk.left_alone(now):
            open_links[(link.link,)] = open_links.get((link.link,), 0.0) + 1
        yield gauge("kvlane_links_left_alone", "Links over which loads keep failing.", open_links, ("link",))

    def _note(self, entry: Entry) -> None:
        self._dirty = True
        if self.store is not None:
            self.store.note(entry)

    def _restore(self, snapshot: Snapshot | None, parts: list[Part], entries: list[Entry]) -> None:
        if snapshot is not None:
            elapsed_s = max(0.0, time() - snapshot.at_s)
            kept.restore(self.desk, parts, monotonic(), elapsed_s)
            for name, learnt in snapshot.deployments.items():
                if name in self.intake.learners:
                    deployment = self.intake.learners[name].deployment
                    self.intake.learners[name] = _resumed(deployment, learnt)
            for observation_id in snapshot.seen:
                self.intake.remember(observation_id)
            if snapshot.ledger is not None:
                try:
                    self.desk.ledger = Ledger.restore(
                        snapshot.ledger,
                        monotonic(),
                        elapsed_s=elapsed_s,
                        most=self.settings.limits.reservations,
                    )
                except InputError as error:
                    log.warning("the ledger that was kept is not used: %s", error)
        self.intake.replay(entries)
        if snapshot is not None or entries:
            log.info(
                "restored",
                extra={
                    "journal_entries": len(entries),
                    "reservations": len(self.desk.ledger),
                    "decisions": len(self.desk.made),
                },
            )
            self._dirty = True


def _distinct(found: dict[str, Deployment]) -> list[Deployment]:
    return list({deployment.name: deployment for deployment in found.values()}.values())


def _learnt(learner: Learner) -> Learnt:
    """What is to be kept of a deployment; a record that a file gave is in that file."""
    deployment = learner.deployment
    record = deployment.in_force.record
    raw = b"null" if record is None or record is deployment.base else msgspec.json.encode(record)
    return Learnt(learner.mark, msgspec.Raw(raw), list(deployment.samples), learner.accepted)


def _resumed(deployment: Deployment, learnt: Learnt) -> Learner:
    """A learner that goes on from what was known before, as far as that is of the same deployment.

    A calibration file that is newer than what was learnt goes before it.
    """
    learner = Learner(deployment)
    if learner.mark != learnt.mark:
        log.warning("what was learnt of %s before is of another model, device or engine", deployment.name)
        return learner
    raw = bytes(learnt.record)
    if raw != b"null":
        try:
            record = calibration_record.decode(raw, "what was kept")
            if deployment.base is None or _time(record) > _time(deployment.base):
                deployment.put_in_force(record)
                learner = Learner(deployment)
        except InputError as error:
            log.warning("what was learnt of %s before is not used: %s", deployment.name, error)
            return learner
    learner.replay(learnt.samples)
    learner.accepted = learnt.accepted
    return learner


def _time(record: Record) -> datetime:
    return datetime.fromisoformat(record.date)
