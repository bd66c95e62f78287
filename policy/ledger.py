"""What is booked on devices and links: without it a whole fleet decides to load at once, and the link collapses.

A reservation books device seconds on one instance and, for each load, link seconds and bytes. Both queues are served
first come, first served, as time passes. A reservation ends when it is released (by an observation, or on request) or
when it expires. The clock is the caller's: every call is told `now` in seconds, and a clock that goes back stands
still. Seconds and bytes throughout; tokens count from token 0.

One thread at a time: nothing here locks.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TypeVar

import msgspec

from kvlane.policy.booking import (
    EXPIRY_LEAST_S,
    EXPIRY_TTFTS,
    Booking,
    Counts,
    InFlight,
    Join,
    LinkKey,
    Load,
    LoadKey,
    SavedLedger,
    SavedLoad,
    SavedReservation,
    Scope,
    check_amount,
    link_key,
)
from kvlane.policy.errors import InputError
from kvlane.policy.fifo import Fifo, Turn

__all__ = [
    "Booking",
    "Counts",
    "InFlight",
    "Join",
    "Ledger",
    "LinkKey",
    "Load",
    "LoadKey",
    "SavedLedger",
    "Scope",
    "link_key",
]

Key = TypeVar("Key", bound=Hashable)

# So many queues are kept whether or not anything waits in them.
_FEW_QUEUES = 64


# There may be a hundred thousand of these, in which the garbage collector finds no cycles.
class _Flight(msgspec.Struct, eq=False, gc=False):
    """A booked load and the reservations that wait for it; the first of them asked for it."""

    load: Load
    turn: Turn
    queue: Fifo
    waiting: list[str]


class _Reservation(msgspec.Struct, eq=False, gc=False):
    """A live booking: its turn on a device, its loads, and when it expires on the clock."""

    id: str
    instance: str
    expires_s: float
    turn: Turn
    device: Fifo
    flights: list[_Flight]


class Ledger:
    """Devices, links and loads in flight.

    At most `most` reservations live: to make room the one next to expire is evicted, and counted.
    """

    def __init__(self, *, most: int = 100_000) -> None:
        self.counts = Counts()
        self._most = most
        self._now = -float("inf")
        self._live: dict[str, _Reservation] = {}
        self._expiry: list[tuple[float, str]] = []
        self._devices: dict[str, Fifo] = {}
        self._links: dict[LinkKey, Fifo] = {}
        self._flights: dict[LoadKey, list[_Flight]] = {}
        self._sweep_at = _FEW_QUEUES

    def __len__(self) -> int:
        """Live reservations, as of the last call."""
        return len(self._live)

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._live

    @property
    def idle(self) -> bool:
        """Whether nothing has been booked or seen on any device or link, as far as that is remembered."""
        return not self._devices and not self._links

    def device_busy_s(self, instance: str, now: float) -> float:
        """Q: seconds of booked work ahead of a new request on that instance's device."""
        self.expire(now)
        queue = self._devices.get(instance)
        return 0.0 if queue is None else queue.waiting_s(self._now)

    def link_queue_s(self, link: LinkKey, now: float) -> float:
        """W: seconds of booked copies ahead of a new load on that link."""
        self.expire(now)
        queue = self._links.get(link)
        return 0.0 if queue is None else queue.waiting_s(self._now)

    def links(self, now: float) -> dict[LinkKey, tuple[float, float]]:
        """Seconds waiting on each link known, and booked bytes that are among them."""
        return {key: (seconds, nbytes) for key, seconds, nbytes in self.each_link(now)}

    def each_link(self, now: float) -> Iterator[tuple[LinkKey, float, float]]:
        """The same one after another, for who has others to answer between them: what is booked meanwhile is told of
        the links that are still to come."""
        self.expire(now)
        for key, queue in tuple(self._links.items()):
            yield key, queue.waiting_s(self._now), queue.waiting_bytes(self._now)

    def waiting(self, instance: str, now: float) -> int:
        """Reservations whose work on that instance's device is not done."""
        self.expire(now)
        queue = self._devices.get(instance)
        return 0 if queue is None else queue.turns(self._now)

    def in_flight(self, key: LoadKey, now: float) -> tuple[InFlight, ...]:
        """The loads that may be joined under that key, of those that bring the same the first.

        What should have arrived is resident: whoever asks next says so in `resident_tokens`.
        """
        self.expire(now)
        if key not in self._flights:
            return ()
        found = []
        for flight in self._joinable(key).values():
            load = flight.load
            remaining = flight.queue.until_done_s(flight.turn, self._now)
            load_end = load.end if load.load_end is None else load.load_end
            found.append(InFlight(load.start, load.end, remaining, len(flight.waiting) - 1, load_end))
        return tuple(found)

    def reserve(self, reservation_id: str, booking: Booking, now: float) -> None:
        """Books it until `release`, or else for max(10 x predicted TTFT, 5 s).

        Raises `InputError` for an id that is live, and for amounts that cannot be; then nothing is booked.
        """
        self.expire(now)
        now = self._now
        if reservation_id in self._live:
            raise InputError("id", f"{reservation_id!r} is reserved already", "an id of its own")
        booking.check()
        device = self._queue(self._devices, booking.instance)
        if booking.device_busy_s is not None:
            device.replace(booking.device_busy_s, now)
        turn = Turn(booking.device_s, booking.device_s, now + booking.device_ready_s)
        device.add(turn, now)
        expires = now + max(EXPIRY_TTFTS * booking.ttft_s, EXPIRY_LEAST_S)
        reservation = _Reservation(reservation_id, booking.instance, expires, turn, device, [])
        for link, seconds in booking.link_queue_s.items():
            self._queue(self._links, link).replace(seconds, now)
        for wanted in booking.joins:
            flight = self._joinable(wanted.key).get((wanted.start, wanted.end))
            if flight is not None:
                flight.waiting.append(reservation_id)
                reservation.flights.append(flight)
                self.counts.joins += 1
        # Whoever makes room goes only now: the load just joined may be its.
        while len(self._live) >= self._most:
            self._end(self._next_to_expire())
            self.counts.evicted += 1
        for load in booking.loads:
            self._load(load, reservation)
        self._keep(reservation)
        self.counts.reserved += 1

    def release(self, reservation_id: str, now: float, *, arrived: bool = False) -> bool:
        """Ends a reservation. False when none of that id is live (any more), which is no error.

        What is left of its seconds comes off the queues. A load that others joined stays booked for them, unless it
        is known to have `arrived`.
        """
        self.expire(now)
        reservation = self._live.get(reservation_id)
        if reservation is None:
            return False
        self._end(reservation, arrived=arrived)
        self.counts.released += 1
        return True

    def expire(self, now: float) -> int:
        """Ends every reservation whose time is over, each at its own, and returns how many. Every call does it."""
        ended = 0
        while self._expiry and self._expiry[0][0] <= now:
            expires, reservation_id = heapq.heappop(self._expiry)
            reservation = self._live.get(reservation_id)
            if reservation is not None and reservation.expires_s == expires:
                self._now = max(self._now, expires)
                self._end(reservation)
                ended += 1
        self._now = max(self._now, now)
        self.counts.expired += ended
        return ended

    def snapshot(self, now: float) -> SavedLedger:
        """All of it as plain data, times counted from `now`."""
        self.expire(now)
        now = self._now
        for queue in (*self._devices.values(), *self._links.values()):
            queue.turns(now)
        flights = {flight.turn: flight for kept in self._live.values() for flight in kept.flights}
        return SavedLedger(
            reservations=tuple(
                SavedReservation(
                    kept.id,
                    kept.instance,
                    kept.expires_s - now,
                    kept.turn.seconds,
                    kept.turn.left_s,
                    max(0.0, kept.turn.ready_s - now),
                )
                for kept in self._live.values()
            ),
            loads=tuple(
                SavedLoad(flights[turn].load, turn.left_s, tuple(flights[turn].waiting))
                for queue in self._links.values()
                for turn in queue
            ),
            devices=tuple((key, queue.outside_s) for key, queue in self._devices.items() if queue.outside_s),
            links=tuple((key, queue.outside_s) for key, queue in self._links.items() if queue.outside_s),
            counts=replace(self.counts),
        )

    @classmethod
    def restore(
        cls, saved: SavedLedger, now: float, *, elapsed_s: float = 0.0, most: int = 100_000
    ) -> Ledger:
        """The ledger that was saved `elapsed_s` before `now`: what was to be served or to expire meanwhile is gone.

        Raises `InputError` naming what cannot be in a ledger.
        """
        saved.check()
        check_amount("elapsed_s", elapsed_s)
        ledger = cls(most=most)
        ledger._now = then = now - elapsed_s
        ledger.counts = replace(saved.counts)
        for instance, seconds in saved.devices:
            ledger._queue(ledger._devices, instance).replace(seconds, then)
        for link, seconds in saved.links:
            ledger._queue(ledger._links, link).replace(seconds, then)
        for kept in saved.reservations:
            device = ledger._queue(ledger._devices, kept.instance)
            turn = Turn(kept.device_s, kept.device_left_s, then + kept.ready_in_s)
            device.add(turn, then)
            ledger._keep(_Reservation(kept.id, kept.instance, then + kept.expires_in_s, turn, device, []))
        for entry in saved.loads:
            queue = ledger._queue(ledger._links, entry.load.link)
            turn = Turn(entry.load.seconds, entry.left_s, nbytes=entry.load.nbytes)
            queue.add(turn, then)
            flight = _Flight(entry.load, turn, queue, list(entry.waiting))
            for waiting in entry.waiting:
                ledger._live[waiting].flights.append(flight)
            ledger._depart(flight)
        ledger.expire(now)
        return ledger

    def _load(self, load: Load, reservation: _Reservation) -> None:
        queue = self._queue(self._links, load.link)
        turn = Turn(load.seconds, load.seconds, nbytes=load.nbytes)
        queue.add(turn, self._now)
        flight = _Flight(load, turn, queue, [reservation.id])
        reservation.flights.append(flight)
        self._depart(flight)

    def _depart(self, flight: _Flight) -> None:
        if flight.load.key is not None:
            self._flights.setdefault(flight.load.key, []).append(flight)

    def _land(self, flight: _Flight) -> None:
        key = flight.load.key
        if key is None or flight not in self._flights.get(key, ()):
            return
        self._flights[key].remove(flight)
        if not self._flights[key]:
            del self._flights[key]

    def _joinable(self, key: LoadKey) -> dict[tuple[int, int], _Flight]:
        """The loads in flight under that key by the tokens they bring, the first of equals."""
        found: dict[tuple[int, int], _Flight] = {}
        for flight in tuple(self._flights.get(key, ())):
            flight.queue.turns(self._now)
            if flight.turn.left_s <= 0:
                self._land(flight)
            else:
                found.setdefault((flight.load.start, flight.load.end), flight)
        return found

    def _keep(self, reservation: _Reservation) -> None:
        self._live[reservation.id] = reservation
        heapq.heappush(self._expiry, (reservation.expires_s, reservation.id))
        if len(self._expiry) > 2 * len(self._live) + 64:  # most were released before their time
            self._expiry = [(kept.expires_s, kept.id) for kept in self._live.values()]
            heapq.heapify(self._expiry)

    def _next_to_expire(self) -> _Reservation:
        while True:
            expires, reservation_id = heapq.heappop(self._expiry)
            reservation = self._live.get(reservation_id)
            if reservation is not None and reservation.expires_s == expires:
                return reservation

    def _end(self, reservation: _Reservation, *, arrived: bool = False) -> None:
        del self._live[reservation.id]
        reservation.device.remove(reservation.turn, self._now)
        for flight in reservation.flights:
            flight.waiting.remove(reservation.id)
            if flight.waiting and not arrived:
                continue
            flight.queue.remove(flight.turn, self._now)
            self._land(flight)

    def _queue(self, queues: dict[Key, Fifo], key: Key) -> Fifo:
        """The queue of that key, in which something is to be booked before another is asked for."""
        queue = queues.get(key)
        if queue is None:
            if len(queues) >= self._sweep_at:
                self._sweep(self._devices)
                self._sweep(self._links)
                self._sweep_at = max(_FEW_QUEUES, 2 * max(len(self._devices), len(self._links)))
            queue = queues[key] = Fifo(self._now)
        return queue

    def _sweep(self, queues: dict[Key, Fifo]) -> None:
        """Forgets the queues where nothing waits; where too many are left, also those where nothing is booked."""
        for key, queue in tuple(queues.items()):
            if not queue.turns(self._now) and (not queue.outside_s or len(queues) > self._most):
                del queues[key]
