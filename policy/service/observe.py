"""Taking observations: measurements for the calibration, and what became of decisions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import monotonic

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.service.answers import Observed, Refused
from kvlane.policy.service.decide import Desk, Made
from kvlane.policy.service.learn import Learner
from kvlane.policy.service.metrics import count
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.recent import Recent
from kvlane.policy.service.store import Entry
from kvlane.policy.service.types import (
    Observation,
    PrefillObservation,
    RequestObservation,
    TransferObservation,
)

_encode = msgspec.json.Encoder().encode


class _RefusedError(Exception):
    """Why one record is not taken: a word for counting, the field, and a sentence."""

    def __init__(self, kind: str, field: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.field, self.reason = kind, field, reason


class Intake:
    """Answers `/v1/observe`. What it acknowledges goes to `note`, which makes it last."""

    def __init__(self, desk: Desk, learners: dict[str, Learner], note: Callable[[Entry], None]) -> None:
        self.desk = desk
        self.learners = learners
        self._note = note
        self.seen: OrderedDict[str, None] = OrderedDict()
        self.recent = Recent()

    def observe(self, records: list[Observation]) -> bytes:
        """The answer as JSON: each record is taken or refused for itself. A record known already is taken again and
        changes nothing; one that was refused is not remembered."""
        accepted = duplicates = 0
        refused: list[Refused] = []
        for index, record in enumerate(records):
            if record.observation_id in self.seen:
                accepted += 1
                duplicates += 1
                continue
            name = None
            try:
                if isinstance(record, RequestObservation):
                    name = self._outcome(record)
                else:
                    name = self._learner(record.deployment).deployment.name
                    self._sample(record, self.learners[name])
            except _RefusedError as refusal:
                refused.append(Refused(index, refusal.field, refusal.reason))
                self.recent.refuse(name, refused[-1])
                if name is not None:
                    count(self.desk.cells.deployment(name).refused, refusal.kind)
                else:
                    count(self.desk.cells.unplaced, refusal.kind)
                continue
            accepted += 1
            self.remember(record.observation_id)
            mark = self.learners[name].mark if name in self.learners else ""
            self._note(Entry(name, mark, record))
            if name is not None:
                count(self.desk.cells.deployment(name).accepted, str(record.__struct_config__.tag))
        return _encode(Observed(accepted, duplicates, refused))

    def remember(self, observation_id: str) -> None:
        """Knows that id from now on; the oldest known goes where there are too many."""
        self.seen[observation_id] = None
        if len(self.seen) > self.desk.limits.remembered:
            self.seen.popitem(last=False)

    def replay(self, entries: Iterable[Entry]) -> None:
        """Takes what a journal holds: acknowledged before, so that nothing of it is refused or noted again."""
        for entry in entries:
            record = entry.observation
            if record.observation_id in self.seen:
                continue
            self.remember(record.observation_id)
            if isinstance(record, RequestObservation):
                self.desk.ledger.release(record.decision_id, monotonic(), arrived=record.outcome == "ok")
            elif entry.deployment in self.learners:
                learner = self.learners[entry.deployment]
                if learner.mark == entry.mark:
                    learner.replay([record])

    def _learner(self, name: str | None) -> Learner:
        try:
            return self.learners[self.desk.deployment(name).name]
        except ProblemError as problem:
            raise _RefusedError("unknown_deployment", "deployment", problem.detail) from None

    def _sample(self, record: TransferObservation | PrefillObservation, learner: Learner) -> None:
        if isinstance(record, PrefillObservation) and record.batch_tokens is not None:
            if record.batch_tokens < record.new_tokens:
                raise _RefusedError(
                    "not_a_measurement", "batch_tokens", "is fewer than new_tokens, which are among them"
                )
            if record.batch_tokens > record.new_tokens:
                raise _RefusedError(
                    "not_alone",
                    "batch_tokens",
                    f"{record.batch_tokens - record.new_tokens} tokens of other requests were computed in the same"
                    " pass: it does not say what this one's take",
                )
        try:
            refusal = learner.add(record)
        except InputError as error:
            raise _RefusedError("unknown_link", error.field, f"{error.problem} ({error.expected})") from None
        if refusal is not None:
            field = refusal.field
            if field == "seconds" and isinstance(record, TransferObservation):
                field = "end_s"
            raise _RefusedError(refusal.kind, field, refusal.reason)

    def _outcome(self, record: RequestObservation) -> str | None:
        """Ends what the decision booked, and scores it where it was followed; the deployment's name."""
        desk, now = self.desk, monotonic()
        made = desk.made.pop(record.decision_id, None)
        booked = desk.ledger.release(record.decision_id, now, arrived=record.outcome == "ok")
        if made is None:
            if not booked:
                raise _RefusedError("unknown_decision", "decision_id", "no such decision is remembered")
            return None  # decided before a restart: what it booked is all that is left of it
        cells = desk.cells.deployment(made.deployment)
        if record.outcome == "load_failed":
            count(cells.fallbacks, "load_failed")
            for link in made.links:
                desk.breakers.failed(link, now)
        elif record.outcome == "ok" and record.loaded_tokens > 0:
            for link in made.links:
                desk.breakers.succeeded(link)
        if record.path_taken != made.path:
            count(cells.fallbacks, "not_followed")
        elif record.outcome == "ok" and record.ttft_s is not None and _as_decided(record, made):
            path = cells.paths[made.path]
            self.recent.scored(made.deployment, made.path, made.ttft_s, record.ttft_s)
            path.actual_s.observe(record.ttft_s)
            path.scored_predicted_s += made.ttft_s
            path.error.observe(abs(made.ttft_s - record.ttft_s) / record.ttft_s)
        return made.deployment


def _as_decided(record: RequestObservation, made: Made) -> bool:
    """Whether about as much was loaded as decided: an engine rounds to its own unit."""
    return abs(record.loaded_tokens - made.load_tokens) < made.unit
