"""Requests assigned one after the other, against the best that could be done with all of them in hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvlane.policy import InputError, Planner, Request, load_machine, load_model
from kvlane.policy.assignment import Assignment, Place, Seen, assign, queues
from kvlane.policy.ledger import Booking, Join, Ledger, Load, LoadKey
from kvlane.policy.objective import SOONEST, Aim, choose, device_s
from kvlane.policy.plan import EXECUTORS, Executor, Path
from kvlane.policy.units import show_seconds

PROMPT, STORED = 12_370, 12_320
PATHS: tuple[Path, ...] = ("load", "split", "recompute")


def planner_at(rate_bytes_per_s: float, executor: Executor = "bulk", model: str = "llama-3.1-8b") -> Planner:
    machine = load_machine("h100-sxm").with_link_rate(rate_bytes_per_s)
    return Planner(load_model(model), machine, executor=executor)


class Fleet:
    """Devices on one link of the fleet, and the ledger of both."""

    def __init__(self, planner: Planner, devices: int = 1) -> None:
        self.planner = planner
        self.ledger = Ledger()
        link = planner.machine.tier("host").link
        self.places = [Place(f"device {number}", scopes={link: "fleet"}) for number in range(devices)]
        self.number = 0

    def assign(
        self,
        prefix_id: str | None = None,
        *,
        now: float = 0.0,
        request: Request | None = None,
        aim: Aim = SOONEST,
        seen: Seen | None = None,
        books: bool = True,
    ) -> Assignment:
        """One more request, on the devices in turn."""
        self.number += 1
        prefix_id = prefix_id or f"prefix {self.number}"
        place = self.places[self.number % len(self.places)]
        request = request or Request(PROMPT, {"host": STORED})
        busy_s, link_s = queues(self.ledger, self.planner, request.hits, place, now, seen or Seen())
        request = replace(request, device_busy_s=busy_s, link_queue_s=link_s)
        made = assign(self.ledger, self.planner, request, place, now, prefix_id=prefix_id, aim=aim)
        if books:
            booking = made.booking(self.planner, prefix_id=prefix_id, seen=seen or Seen())
            self.ledger.reserve(str(self.number), booking, now)
        return made


def least_mean_ttft(planner: Planner, requests: int, devices: int, stored: int = STORED) -> float:
    """The least mean TTFT over every way to load some of `requests` equal ones and recompute the others, in any order.

    Either all wait for one device, or each has its own; all loads take the one link in turn. In bulk what has been
    decided so far only counts by how many load, so that the minimum over all orders is that over paths on a grid.
    """
    copy = planner.transfer("host", 16).total_s(stored)
    rest = planner.cost.recompute_s(stored, PROMPT)
    whole = planner.cost.recompute_s(0, PROMPT)
    shared = devices == 1
    # The least sum of TTFTs by how many load, all others recomputing: one more request at a time.
    least = {0: 0.0}
    for decided in range(requests):
        following: dict[int, float] = {}
        for loading, total in least.items():
            busy = loading * rest + (decided - loading) * whole if shared else 0.0
            options = {
                loading: busy + whole,
                loading + 1: max(busy, (loading + 1) * copy) + rest,
            }
            for count, ttft in options.items():
                following[count] = min(following.get(count, float("inf")), total + ttft)
        least = following
    return min(least.values()) / requests


@pytest.mark.parametrize("devices", [1, 100])
@pytest.mark.parametrize("rate", [0.1e9, 0.5e9, 2e9, 5e9, 12e9, 25e9, 50e9, 200e9, 2000e9])
@pytest.mark.parametrize("stored", [STORED, 4_096])
def test_a_hundred_at_once_are_within_five_percent_of_the_best_assignment(
    rate: float, devices: int, stored: int
) -> None:
    planner = planner_at(rate)
    fleet = Fleet(planner, devices)
    request = Request(PROMPT, {"host": stored})
    mean = sum(fleet.assign(request=request).plan.ttft_s for _ in range(100)) / 100
    assert mean <= 1.05 * least_mean_ttft(planner, 100, devices, stored)


def as_served(requests: Sequence[tuple[float, float]]) -> float:
    """The sum of TTFTs on one device which takes the first request that has all its KV; of each when that is, and what
    it computes then."""
    waiting, now, total = list(requests), 0.0, 0.0
    while waiting:
        now = max(now, min(ready for ready, _ in waiting))
        turn = next(turn for turn in waiting if turn[0] <= now)
        waiting.remove(turn)
        now += turn[1]
        total += now
    return total


@pytest.mark.parametrize("stored", [STORED, 4_096])
@pytest.mark.parametrize("rate", [0.5e9, 5e9, 25e9, 50e9, 200e9])
def test_what_is_predicted_for_a_hundred_is_about_what_happens(rate: float, stored: int) -> None:
    # Copies one after the other on the link; the device takes the first request that has all its KV.
    planner = planner_at(rate)
    fleet = Fleet(planner)
    made = [fleet.assign(request=Request(PROMPT, {"host": stored})) for _ in range(100)]
    link_s, waiting = 0.0, []
    for each in made:
        estimate = each.plan.estimates[each.plan.path]
        assert estimate is not None
        link_s += planner.transfer("host", 16).total_s(each.plan.load_tokens)
        waiting.append((link_s if each.plan.load else 0.0, estimate.compute_s))
    predicted = sum(each.plan.ttft_s for each in made)
    assert predicted == pytest.approx(as_served(waiting), rel=0.1)


def test_without_the_ledger_all_of_them_load_and_the_link_collapses() -> None:
    # The control: the same hundred decided as if each were alone.
    planner = planner_at(25e9)
    fleet = Fleet(planner, 100)
    alone = [fleet.assign(books=False) for _ in range(100)]
    assert {made.plan.path for made in alone} == {"load"}
    copy = planner.transfer("host", 16).total_s(STORED)
    mean = sum(place * copy for place in range(1, 101)) / 100
    assert mean > 2 * least_mean_ttft(planner, 100, 100)


def forced(made: Assignment, path: Path) -> Assignment | None:
    """The same request made to take `path`; None where it has no such path."""
    estimate = made.plan.estimates[path]
    if estimate is None:
        return None
    plan = replace(made.plan, estimates={path: estimate})
    busy_s = made.request.device_busy_s
    choose(plan, SOONEST, busy_s)
    ready_s = estimate.transfer_s if plan.executor == "bulk" else 0.0
    return replace(
        made, plan=plan, own=plan.load, device_s=device_s(plan.executor, estimate, busy_s), ready_s=ready_s
    )


def test_a_near_tie_by_the_whole_ttft_would_not_be_within_five_percent() -> None:
    # The control of leaving the queue that all paths share out of the margin: 3 % of a long queue is more than is at
    # stake, and sends one request after the other to the path that makes the queue longer.
    planner = planner_at(4e9)
    fleet = Fleet(planner)
    total = 0.0
    for _ in range(100):
        made = fleet.assign(request=Request(PROMPT, {"host": 4_096}), books=False)
        recompute = made.plan.estimates["recompute"]
        assert recompute is not None
        if recompute.ttft_s < made.plan.ttft_s * (1 + planner.tie_margin):
            made = forced(made, "recompute") or made
        fleet.ledger.reserve(f"booked {fleet.number}", made.booking(planner), 0.0)
        total += made.plan.ttft_s
    assert total / 100 > 1.05 * least_mean_ttft(planner, 100, 1, 4_096)


@given(
    rate=st.floats(8.5, 11).map(lambda exponent: float(10.0**exponent)),
    executor=st.sampled_from(("bulk", "layered")),
    stored=st.integers(40, 770).map(lambda units: 16 * units),
)
@example(rate=4.976e9, executor="bulk", stored=4_720)
@example(rate=3.446e9, executor="bulk", stored=4_960)
@settings(max_examples=20)
def test_a_few_are_within_five_percent_of_every_sequence_of_choices_but_for_the_first_s(
    rate: float, executor: Executor, stored: int
) -> None:
    """The first finds everything idle and takes what is soonest for it; nobody has told it who comes behind. Of five
    that can cost 12 % (a recompute a little sooner than a load keeps the other four waiting), of a hundred nothing that
    would show. With its choice in hindsight, all others are taken as they come."""
    planner = planner_at(rate, executor)
    request = Request(PROMPT, {"host": stored})

    def least(ledger: Ledger, left: int) -> float:
        """The least sum of TTFTs of `left` more requests on one device, over all that each could do."""
        if left == 0:
            return 0.0
        sums = []
        for path in PATHS:
            fleet = Fleet(planner)
            fleet.ledger = Ledger.restore(ledger.snapshot(0.0), 0.0)
            made = forced(fleet.assign(request=request, books=False), path)
            if made is not None:
                fleet.ledger.reserve(f"{left}", made.booking(planner), 0.0)
                sums.append(made.plan.ttft_s + least(fleet.ledger, left - 1))
        return min(sums)

    sums = []
    for path in PATHS:
        fleet = Fleet(planner)
        first = forced(fleet.assign(request=request, books=False), path)
        if first is not None:
            fleet.ledger.reserve("first", first.booking(planner), 0.0)
            others = sum(fleet.assign(request=request).plan.ttft_s for _ in range(4))
            sums.append(first.plan.ttft_s + others)
    assert min(sums) <= 1.05 * least(Ledger(), 5)


class TestJoining:
    @pytest.mark.parametrize("rate", [25e9, 50e9, 200e9])
    def test_a_hundred_with_one_prefix_are_one_load_and_ninety_nine_joins(self, rate: float) -> None:
        fleet = Fleet(planner_at(rate))
        assigned = [fleet.assign("the same") for _ in range(100)]
        assert [made.joined for made in assigned] == [False] + [True] * 99
        assert ["joins an equal one" in made.reason for made in assigned] == [False] + [True] * 99
        assert {made.plan.load_tokens for made in assigned} == {STORED}
        copy = fleet.planner.transfer("host", 16).total_s(STORED)
        link = fleet.places[0].link(fleet.planner.machine.tier("host").link)
        assert fleet.ledger.link_queue_s(link, 0.0) == pytest.approx(copy)
        assert fleet.ledger.counts.joins == 99
        # Each waits for the copy once, and for those before it on the device.
        rest = fleet.planner.cost.recompute_s(STORED, PROMPT)
        for place, made in enumerate(assigned):
            assert made.plan.ttft_s == pytest.approx(max(copy, place * rest) + rest)

    def test_on_other_devices_it_is_another_load(self) -> None:
        fleet = Fleet(planner_at(200e9), devices=2)
        joined = Counter(fleet.assign("the same").joined for _ in range(10))
        assert joined == {False: 2, True: 8}

    def test_by_layer_a_join_waits_outside_the_pass(self) -> None:
        fleet = Fleet(planner_at(50e9, "layered"))
        first, second = fleet.assign("the same"), fleet.assign("the same")
        assert (first.joined, second.joined) == (False, True)
        # The first is held while its layers arrive, the second computes only.
        assert (first.ready_s, first.device_s) == (0.0, first.plan.ttft_s)
        estimate = second.plan.estimates[second.plan.path]
        assert estimate is not None
        assert (second.ready_s, second.device_s) == (estimate.transfer_s, estimate.compute_s)

    @pytest.mark.parametrize("executor", ["bulk", "layered", "two_ended"])
    @pytest.mark.parametrize("rate", [0.3e9, 1e9, 2e9, 5e9, 12e9, 25e9])
    @pytest.mark.parametrize("stored", [STORED, 4_096])
    def test_on_a_slow_link_they_are_one_load_too_which_grows_while_it_is_worth_it(
        self, rate: float, executor: Executor, stored: int
    ) -> None:
        fleet = Fleet(planner_at(rate, executor))
        planner, request = fleet.planner, Request(PROMPT, {"host": stored})
        moved: list[tuple[int, int]] = []
        assigned = []
        for _ in range(100):
            # By the model nobody who joins would be better off by more than the margin with a load of their own.
            alone = fleet.assign(f"another {fleet.number}", request=request, books=False)
            made = fleet.assign("the same", request=request)
            busy_s = made.request.device_busy_s
            assert made.plan.ttft_s - busy_s <= (alone.plan.ttft_s - busy_s) * (1 + planner.tie_margin)
            moved += [(part.start, part.end) for part in made.own]
            assigned.append(made)
        # No token is moved twice, and what is moved is one run.
        moved.sort()
        assert all(one[1] == other[0] for one, other in pairwise(moved))
        link = fleet.places[0].link(planner.machine.tier("host").link)
        one = planner.transfer("host", 16)
        extra_s = (len(moved) - 1) * one.link.latency_s
        assert fleet.ledger.link_queue_s(link, 0.0) <= one.total_s(stored) + extra_s + 1e-9
        # Those before the first load recompute, those after it all join.
        first = next(number for number, made in enumerate(assigned) if made.own)
        assert all(made.plan.path == "recompute" for made in assigned[:first])
        assert not assigned[first].joined
        assert all(made.joined for made in assigned[first + 1 :])

    @pytest.mark.parametrize("rate", [0.3e9, 1e9, 2e9, 4e9, 12e9])
    def test_one_load_that_grows_is_no_worse_than_the_best_time_to_load_everything_at_once(
        self, rate: float
    ) -> None:
        fleet = Fleet(planner_at(rate))
        planner = fleet.planner
        transfer = planner.transfer("host", 16)
        link_s, arrives = 0.0, {}
        waiting = []
        for _ in range(100):
            made = fleet.assign("the same")
            for part in made.own:
                link_s += transfer.total_s(part.tokens)
                arrives[part.start, part.end] = link_s
            awaited = [
                *((join.start, join.end) for join in made.joins),
                *((p.start, p.end) for p in made.own),
            ]
            estimate = made.plan.estimates[made.plan.path]
            assert estimate is not None
            waiting.append((max((arrives[each] for each in awaited), default=0.0), estimate.compute_s))
        # So many recompute, then one loads everything and all others wait for it.
        copy = transfer.total_s(STORED)
        rest, whole = planner.cost.recompute_s(STORED, PROMPT), planner.cost.recompute_s(0, PROMPT)
        bests = [
            as_served([(0.0, whole)] * before + [(copy, rest)] * (100 - before)) for before in range(101)
        ]
        assert as_served(waiting) <= 1.05 * min(bests)

    def test_what_a_load_in_flight_lacks_is_loaded_beside_it(self) -> None:
        executors: tuple[Executor, ...] = ("bulk", "layered")
        for executor in executors:
            fleet = Fleet(planner_at(2e9, executor))
            made = self.flight(fleet, 0, 8_000, request=Request(PROMPT, {"host": STORED}, device_busy_s=0.0))
            if executor == "bulk":
                assert not made.own  # an idle device computes the rest sooner than the link brings it
            fleet = Fleet(planner_at(2e9, executor))
            busy = Booking(fleet.places[0].instance, 1.0, 2.0)
            fleet.ledger.reserve("busy", busy, 0.0)
            made = self.flight(fleet, 0, 8_000, request=Request(PROMPT, {"host": STORED}))
            assert (made.plan.path, made.plan.load_tokens) == ("load", STORED)
            assert [(part.start, part.end) for part in made.own] == [(8_000, STORED)]
            assert "8000 of the tokens join a load in flight" in made.reason
            (load,) = made.booking(fleet.planner, prefix_id="p").loads
            assert (load.start, load.end) == (8_000, STORED)
            rest = fleet.planner.cost.recompute_s(STORED, PROMPT)
            assert made.plan.ttft_s == pytest.approx(2.0 + rest)
            # Both are waited for by whoever comes next, and both go when nobody waits any more.
            after = fleet.assign("p")
            assert [(join.start, join.end) for join in after.joins] == [(0, 8_000), (8_000, STORED)]
            assert not after.own
            link = fleet.places[0].link(fleet.planner.machine.tier("host").link)
            for name in ("ahead", "1", "2"):
                assert fleet.ledger.link_queue_s(link, 0.0) > 0
                fleet.ledger.release(name, 0.0)
            assert fleet.ledger.link_queue_s(link, 0.0) == 0.0

    def test_by_layer_the_device_is_kept_while_what_is_loaded_beside_a_join_arrives(self) -> None:
        fleet = Fleet(planner_at(5e9, "layered"))
        fleet.assign("the same")
        made = fleet.assign("the same")
        assert made.joined
        assert made.own
        flying = fleet.ledger.in_flight(made.joins[0].key, 0.0)[0]
        begun_s = max(made.request.device_busy_s, flying.remaining_s)
        assert made.ready_s == flying.remaining_s
        assert made.device_s == pytest.approx(made.plan.ttft_s - begun_s)

    def test_windows_and_states_go_on_from_a_load_that_is_whole(self) -> None:
        cases: tuple[tuple[str, Request, int], ...] = (
            ("gpt-oss-20b", Request(PROMPT, {"host": STORED}), 8_000),
            (
                "qwen3-next-80b-a3b",
                Request(PROMPT, {"host": STORED}, state_checkpoints=(4_096, 8_192, 12_288)),
                8_192,
            ),
        )
        for model, request, end in cases:
            fleet = Fleet(planner_at(1e9, model=model))
            fleet.ledger.reserve("busy", Booking(fleet.places[0].instance, 1.0, 20.0), 0.0)
            made = self.flight(fleet, 0, end, request=request)
            assert [part.start for part in made.own] == [end]
            after = fleet.assign("p", request=request)
            assert len(after.joins) == 2
            assert after.plan.load_tokens == made.plan.load_tokens

    def flight(self, fleet: Fleet, start: int, end: int, *, request: Request) -> Assignment:
        """How `request` is assigned while tokens `[start, end)` of its prefix arrive in a millisecond."""
        place = fleet.places[0]
        key = LoadKey(place.instance, "host", "p")
        link = place.link(fleet.planner.machine.tier("host").link)
        load = Load(link, 1e-3, 1.0, key, start, end)
        fleet.ledger.reserve("ahead", Booking(place.instance, 1.0, 0.0, loads=(load,)), 0.0)
        return fleet.assign("p", request=request)

    def test_a_split_in_flight_is_joined_as_far_as_it_goes(self) -> None:
        request = Request(PROMPT, {"host": STORED})
        made = self.flight(Fleet(planner_at(1e9)), 0, 8_000, request=request)
        assert (made.plan.path, made.plan.load_tokens) == ("split", 8_000)
        assert made.joined

    def test_more_in_flight_than_is_usable_fits_where_layers_keep_everything(self) -> None:
        request = Request(PROMPT, {"host": 8_000})
        made = self.flight(Fleet(planner_at(1e9)), 0, STORED, request=request)
        assert (made.plan.path, made.plan.load_tokens) == ("load", 8_000)
        assert made.joined
        # A window's layers move only what lies before the load's end.
        windowed = planner_at(1e9, model="gpt-oss-20b")
        assert self.flight(Fleet(windowed), 0, STORED, request=request).joined is False
        assert self.flight(Fleet(windowed), 0, 8_000, request=request).joined

    def test_a_gap_after_the_resident_tokens_is_not_joined(self) -> None:
        request = Request(PROMPT, {"host": STORED}, resident_tokens=1_000)
        fleet = Fleet(planner_at(1e9))
        assert self.flight(fleet, 2_000, STORED, request=request).joined is False
        fleet = Fleet(planner_at(1e9))
        assert self.flight(fleet, 500, STORED, request=request).joined

    def test_a_state_is_joined_only_where_it_was_stored(self) -> None:
        planner = planner_at(1e9, model="qwen3-next-80b-a3b")
        request = Request(PROMPT, {"host": STORED}, state_checkpoints=(4_096, 8_192))
        made = self.flight(Fleet(planner), 0, 8_192, request=request)
        assert (made.plan.path, made.plan.load_tokens, made.joined) == ("load", 8_192, True)
        made = self.flight(Fleet(planner), 0, 4_096, request=request)
        assert (made.plan.path, made.plan.load_tokens, made.joined) == ("split", 4_096, True)
        assert self.flight(Fleet(planner), 0, 6_144, request=request).joined is False

    def test_a_load_of_its_own_that_is_sooner_is_made(self) -> None:
        fleet = Fleet(planner_at(200e9))
        place = fleet.places[0]
        slow = place.link("another")
        load = Load(slow, 5.0, 1.0, LoadKey(place.instance, "host", "p"), 0, STORED)
        fleet.ledger.reserve("ahead", Booking(place.instance, 1.0, 0.0, loads=(load,)), 0.0)
        assert fleet.assign("p").joined is False


class TestJoiningTwoTiers:
    REQUEST = Request(128_100, {"host": 64_000, "remote": 128_000})

    @pytest.mark.parametrize("executor", ["bulk", "layered"])
    @pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
    def test_a_hundred_with_one_prefix_are_one_load_over_both_links(
        self, model: str, executor: Executor
    ) -> None:
        fleet = Fleet(Planner(load_model(model), load_machine("h100-sxm"), executor=executor))
        first, *others = [fleet.assign("the same", request=self.REQUEST) for _ in range(100)]
        assert [segment.tier for segment in first.plan.load] == ["host", "remote"]
        assert first.joins == ()
        for made in others:
            assert made.plan.load == first.plan.load
            assert [join.key.tier for join in made.joins] == ["host", "remote"]
            assert made.booking(fleet.planner, prefix_id="the same").loads == ()
        # What is booked is what the plan says copies take, also of layers that keep a window only.
        chosen = first.plan.estimates[first.plan.path]
        assert chosen is not None
        queues_s = [seconds for seconds, _ in fleet.ledger.links(0.0).values()]
        assert max(queues_s) == pytest.approx(chosen.transfer_s)
        # Gone before it arrives, the first leaves both parts to the others; the last of them takes both along.
        for number in range(1, 101):
            assert max(seconds for seconds, _ in fleet.ledger.links(0.0).values()) > 0
            fleet.ledger.release(str(number), 0.0)
        assert [seconds for seconds, _ in fleet.ledger.links(0.0).values()] == [0.0, 0.0]

    def test_a_part_without_the_rest_of_its_load_has_no_windows_to_join(self) -> None:
        machine = load_machine("h100-sxm")
        for model, joins in (("gpt-oss-20b", 0), ("llama-3.1-8b", 1)):
            fleet = Fleet(Planner(load_model(model), machine))
            first = fleet.assign("the same", request=self.REQUEST)
            end = first.plan.load[0].end
            made = fleet.assign("the same", request=Request(128_100, {"host": end}))
            assert len(made.joins) == joins

    def test_of_two_loads_that_fit_the_sooner_is_joined_whatever_the_order(self) -> None:
        planner = planner_at(1e9)
        for tiers in (("host", "remote"), ("remote", "host")):
            fleet = Fleet(planner)
            instance = fleet.places[0].instance
            for tier, end in (("host", 4_000), ("remote", 8_000)):
                link = fleet.places[0].link(planner.machine.tier(tier).link)
                load = Load(link, 1e-3, 1.0, LoadKey(instance, tier, "p"), 0, end)
                fleet.ledger.reserve(tier, Booking(instance, 1.0, 0.0, loads=(load,)), 0.0)
            hits = {"host": 4_000, "remote": STORED}
            made = fleet.assign("p", request=Request(PROMPT, {tier: hits[tier] for tier in tiers}))
            assert made.joins == (Join(LoadKey(instance, "remote", "p"), 0, 8_000),)
            assert [(each.tier, each.end) for each in made.plan.load] == [("remote", 8_000)]

    @pytest.mark.parametrize("rate", [2e9, 5e9, 10e9])
    def test_of_a_hundred_with_one_prefix_that_compute_the_front_nearly_all_join(self, rate: float) -> None:
        fleet = Fleet(planner_at(rate, "two_ended"))
        first, *others = [fleet.assign("the same") for _ in range(100)]
        begin = first.plan.load[0].start
        assert begin > 0
        assert all(made.joined for made in others)
        # Behind a longer device queue more of the front is worth loading, as long as there is any left to load.
        assert others[0].own[0].end == begin
        assert not any(made.own for made in others[20:])

    def test_what_lies_before_a_load_in_flight_is_computed_meanwhile_by_who_can(self) -> None:
        cases: tuple[tuple[Executor, int], ...] = (("two_ended", 1), ("layered", 0))
        for executor, joins in cases:
            planner = planner_at(1e9, executor)
            fleet = Fleet(planner)
            instance = fleet.places[0].instance
            link = fleet.places[0].link(planner.machine.tier("host").link)
            load = Load(link, 0.2, 1.0, LoadKey(instance, "host", "p"), 2_000, STORED)
            fleet.ledger.reserve("ahead", Booking(instance, 1.0, 0.0, loads=(load,)), 0.0)
            made = fleet.assign("p", request=Request(PROMPT, {"host": STORED}))
            assert len(made.joins) == joins
            if joins:
                rest = planner.cost.recompute_s(STORED, PROMPT)
                assert [(each.start, each.end) for each in made.plan.load] == [(2_000, STORED)]
                assert made.plan.path == "split"
                assert made.plan.ttft_s == pytest.approx(max(0.2, planner.prefill.prefill_s(0, 2_000)) + rest)
                assert made.device_s == pytest.approx(planner.prefill.prefill_s(0, 2_000) + rest)


class TestState:
    def test_what_is_seen_stands_in_for_what_is_booked(self) -> None:
        fleet = Fleet(planner_at(25e9))
        for _ in range(20):
            fleet.assign()
        link = fleet.planner.machine.tier("host").link
        seen = Seen(device_busy_s=0.25, link_queue_s={link: 0.0})
        idle = fleet.planner.decide(Request(PROMPT, {"host": STORED}, device_busy_s=0.25))
        made = fleet.assign(seen=seen, books=False)
        assert made.plan.ttft_s == idle.ttft_s
        # To ask changes nothing; to book replaces what was booked.
        key = fleet.places[0].link(link)
        before = fleet.ledger.link_queue_s(key, 0.0)
        assert before > 1.0
        made = fleet.assign(seen=seen)
        booked = sum(load.seconds for load in made.booking(fleet.planner, seen=seen).loads)
        assert fleet.ledger.link_queue_s(key, 0.0) == pytest.approx(booked)
        assert fleet.ledger.device_busy_s(fleet.places[0].instance, 0.0) == pytest.approx(
            0.25 + made.device_s
        )

    def test_what_is_seen_of_one_link_leaves_the_ledger_s_word_for_the_rest(self) -> None:
        fleet = Fleet(planner_at(25e9))
        for _ in range(5):
            fleet.assign()
        busy = fleet.ledger.device_busy_s(fleet.places[0].instance, 0.0)
        made = fleet.assign(seen=Seen(link_queue_s={"another": 9.0}), books=False)
        assert made.request.device_busy_s == busy > 0
        assert made.request.link_queue_s["host"] > 0

    def test_time_serves_what_was_booked(self) -> None:
        fleet = Fleet(planner_at(25e9))
        for _ in range(5):
            fleet.assign()
        later = fleet.assign(now=100.0)
        assert later.request.device_busy_s == later.request.link_queue_s["host"] == 0.0


class TestObjective:
    # On this link recomputing is sooner, but keeps the device for twenty times as long.
    SLOW_LINK = 2.5e9

    def test_device_time_leaves_the_device_to_others(self) -> None:
        fleet = Fleet(planner_at(self.SLOW_LINK))
        soonest = fleet.assign(books=False)
        sparing = fleet.assign(books=False, aim=Aim("device_time"))
        assert (soonest.plan.path, sparing.plan.path) == ("recompute", "load")
        assert sparing.plan.ttft_s > soonest.plan.ttft_s
        assert sparing.device_s < soonest.device_s / 10
        assert sparing.plan.load_tokens == STORED

    def test_blend_goes_over_to_sparing_the_device_as_more_wait_for_it(self) -> None:
        fleet = Fleet(planner_at(self.SLOW_LINK))
        paths = [fleet.assign(books=False, aim=Aim("blend", beside=beside)).plan.path for beside in range(6)]
        assert paths[0] == "recompute"
        assert paths[-1] == "load"
        assert paths == sorted(paths, reverse=True)

    def test_by_layer_the_device_is_kept_while_layers_are_waited_for(self) -> None:
        fleet = Fleet(planner_at(self.SLOW_LINK, "layered"))
        made = fleet.assign(books=False, request=Request(PROMPT, {"host": STORED}), aim=Aim("device_time"))
        for estimate in made.plan.estimates.values():
            assert estimate is not None
            assert device_s(made.plan.executor, estimate, 0.0) == estimate.ttft_s

    def test_soon_enough_is_enough(self) -> None:
        fleet = Fleet(planner_at(self.SLOW_LINK))
        estimates = fleet.assign(books=False).plan.estimates
        load, recompute = estimates["load"], estimates["recompute"]
        assert load is not None
        assert recompute is not None
        for slo, path in (
            (load.high_s, "load"),  # met by both: the device is spared
            (load.high_s - 1e-6, "recompute"),  # met for certain only by recomputing
            (1e-3, "recompute"),  # met by neither: the soonest
        ):
            for objective in ("ttft", "device_time"):
                made = fleet.assign(books=False, aim=Aim(objective, slo))
                assert made.plan.path == path, (slo, objective)

    def test_the_reason_says_what_decided(self) -> None:
        fleet = Fleet(planner_at(self.SLOW_LINK))

        def reason(aim: Aim) -> str:
            return fleet.assign(books=False, aim=aim).reason

        load, recompute = (fleet.assign(books=False).plan.estimates[path] for path in ("load", "recompute"))
        assert load is not None
        assert recompute is not None
        assert " < " in reason(SOONEST)
        assert reason(Aim("device_time")).startswith(
            f"load keeps the device for {show_seconds(load.compute_s)}, "
        )
        assert f"recompute keeps the device for {show_seconds(recompute.ttft_s)}" in reason(
            Aim("device_time")
        )
        assert "for each of 5 requests beside this one" in reason(Aim("blend", beside=5))
        assert "all of these are sure to meet 10.0 s" in reason(Aim(ttft_slo_s=10.0))
        assert reason(Aim(ttft_slo_s=1e-3)).startswith("no path is sure to meet 1.00 ms; recompute of")
        tied = replace(fleet.assign(books=False).plan, tie_margin=30.0)
        assert "near-tie goes to the steadier path" in choose(tied, Aim("device_time")).reason(tied)

    def test_what_is_not_an_aim_is_refused_by_name(self) -> None:
        with pytest.raises(InputError) as refused:
            Aim("speed")  # type: ignore[arg-type]
        assert refused.value.field == "objective"
        with pytest.raises(InputError) as refused:
            Aim("ttft", -1.0)
        assert refused.value.field == "ttft_slo_s"

    @given(
        planner=st.from_type(Planner), request=st.from_type(Request), busy=st.just(0.0) | st.floats(0, 100)
    )
    @settings(max_examples=100)
    def test_the_soonest_of_a_plan_is_what_the_planner_took(
        self, planner: Planner, request: Request, busy: float
    ) -> None:
        plan = planner.decide(replace(request, device_busy_s=busy))
        before = (plan.path, plan.load, plan.ttft_s, plan.exposed_s)
        choose(plan, SOONEST, busy)
        if len(request.hits) < 2 and planner.executor != "two_ended":
            assert (plan.path, plan.load, plan.ttft_s, plan.exposed_s) == before
        # One path may have several ways, and what the planner took of it be a near-tie itself, of a faster one that the
        # plan does not keep: a steadier path may then be near to that.
        if plan.path == before[0]:
            assert (plan.path, plan.load, plan.ttft_s, plan.exposed_s) == before
        else:
            assert plan.ttft_s - busy <= (before[2] - busy) * (1 + planner.tie_margin)

    @given(
        planner=st.from_type(Planner),
        request=st.from_type(Request),
        busy=st.just(0.0) | st.floats(0, 100),
        beside=st.integers(0, 50),
    )
    @settings(max_examples=100)
    def test_no_path_costs_less_than_the_chosen_by_more_than_the_tie_margin(
        self, planner: Planner, request: Request, busy: float, beside: int
    ) -> None:
        plan = planner.decide(replace(request, device_busy_s=busy))

        def cost(path: Path) -> float:
            estimate = plan.estimates[path]
            assert estimate is not None
            return estimate.ttft_s - busy + beside * device_s(plan.executor, estimate, busy)

        choose(plan, Aim("blend", beside=beside), busy)
        costs = [cost(path) for path, estimate in plan.estimates.items() if estimate is not None]
        assert min(costs) <= cost(plan.path) <= min(costs) * (1 + plan.tie_margin) + 1e-12


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_load_in_bulk_keeps_the_device_only_once_it_is_there(executor: Executor) -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"), executor=executor)
    made = assign(Ledger(), planner, Request(9000, {"host": 8000}), Place("one"), 0.0)
    booking, plan = made.booking(planner), made.plan
    load = plan.estimates[plan.path]
    assert load is not None
    assert load.load
    expected = (load.compute_s, load.transfer_s) if executor == "bulk" else (load.ttft_s, 0.0)
    assert (booking.device_s, booking.device_ready_s) == expected
