"""A ring of event sets: every load takes one, and gives it back once nothing can touch its events any more."""

from __future__ import annotations

import threading
from collections import deque

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend, Event
from kvlane.streams.faults import LoadRefusedError


class EventSet:
    """The events of one load. Used by the threads of that load only."""

    def __init__(self, backend: Backend) -> None:
        self.users = 0  # changes under the ring's lock only
        self._backend = backend
        self._events: list[Event] = []
        self._taken = 0
        self._recorded: list[Event] = []

    def take(self) -> Event:
        """An event nobody has recorded."""
        if self._taken == len(self._events):
            self._events.append(self._backend.event())
        self._taken += 1
        return self._events[self._taken - 1]

    def note_recorded(self, *events: Event) -> None:
        """These were handed to the backend: they have to fire before the set is used again."""
        self._recorded.extend(events)

    def renew(self) -> None:
        """Make every event fit to be recorded again.

        Raises:
            KvSafetyError: one of them has not fired, or is still waited for.
        """
        for event in self._recorded:
            self._backend.reset(event)
        self._recorded.clear()
        self._taken = 0


class EventRing:
    """At most `sets` loads have events at a time. Methods may be called from any thread.

    Raises:
        InputError: fewer than one set.
    """

    def __init__(self, backend: Backend, sets: int) -> None:
        if sets < 1:
            raise InputError("ring_sets", f"is {sets}", "at least 1")
        self._free = deque(EventSet(backend) for _ in range(sets))
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Sets that a load could take now."""
        with self._lock:
            return len(self._free)

    def take(self, users: int) -> EventSet:
        """The set that has been free longest, free again once `users` have let it go.

        Raises:
            LoadRefusedError: none is free: it is not waited for.
            KvSafetyError: one of its events may still be used.
        """
        with self._lock:
            if not self._free:
                raise LoadRefusedError("every event set belongs to a load that has not ended")
            events = self._free.popleft()
            events.users = users
        # Looked at on every reuse: an event recorded again under somebody who waits lets them go at the wrong time.
        events.renew()
        return events

    def let_go(self, events: EventSet, users: int = 1) -> None:
        """So many of the set's users need it no more."""
        with self._lock:
            events.users -= users
            if events.users == 0:
                self._free.append(events)
