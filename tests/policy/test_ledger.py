"""The ledger: what is booked is served, released, expired or still there, and nothing else."""

from __future__ import annotations

import math
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvlane.policy import InputError
from kvlane.policy.booking import EXPIRY_LEAST_S, EXPIRY_TTFTS, SavedLedger
from kvlane.policy.ledger import Booking, Join, Ledger, LinkKey, Load, LoadKey, link_key

HOST = link_key("pcie", "device", "a")
NAS = link_key("nas", "fleet", "a")
PREFIX = LoadKey("a", "host", "p")


def load(seconds: float, key: LoadKey | None = None, link: LinkKey = HOST, end: int = 64) -> Load:
    return Load(link, seconds, 1e9 * seconds, key, 0, end)


def booking(device_s: float = 0.0, *loads: Load, **parts: Any) -> Booking:
    return msgspec.structs.replace(Booking("a", 1.0, device_s, loads=loads), **parts)


class TestKeys:
    def test_a_link_is_shared_by_those_who_name_the_same(self) -> None:
        assert link_key("pcie", "device", "a") != link_key("pcie", "device", "b")
        assert link_key("pcie", "device", "a", "n") != link_key("pcie", "device", "b", "n")
        assert link_key("nic", "node", "a", "n") == link_key("nic", "node", "b", "n")
        assert link_key("nas", "fleet", "a", "n") == link_key("nas", "fleet", "b", "m")

    def test_an_instance_that_names_no_node_is_its_own(self) -> None:
        assert link_key("nic", "node", "a") != link_key("nic", "node", "b")
        # A node of the same name as an instance is that node, but a device's link is never a node's.
        assert link_key("nic", "node", "a") == link_key("nic", "node", "b", "a")
        assert link_key("nic", "device", "a") != link_key("nic", "node", "b", "a")


class TestQueues:
    def test_both_queues_are_served_as_time_passes(self) -> None:
        ledger = Ledger()
        ledger.reserve("1", booking(2.0, load(3.0)), 10.0)
        ledger.reserve("2", booking(1.0, load(1.0)), 11.0)
        assert (ledger.device_busy_s("a", 11.0), ledger.link_queue_s(HOST, 11.0)) == (2.0, 3.0)
        assert (ledger.device_busy_s("a", 12.5), ledger.link_queue_s(HOST, 12.5)) == (0.5, 1.5)
        assert (ledger.device_busy_s("a", 14.9), ledger.link_queue_s(HOST, 14.9)) == (0.0, 0.0)
        assert ledger.device_busy_s("b", 11.0) == ledger.link_queue_s(NAS, 11.0) == 0.0

    def test_device_work_waits_for_its_load_and_lets_others_by(self) -> None:
        ledger = Ledger()
        ledger.reserve("load", booking(1.0, load(5.0), device_ready_s=5.0), 0.0)
        assert ledger.device_busy_s("a", 4.0) == 1.0  # nothing of it could be done yet
        ledger.reserve("recompute", booking(2.0), 4.0)
        assert ledger.device_busy_s("a", 5.0) == 2.0
        assert ledger.device_busy_s("a", 6.0) == 1.0
        assert ledger.waiting("a", 6.5) == 1
        assert ledger.device_busy_s("a", 7.0) == ledger.waiting("a", 7.0) == 0

    def test_bytes_shrink_with_the_seconds_that_move_them(self) -> None:
        ledger = Ledger()
        ledger.reserve("1", booking(0.0, load(4.0)), 0.0)
        assert ledger.links(1.0) == {HOST: (3.0, 3e9)}

    def test_what_somebody_saw_replaces_what_was_booked_and_is_never_added(self) -> None:
        ledger = Ledger()
        ledger.reserve("1", booking(4.0, load(4.0), ttft_s=100.0), 0.0)
        ledger.reserve(
            "2", booking(1.0, load(1.0), ttft_s=100.0, device_busy_s=0.5, link_queue_s={HOST: 2.0}), 1.0
        )
        assert (ledger.device_busy_s("a", 1.0), ledger.link_queue_s(HOST, 1.0)) == (1.5, 3.0)
        ledger.reserve(
            "3", booking(1.0, load(1.0), ttft_s=100.0, device_busy_s=30.0, link_queue_s={HOST: 40.0}), 1.0
        )
        assert (ledger.device_busy_s("a", 1.0), ledger.link_queue_s(HOST, 1.0)) == (31.0, 41.0)
        assert (ledger.device_busy_s("a", 21.0), ledger.link_queue_s(HOST, 21.0)) == (11.0, 21.0)
        ledger.reserve("4", booking(0.0, device_busy_s=0.0, link_queue_s={HOST: 0.0}), 21.0)
        assert (ledger.device_busy_s("a", 21.0), ledger.link_queue_s(HOST, 21.0)) == (0.0, 0.0)

    def test_less_seen_than_booked_means_that_the_oldest_is_done(self) -> None:
        ledger = Ledger()
        ledger.reserve("old", booking(3.0), 0.0)
        ledger.reserve("new", booking(2.0), 0.0)
        ledger.reserve("now", booking(0.0, device_busy_s=2.5), 0.0)
        ledger.release("old", 0.0)
        assert ledger.device_busy_s("a", 0.0) == 2.0
        ledger.release("new", 0.0)
        assert ledger.device_busy_s("a", 0.0) == 0.0

    def test_a_clock_that_goes_back_stands_still(self) -> None:
        ledger = Ledger()
        ledger.reserve("1", booking(5.0), 100.0)
        assert ledger.device_busy_s("a", 102.0) == 3.0
        assert ledger.device_busy_s("a", 1.0) == 3.0
        assert ledger.device_busy_s("a", 103.0) == 2.0


