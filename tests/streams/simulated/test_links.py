"""Links on the virtual clock against their closed forms, and against a slow count of who carried what when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.errors import InputError
from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.transfer.layout import CopyDescriptor

RATE = 1000.0

arrivals = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 5000)), min_size=1, max_size=6)


def times(link, batches):
    """When each batch, alone on a stream of its own and handed over at a time, was done."""
    with SimulatedBackend({"*": link}) as backend:
        source, destination = backend.host_bytes(5000 * 7), backend.device_bytes(5000 * 7)
        never, done = backend.flag(), [backend.event() for _ in batches]
        streams = [backend.stream(str(number)) for number in range(len(batches))]
        order = sorted(range(len(batches)), key=lambda number: batches[number][0])
        for number in order:
            backend.sleep(batches[number][0] - backend.now())
            copies = [CopyDescriptor(0, 5000 * number, 5000 * number, batches[number][1])]
            backend.copy(
                streams[number], destination, source, copies, never, began=backend.event(), done=done[number]
            )
        for event in done:
            backend.synchronize(event)
        ends = [backend.time_of(event) for event in done]
        for stream in streams:
            backend.release(stream)
    return ends


def shared_by_hand(batches):
    """Processor sharing, from one change of the number of batches on the link to the next."""
    left = {number: float(nbytes) for number, (_, nbytes) in enumerate(batches)}
    begin = {number: at for number, (at, _) in enumerate(batches)}
    ends, now = {}, 0.0
    while left:
        here = [number for number in left if begin[number] <= now]
        coming = [begin[number] for number in left if begin[number] > now]
        if not here:
            now = min(coming)
            continue
        each = RATE / len(here)
        soonest = min(left[number] for number in here) / each
        step = min([soonest] + [at - now for at in coming])
        now += step
        for number in here:
            left[number] -= step * each
            if left[number] <= 1e-9 * RATE:
                ends[number] = now
        left = {number: rest for number, rest in left.items() if number not in ends}
    return [ends[number] for number in range(len(batches))]


class TestExclusive:
    @given(batches=arrivals)
    def test_serves_one_after_another_in_the_order_they_came(self, batches):
        link = SimulatedLink(RATE, per_copy_s=0.1, latency_s=0.2, per_batch_s=0.05)
        ends = times(link, batches)
        free = 0.0
        for number in sorted(range(len(batches)), key=lambda number: batches[number][0]):
            at, nbytes = batches[number]
            free = max(free, at) + 0.35 + nbytes / RATE
            assert ends[number] == pytest.approx(free)


class TestFair:
    @pytest.mark.parametrize("flows", [1, 2, 3, 7])
    def test_equal_flows_take_as_many_times_as_long_and_end_together(self, flows):
        ends = times(SimulatedLink(RATE, sharing="fair"), [(0.0, 500)] * flows)
        assert ends == [pytest.approx(0.5 * flows)] * flows
        assert len(set(ends)) == 1

    def test_the_smaller_of_two_goes_at_half_the_rate_and_the_larger_fast_at_last(self):
        ends = times(SimulatedLink(RATE, sharing="fair"), [(0.0, 300), (0.0, 1000)])
        assert ends == pytest.approx([0.6, 1.3])

    @given(batches=arrivals)
    def test_is_what_counting_by_hand_comes_to(self, batches):
        ends = times(SimulatedLink(RATE, sharing="fair"), batches)
        assert ends == pytest.approx(shared_by_hand(batches), rel=1e-6, abs=1e-6)

    @given(batches=arrivals)
    def test_carries_as_much_as_an_exclusive_one(self, batches):
        ends = times(SimulatedLink(RATE, sharing="fair"), batches)
        assert max(ends) == pytest.approx(max(times(SimulatedLink(RATE), batches)))

    def test_what_a_batch_costs_whatever_its_bytes_holds_up_no_other(self):
        ends = times(SimulatedLink(RATE, per_copy_s=1.0, sharing="fair"), [(0.0, 500), (0.9, 500)])
        assert ends == pytest.approx([1.5, 2.4])


class TestStream:
    def test_latency_is_paid_once_for_batches_that_follow_one_another(self):
        link = SimulatedLink(RATE, latency_s=1.0)
        with SimulatedBackend({"*": link}) as backend:
            stream, never = backend.stream("s"), backend.flag()
            source, destination = backend.host_bytes(300), backend.device_bytes(300)
            done = [backend.event() for _ in range(3)]
            for number, event in enumerate(done):
                if number == 2:
                    backend.sleep(10)
                copy = [CopyDescriptor(0, 100 * number, 100 * number, 100)]
                backend.copy(stream, destination, source, copy, never, began=backend.event(), done=event)
            for event in done:
                backend.synchronize(event)
            assert [backend.time_of(event) for event in done] == pytest.approx([1.1, 1.2, 11.1])
            backend.release(stream)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("bytes_per_s", {"bytes_per_s": 0.0}),
        ("bytes_per_s", {"bytes_per_s": float("nan")}),
        ("bytes_per_s", {"bytes_per_s": float("inf"), "sharing": "fair"}),
        ("per_copy_s", {"per_copy_s": -1.0}),
        ("latency_s", {"latency_s": float("inf")}),
        ("per_batch_s", {"per_batch_s": float("nan")}),
        ("sharing", {"sharing": "unfair"}),
    ],
)
def test_a_link_that_cannot_be_is_refused(field, options):
    with pytest.raises(InputError) as caught:
        SimulatedLink(**options)
    assert caught.value.field == field
