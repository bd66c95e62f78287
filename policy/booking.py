"""What is booked on devices and links, as values: who shares a link, what a decision takes, what is kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.units import LONGEST_S

Scope = Literal["device", "node", "fleet"]

# A reservation nobody releases lasts so many predicted TTFTs, and this long at least.
EXPIRY_TTFTS = 10.0
EXPIRY_LEAST_S = 5.0

# More than any link will carry while something waits for it.
_MOST_BYTES = 1e18


class LinkKey(NamedTuple):
    """One link, shared by all who name the same: `owner` is an instance, a node, or "" for the fleet's."""

    scope: Scope
    owner: str
    link: str


class LoadKey(NamedTuple):
    """What a load brings where: a load in flight is joined only on an equal key."""

    instance: str
    tier: str
    prefix_id: str


class Join(NamedTuple):
    """One load in flight to wait for: the first under `key` that brings the tokens `[start, end)`."""

    key: LoadKey
    start: int
    end: int


def link_key(link: str, scope: Scope, instance: str, node: str | None = None) -> LinkKey:
    """The key of `link` for an instance: its own, its node's, or the fleet's.

    An instance that does not say its node is a node of its own.
    """
    if scope == "fleet":
        return LinkKey(scope, "", link)
    return LinkKey(scope, node if scope == "node" and node is not None else instance, link)


# Loads and bookings are made for every decision that reserves, and loads kept: see `LoadSegment`.
class Load(msgspec.Struct, frozen=True, gc=False):
    """A load to book on one link: its seconds there (the queue apart), its bytes, and its tokens `[start, end)`.

    Without a `key` nobody can join it. As one part of a load from several tiers it belongs to one that ends at
    `load_end`: what a window or a state keeps is only in the last part.
    """

    link: LinkKey
    seconds: float
    nbytes: float
    key: LoadKey | None = None
    start: int = 0
    end: int = 0
    load_end: int | None = None


class Booking(msgspec.Struct, frozen=True, gc=False):
    """What one decision takes.

    `device_s` are seconds of the instance's device, none of them before `device_ready_s` from now: a bulk load
    arrives first. `joins` are loads in flight that it waits for; they are booked already. `device_busy_s` and
    `link_queue_s` are what somebody saw waiting: they replace what the ledger holds before this is booked.
    """

    instance: str
    ttft_s: float
    device_s: float
    device_ready_s: float = 0.0
    loads: tuple[Load, ...] = ()
    joins: tuple[Join, ...] = ()
    device_busy_s: float | None = None
    link_queue_s: Mapping[LinkKey, float] = {}

    def check(self) -> None:
        """Raises `InputError` naming the first amount that cannot be."""
        check_amount("ttft_s", self.ttft_s)
        check_amount("device_s", self.device_s)
        check_amount("device_ready_s", self.device_ready_s)
        for load in self.loads:
            check_amount("loads.seconds", load.seconds)
            check_amount("loads.nbytes", load.nbytes, _MOST_BYTES)
        if self.device_busy_s is not None:
            check_amount("device_busy_s", self.device_busy_s)
        for link, seconds in self.link_queue_s.items():
            check_amount(f"link_queue_s.{link.link}", seconds)


def check_amount(name: str, value: float, most: float = LONGEST_S) -> None:
    """Raises `InputError` naming `name` unless `value` is a number from 0 to `most`."""
    if type(value) is float and 0 <= value <= most:
        return  # nearly all: each booking has half a dozen
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise InputError(name, f"is {str(value)[:40]}", f"a number from 0 to {most:g}")


@dataclass(frozen=True, slots=True)
class InFlight:
    """A load that has not arrived: tokens `[start, end)`, there in `remaining_s`; `joins` others wait for it.

    The whole load that it is part of ends at `load_end`.
    """

    start: int
    end: int
    remaining_s: float
    joins: int
    load_end: int


@dataclass(slots=True)
class Counts:
    """Since the start: `reserved` is `released` + `expired` + `evicted` + those live. An evicted reservation made
    room before its time was over; `joins` are loads not made because one in flight was joined."""

    reserved: int = 0
    released: int = 0
    expired: int = 0
    evicted: int = 0
    joins: int = 0


@dataclass(frozen=True, slots=True)
class SavedReservation:
    """A live reservation; its times count from the moment it was saved."""

    id: str
    instance: str
    expires_in_s: float
    device_s: float
    device_left_s: float
    ready_in_s: float


@dataclass(frozen=True, slots=True)
class SavedLoad:
    """A load that had not arrived, and who waits for it."""

    load: Load
    left_s: float
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """A whole ledger as plain data, queues in their order; `devices` and `links` hold what was seen and not booked."""

    reservations: tuple[SavedReservation, ...] = ()
    loads: tuple[SavedLoad, ...] = ()
    devices: tuple[tuple[str, float], ...] = ()
    links: tuple[tuple[LinkKey, float], ...] = ()
    counts: Counts = field(default_factory=Counts)

    def check(self) -> None:
        """Raises `InputError` naming what cannot be in a ledger."""
        ids = {reservation.id for reservation in self.reservations}
        if len(ids) < len(self.reservations):
            raise InputError("reservations", "hold an id twice", "each id once")
        for saved in self.reservations:
            for name in ("expires_in_s", "device_s", "device_left_s"):
                check_amount(f"reservations.{name}", getattr(saved, name), EXPIRY_TTFTS * LONGEST_S)
            if not abs(saved.ready_in_s) <= LONGEST_S:
                raise InputError("reservations.ready_in_s", f"is {saved.ready_in_s}", "a number of seconds")
        for load in self.loads:
            check_amount("loads.seconds", load.load.seconds)
            check_amount("loads.nbytes", load.load.nbytes, _MOST_BYTES)
            check_amount("loads.left_s", load.left_s, load.load.seconds)
            if not load.waiting or not ids.issuperset(load.waiting):
                raise InputError("loads.waiting", "names no live reservation", "ids of reservations")
        for _, seconds in (*self.devices, *self.links):
            check_amount("waiting_s", seconds)