class TestRelease:
    def test_what_is_left_comes_off_the_queues_once(self) -> None:
        ledger = Ledger()
        for name in "123":
            ledger.reserve(name, booking(2.0, load(1.0)), 0.0)
        assert ledger.release("1", 0.5)
        assert (ledger.device_busy_s("a", 0.5), ledger.link_queue_s(HOST, 0.5)) == (4.0, 2.0)
        assert not ledger.release("1", 0.5)
        assert not ledger.release("never", 0.5)
        assert (ledger.device_busy_s("a", 0.5), ledger.link_queue_s(HOST, 0.5)) == (4.0, 2.0)
        assert ledger.counts.released == 1

    def test_one_that_is_never_released_expires(self) -> None:
        ledger = Ledger()
        ledger.reserve("short", booking(900.0, ttft_s=0.01), 0.0)
        ledger.reserve("long", booking(900.0, ttft_s=2.0), 0.0)
        assert ledger.device_busy_s("a", EXPIRY_LEAST_S - 0.01) > 1790
        assert ledger.device_busy_s("a", EXPIRY_LEAST_S) == 900.0
        assert "short" not in ledger
        assert ledger.expire(2.0 * EXPIRY_TTFTS - 0.01) == 0
        assert ledger.expire(2.0 * EXPIRY_TTFTS) == 1
        assert ledger.device_busy_s("a", 2.0 * EXPIRY_TTFTS) == 0.0
        assert (ledger.counts.expired, len(ledger)) == (2, 0)

    def test_an_id_is_free_again_once_it_is_over(self) -> None:
        ledger = Ledger()
        ledger.reserve("1", booking(1.0, ttft_s=1.0), 0.0)
        ledger.release("1", 1.0)
        ledger.reserve("1", booking(1.0, ttft_s=5.0), 1.0)
        assert ledger.expire(12.0) == 0  # the first one's time is not the second one's
        with pytest.raises(InputError, match="reserved already"):
            ledger.reserve("1", booking(1.0), 12.0)

    def test_beyond_the_limit_the_next_to_expire_goes(self) -> None:
        ledger = Ledger(most=2)
        ledger.reserve("late", booking(1.0, ttft_s=9.0), 0.0)
        ledger.reserve("soon", booking(1.0, ttft_s=1.0), 0.0)
        ledger.reserve("new", booking(1.0, ttft_s=3.0), 0.0)
        assert [name in ledger for name in ("late", "soon", "new")] == [True, False, True]
        assert (ledger.counts.evicted, ledger.device_busy_s("a", 0.0)) == (1, 2.0)


