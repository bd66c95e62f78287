"""Happens-before: what is ordered by something, whatever order it came in this time.

Every host thread and every stream is an `Actor` with a vector clock, one count for each actor it has heard from.
Threads and streams hear of each other through what the code under test does: an event waited for, a flag read, a
thread started, work submitted. Two accesses that neither side has heard of are a race, also when they came in the
right order by chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvlane.transfer.store import KvSafetyError

if TYPE_CHECKING:
    from kvlane.streams.simulated.sync import SimulatedFlag

Clock: TypeAlias = dict[int, int]

Kind: TypeAlias = Literal[
    "unordered_read",
    "overwritten",
    "source_reused",
    "quarantined",
    "event",
    "descriptors",
    "wrong_kv",
    "unreported",
    "no_cause",
    "late",
    "stuck",
    "leak",
]
"""What went wrong:

- `unordered_read`: KV read that no event orders after the copy, or the compute, that writes it
- `overwritten`: written while an earlier reader or writer, which nothing orders before, may still be at it
- `source_reused`: a source or staging buffer written or freed while a copy may still read it
- `quarantined`: the same as one of these, and the copy belongs to a load that was given up
- `event`: recorded, reset or waited for where nothing orders that after what it needs
- `descriptors`: a list of copies that was changed before they were done
- `wrong_kv`: an accepted answer was computed from KV that is not its tokens' own, a dropped copy among them
- `unreported`: a load with a fault was taken for a good one, or its layer was not named
- `no_cause`: a load failed that nothing was wrong with
- `late`: a request took longer than its deadline and a recompute
- `stuck`: everything waits and nothing will ever happen
- `leak`: threads, streams, pins or blocks did not come back
"""


class OrderError(KvSafetyError):
    """The code under test goes wrong in some order of events, whether or not this run showed it."""

    def __init__(self, kind: Kind, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")


class Actor:
    """A host thread or a stream: what it has done and what it knows of the others."""

    __slots__ = ("clock", "id", "made", "name")

    def __init__(self, number: int, name: str, knows: Clock | None = None) -> None:
        self.id = number
        self.name = name
        self.made = 0  # shared things so far
        self.clock: Clock = {} if knows is None else dict(knows)
        self.clock[number] = 1

    @property
    def epoch(self) -> int:
        return self.clock[self.id]

    def follow(self, other: Clock) -> None:
        """Everything in `other` happened before what this actor does from now on."""
        mine = self.clock
        for actor, count in other.items():
            if mine.get(actor, 0) < count:
                mine[actor] = count

    def release(self) -> Clock:
        """What happened up to now, for others to follow; what this actor does later is not in it."""
        shown = dict(self.clock)
        self.clock[self.id] += 1
        return shown

    def after(self, access: Access) -> bool:
        """Whether something orders the access before what this actor does now."""
        return self.clock.get(access.actor.id, 0) >= access.epoch


@dataclass(frozen=True, slots=True)
class Access:
    """One use of memory or of an event: by whom, at which of its counts, and for which load."""

    actor: Actor
    epoch: int
    what: str
    cancel: SimulatedFlag | None = None

    @property
    def of_copy(self) -> bool:
        return self.cancel is not None

    @property
    def given_up(self) -> bool:
        return self.cancel is not None and self.cancel.value

    def __str__(self) -> str:
        return f"{self.what} on {self.actor.name}"