class TestJoins:
    def test_a_join_pays_what_remains_and_takes_no_more_of_the_link(self) -> None:
        ledger = Ledger()
        ledger.reserve("ahead", booking(0.0, load(1.0)), 0.0)
        ledger.reserve("first", booking(0.1, load(2.0, PREFIX)), 0.0)
        (flight,) = ledger.in_flight(PREFIX, 0.5)
        assert (flight.start, flight.end, flight.remaining_s, flight.joins) == (0, 64, 2.5, 0)
        for name in range(99):
            ledger.reserve(f"joins {name}", booking(0.1, joins=(Join(PREFIX, 0, 64),)), 0.5)
        assert ledger.link_queue_s(HOST, 0.5) == 2.5
        (flight,) = ledger.in_flight(PREFIX, 0.5)
        assert (flight.remaining_s, flight.joins, ledger.counts.joins) == (2.5, 99, 99)

    @pytest.mark.parametrize("other", [("b", "host", "p"), ("a", "disk", "p"), ("a", "host", "q")])
    def test_only_an_equal_instance_tier_and_prefix_is_joined(self, other: tuple[str, str, str]) -> None:
        ledger = Ledger()
        ledger.reserve("first", booking(0.1, load(2.0, PREFIX)), 0.0)
        assert ledger.in_flight(LoadKey(*other), 0.0) == ()

    def test_what_should_have_arrived_or_named_no_prefix_is_not_joined(self) -> None:
        ledger = Ledger()
        ledger.reserve("first", booking(0.1, load(2.0, PREFIX), load(1.0)), 0.0)
        assert ledger.in_flight(PREFIX, 1.99) != ()
        assert ledger.in_flight(PREFIX, 2.0) == ()

    def test_a_load_goes_on_for_those_who_joined_it(self) -> None:
        ledger = Ledger()
        ledger.reserve("first", booking(0.1, load(2.0, PREFIX)), 0.0)
        ledger.reserve("second", booking(0.1, joins=(Join(PREFIX, 0, 64),)), 0.0)
        ledger.release("first", 0.5)
        assert ledger.link_queue_s(HOST, 0.5) == 1.5
        assert ledger.in_flight(PREFIX, 0.5) != ()
        ledger.release("second", 1.0)
        assert ledger.link_queue_s(HOST, 1.0) == 0.0
        assert ledger.in_flight(PREFIX, 1.0) == ()

    def test_a_load_that_arrived_early_is_over_for_all(self) -> None:
        ledger = Ledger()
        ledger.reserve("first", booking(0.1, load(2.0, PREFIX)), 0.0)
        ledger.reserve("second", booking(0.1, joins=(Join(PREFIX, 0, 64),)), 0.0)
        ledger.release("second", 0.5, arrived=True)
        assert ledger.link_queue_s(HOST, 0.5) == 0.0
        assert ledger.in_flight(PREFIX, 0.5) == ()
        assert ledger.release("first", 0.6)

    def test_of_loads_that_bring_the_same_the_first_is_joined_and_of_others_the_one_named(self) -> None:
        ledger = Ledger()
        ledger.reserve("more", booking(0.1, load(2.0, PREFIX, end=64)), 0.0)
        ledger.reserve("less", booking(0.1, load(1.0, PREFIX, end=32)), 0.0)
        ledger.reserve("again", booking(0.1, load(1.0, PREFIX, end=64)), 0.0)
        found = ledger.in_flight(PREFIX, 0.0)
        assert [(flight.end, flight.remaining_s) for flight in found] == [(64, 2.0), (32, 3.0)]
        ledger.reserve("waits", booking(0.1, joins=(Join(PREFIX, 0, 32),)), 0.0)
        assert [flight.joins for flight in ledger.in_flight(PREFIX, 0.0)] == [0, 1]
        # One that is not in flight (any more) is not waited for.
        ledger.reserve("alone", booking(0.1, joins=(Join(PREFIX, 0, 16),)), 0.0)
        assert ledger.counts.joins == 1


class TestRefusals:
    @pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf, 1e12])
    @pytest.mark.parametrize(
        "field",
        ["ttft_s", "device_s", "device_ready_s", "device_busy_s", "loads.seconds", "link_queue_s.pcie"],
    )
    def test_an_amount_that_cannot_be_is_named_and_nothing_is_booked(self, field: str, amount: float) -> None:
        wrong = booking(1.0, load(amount if field == "loads.seconds" else 1.0))
        if field == "link_queue_s.pcie":
            wrong = msgspec.structs.replace(wrong, link_queue_s={HOST: amount})
        elif field != "loads.seconds":
            parts: dict[str, Any] = {field: amount}
            wrong = msgspec.structs.replace(wrong, **parts)
        ledger = Ledger()
        with pytest.raises(InputError) as refused:
            ledger.reserve("1", wrong, 0.0)
        assert refused.value.field == field
        assert (len(ledger), ledger.device_busy_s("a", 0.0), ledger.links(0.0)) == (0, 0.0, {})


def test_memory_is_bounded_by_what_is_live() -> None:
    ledger = Ledger(most=50)

    def reserve(numbers: range, *, releases: bool) -> None:
        """Each on an instance of its own that is said to be busy for long, so that nothing is done soon."""
        for number in numbers:
            here = f"instance {number}"
            link = link_key("pcie", "device", here)
            wanted = msgspec.structs.replace(
                booking(0.1, load(0.1, LoadKey(here, "host", "p"), link)),
                instance=here,
                device_busy_s=1000.0,
                link_queue_s={link: 1000.0},
            )
            ledger.reserve(str(number), wanted, number * 0.001)
            if releases:
                ledger.release(str(number), number * 0.001)

    tracemalloc.start()
    try:
        reserve(range(2_000), releases=False)
        reserve(range(2_000, 4_000), releases=True)
        before, _ = tracemalloc.get_traced_memory()
        reserve(range(4_000, 8_000), releases=False)
        reserve(range(8_000, 12_000), releases=True)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after < 1.2 * before + 10_000
    counts = ledger.counts
    assert counts.reserved == 12_000 == counts.evicted + counts.released + counts.expired + len(ledger)
    assert counts.evicted > 5_000


def test_forgetting_queues_forgets_nothing_that_waits() -> None:
    ledger = Ledger()
    for number in range(500):
        here = f"instance {number}"
        link = link_key("pcie", "device", here)
        wanted = msgspec.structs.replace(
            booking(1.0, load(2.0, link=link)), instance=here, link_queue_s={link: 3.0}
        )
        ledger.reserve(here, wanted, float(number))
        assert (ledger.device_busy_s(here, float(number)), ledger.link_queue_s(link, float(number))) == (1, 5)
        ledger.release(here, float(number))


def test_many_that_wait_for_their_loads_cost_no_more_than_a_few() -> None:
    def seconds(ready_s: float) -> float:
        """CPU time to ask about a device for which a thousand turns are booked."""
        ledger = Ledger()
        for number in range(1_000):
            ledger.reserve(str(number), booking(1.0, device_ready_s=ready_s * number, ttft_s=1e4), 0.0)
        started = time.process_time()
        for step in range(2_000):
            ledger.device_busy_s("a", step * 1e-3)
        return time.process_time() - started

    assert min(seconds(100.0) for _ in range(3)) < 5 * min(seconds(0.0) for _ in range(3))


def test_many_that_were_released_do_not_keep_one_from_expiring() -> None:
    ledger = Ledger()
    ledger.reserve("kept", booking(1.0, ttft_s=2.0), 0.0)
    for number in range(1_000):
        ledger.reserve(str(number), booking(1.0), 0.0)
        ledger.release(str(number), 0.0)
    assert (ledger.expire(19.9), "kept" in ledger) == (0, True)
    assert (ledger.expire(20.0), "kept" in ledger) == (1, False)


class TestSnapshot:
    def saved(self) -> SavedLedger:
        ledger = Ledger()
        ledger.reserve("first", booking(0.5, load(2.0, PREFIX), device_ready_s=2.0), 7.0)
        ledger.reserve("second", booking(0.5, joins=(Join(PREFIX, 0, 64),), device_ready_s=2.0), 7.0)
        ledger.reserve("third", booking(9.0, load(1.0, link=NAS), link_queue_s={NAS: 3.0}), 7.0)
        return ledger.snapshot(7.5)

    def test_it_survives_json_and_a_clock_that_starts_anew(self) -> None:
        saved = self.saved()
        again = msgspec.json.decode(msgspec.json.encode(saved), type=SavedLedger)
        assert again == saved
        ledger = Ledger.restore(again, 1000.0)
        (flight,) = ledger.in_flight(PREFIX, 1000.0)
        assert (flight.remaining_s, flight.joins) == (1.5, 1)
        assert ledger.link_queue_s(NAS, 1000.0) == 3.5
        assert ledger.device_busy_s("a", 1000.0) == 9.5
        assert ledger.release("third", 1000.0)
        assert ledger.link_queue_s(NAS, 1000.0) == 2.5
        assert ledger.counts == replace(saved.counts, released=1)

    def test_the_time_it_was_away_has_passed(self) -> None:
        ledger = Ledger.restore(self.saved(), 1000.0, elapsed_s=2.0)
        assert ledger.in_flight(PREFIX, 1000.0) == ()
        assert ledger.link_queue_s(NAS, 1000.0) == 1.5
        assert len(Ledger.restore(self.saved(), 1000.0, elapsed_s=60.0)) == 0

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("reservations", lambda saved: {"reservations": saved.reservations * 2}),
            ("loads.waiting", lambda saved: {"reservations": ()}),
            ("loads.left_s", lambda saved: {"loads": (replace(saved.loads[0], left_s=1e5),)}),
            (
                "reservations.expires_in_s",
                lambda saved: {
                    "reservations": (
                        replace(saved.reservations[0], expires_in_s=math.nan),
                        *saved.reservations[1:],
                    )
                },
            ),
            ("waiting_s", lambda saved: {"devices": (("a", -1.0),)}),
        ],
    )
    def test_what_cannot_be_in_a_ledger_is_refused(self, field: str, change: Any) -> None:
        saved = self.saved()
        with pytest.raises(InputError) as refused:
            Ledger.restore(replace(saved, **change(saved)), 0.0)
        assert refused.value.field == field


amounts = st.just(0.0) | st.floats(0.001, 30.0)
instances = st.sampled_from("ab")


class Copy:
    """One load on the link of the plain ledger below."""

    def __init__(self, left: float, key: LoadKey, asker: str) -> None:
        self.left, self.key, self.waiting = left, key, [asker]


class PlainLink:
    """The plainest ledger of one link there could be: a list of copies, the first of which is moving."""

    def __init__(self) -> None:
        self.now = 0.0
        self.copies: list[Copy] = []
        self.expires: dict[str, float] = {}

    def waiting_s(self) -> float:
        return sum(copy.left for copy in self.copies)

    def until_arrival(self, key: LoadKey) -> float | None:
        ahead = 0.0
        for copy in self.copies:
            ahead += copy.left
            if copy.key == key:
                return ahead
        return None

    def join(self, key: LoadKey, name: str) -> None:
        next(copy for copy in self.copies if copy.key == key).waiting.append(name)

    def end(self, name: str, arrived: bool = False) -> None:
        del self.expires[name]
        for copy in self.copies:
            if name in copy.waiting:
                copy.waiting.remove(name)
                copy.left = 0.0 if arrived else copy.left
        self.copies = [copy for copy in self.copies if copy.waiting and copy.left > 0]

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.expires:
            name = min(self.expires, key=lambda live: (self.expires[live], live))
            if self.expires[name] > until:
                break
            self._move(self.expires[name])
            self.end(name)
        self._move(until)

    def _move(self, until: float) -> None:
        seconds, self.now = until - self.now, until
        for copy in self.copies:
            moved = min(copy.left, seconds)
            copy.left -= moved
            seconds -= moved
        self.copies = [copy for copy in self.copies if copy.left > 1e-12]


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of reservations, joins, releases, restarts and waiting, on a link that two instances share."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(most=6)
        self.plain = PlainLink()
        self.number = 0

    @rule(
        target=ids,
        instance=instances,
        device=amounts,
        ready=amounts,
        link=st.floats(0.001, 30.0),
        ttft=amounts,
        prefix=st.sampled_from("pq"),
        joins=st.booleans(),
    )
    def reserve(
        self,
        instance: str,
        device: float,
        ready: float,
        link: float,
        ttft: float,
        prefix: str,
        joins: bool,
    ) -> str:
        plain, key = self.plain, LoadKey(instance, "host", prefix)
        self.number += 1
        name = str(self.number)
        wanted = Booking(instance, ttft, device, ready)
        if joins and plain.until_arrival(key) is not None:
            wanted = msgspec.structs.replace(wanted, joins=(Join(key, 0, 64),))
            plain.join(key, name)
        else:
            wanted = msgspec.structs.replace(wanted, loads=(load(link, key, NAS),))
        if len(plain.expires) == 6:
            plain.end(min(plain.expires, key=lambda live: (plain.expires[live], live)))
        if wanted.loads:
            plain.copies.append(Copy(link, key, name))
        plain.expires[name] = plain.now + max(EXPIRY_TTFTS * ttft, EXPIRY_LEAST_S)
        self.ledger.reserve(name, wanted, plain.now)
        return name

    @rule(name=consumes(ids), arrived=st.booleans())
    def release(self, name: str, arrived: bool) -> None:
        known = name in self.plain.expires
        assert self.ledger.release(name, self.plain.now, arrived=arrived) == known
        assert not self.ledger.release(name, self.plain.now)
        if known:
            self.plain.end(name, arrived)

    @rule(seconds=amounts)
    def wait(self, seconds: float) -> None:
        self.plain.wait(seconds)

    @rule()
    def restart(self) -> None:
        saved = self.ledger.snapshot(self.plain.now)
        encoded = msgspec.json.decode(msgspec.json.encode(saved), type=SavedLedger)
        assert encoded == saved
        self.ledger = Ledger.restore(encoded, self.plain.now, most=6)

    @invariant()
    def the_same_waits_on_the_link(self) -> None:
        now = self.plain.now
        waiting = self.ledger.link_queue_s(NAS, now)
        assert waiting >= 0.0
        assert waiting == pytest.approx(self.plain.waiting_s(), abs=1e-6)
        assert all(
            pair == pytest.approx((waiting, 1e9 * waiting)) for pair in self.ledger.links(now).values()
        )

    @invariant()
    def the_same_loads_are_in_flight(self) -> None:
        for key in (LoadKey(instance, "host", prefix) for instance in "ab" for prefix in "pq"):
            found, remaining = self.ledger.in_flight(key, self.plain.now), self.plain.until_arrival(key)
            waits = [flight.remaining_s for flight in found] or [0.0]
            assert waits == [pytest.approx(remaining or 0.0, abs=1e-6)]

    @invariant()
    def the_same_reservations_live(self) -> None:
        counts = self.ledger.counts
        self.ledger.expire(self.plain.now)
        assert len(self.ledger) == len(self.plain.expires)
        assert all(name in self.ledger for name in self.plain.expires)
        assert counts.reserved == counts.released + counts.expired + counts.evicted + len(self.ledger)

    @invariant()
    def no_device_owes_or_keeps_what_nobody_booked(self) -> None:
        for instance in "ab":
            assert self.ledger.device_busy_s(instance, self.plain.now) >= 0.0
        if not len(self.ledger):
            assert all(self.ledger.device_busy_s(instance, self.plain.now) == 0.0 for instance in "ab")


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
