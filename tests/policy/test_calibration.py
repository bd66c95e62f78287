"""Fits recover what the samples were made from, never go below zero, and refuse what is no measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlane.policy.calibration import PrefillSample, TransferSample, fit_link, fit_pass
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link
from kvlane.policy.prefill_cost import PassCost

# (resident, new): full prefills, and passes after a prefix, each kind spread widely enough to tell the terms apart.
FRESH = [(0, new) for new in (16, 64, 512, 2048, 8192, 32_768)]
EXTEND = [(resident, new) for resident in (64, 2048, 16_384) for new in (1, 128, 1024, 8192)]
SIZES = [(copies, copies * size) for copies in (1, 8, 64) for size in (4096, 1 << 20, 1 << 26)]


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: float(10.0**exponent))


@st.composite
def pass_costs(draw: st.DrawFn) -> tuple[PassCost, list[tuple[int, int]]]:
    """A cost and the points of the kind it is for; at least one of its terms is there."""
    overhead = draw(st.just(0.0) | magnitudes(-6, 0))
    token = draw(st.just(0.0) | magnitudes(-8, -2))
    pair = draw(st.just(0.0) | magnitudes(-13, -6))
    points = draw(st.sampled_from((FRESH, EXTEND)))
    context = 0.0 if points is FRESH else draw(st.just(0.0) | magnitudes(-10, -4))
    assume(overhead + token + pair + context > 0)
    cost = PassCost(overhead, token, pair, context, rectangle=draw(st.booleans()))
    # Between a nanosecond and a day or two, ten times slower or faster: what a clock can have measured.
    assume(all(1e-7 < cost.pass_s(*point) < 1e4 for point in points))
    return cost, points


def timed(cost: PassCost, points: Sequence[tuple[int, int]]) -> list[PrefillSample]:
    return [PrefillSample(resident, new, cost.pass_s(resident, new)) for resident, new in points]


def carried(link: Link, sizes: Sequence[tuple[int, int]]) -> list[TransferSample]:
    return [
        TransferSample(size, copies, copies * link.per_copy_s + size / link.rate_bytes_per_s)
        for copies, size in sizes
    ]


def assert_same_pass(found: PassCost, cost: PassCost, samples: Sequence[PrefillSample]) -> None:
    """Every term within a millionth of the sample in which it weighs most: closer says nothing about seconds."""
    assert found.rectangle == cost.rectangle
    for part in ("overhead_s", "token_s", "pair_s", "context_s"):
        only = replace(
            PassCost(0.0, 0.0, 0.0, rectangle=cost.rectangle),
            **{part: abs(getattr(found, part) - getattr(cost, part))},
        )
        off = max(only.pass_s(s.resident_tokens, s.new_tokens) / s.seconds for s in samples)
        assert off < 1e-6, part


class TestPass:
    @given(drawn=pass_costs())
    def test_exact_samples_give_back_their_coefficients(self, drawn: tuple[PassCost, list[tuple[int, int]]]):
        cost, points = drawn
        samples = timed(cost, points)
        fit = fit_pass(samples, rectangle=cost.rectangle)
        assert_same_pass(fit.cost, cost, samples)
        assert fit.relative_error < 1e-9

    @given(drawn=pass_costs(), factor=magnitudes(-1, -0.5))
    def test_a_machine_so_many_times_slower_costs_so_many_times_more(
        self, drawn: tuple[PassCost, list[tuple[int, int]]], factor: float
    ):
        cost, points = drawn
        samples = [
            replace(sample, seconds=sample.seconds * factor * (1 + 0.1 * (at % 3)))
            for at, sample in enumerate(timed(cost, points))
        ]
        fit = fit_pass(samples, rectangle=cost.rectangle)
        slower = fit_pass([replace(s, seconds=s.seconds * 1000) for s in samples], rectangle=cost.rectangle)
        for resident, new in points:
            assert slower.cost.pass_s(resident, new) == pytest.approx(
                1000 * fit.cost.pass_s(resident, new), rel=1e-6
            )
        assert slower.relative_error == pytest.approx(fit.relative_error, rel=1e-6, abs=1e-9)

    @given(drawn=pass_costs(), noise=st.lists(st.floats(-0.2, 0.2), min_size=12, max_size=12))
    def test_noise_in_the_samples_is_never_amplified_at_them(
        self, drawn: tuple[PassCost, list[tuple[int, int]]], noise: list[float]
    ):
        cost, points = drawn
        samples = [
            replace(sample, seconds=sample.seconds * (1 + off))
            for sample, off in zip(timed(cost, points), noise, strict=False)
        ]
        fit = fit_pass(samples, rectangle=cost.rectangle)
        # The true cost is among the candidates, so the squares of the best one's residuals sum to no more than its.
        allowed = math.sqrt(sum((1 / (1 + off) - 1) ** 2 for off in noise[: len(samples)]))
        assert fit.relative_error <= allowed + 1e-9

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("rectangle", [False, True])
    @pytest.mark.parametrize("points", [FRESH, EXTEND], ids=["fresh", "extend"])
    def test_noisy_samples_predict_what_was_not_among_them(
        self, points: list[tuple[int, int]], rectangle: bool, seed: int
    ):
        cost = PassCost(2e-3, 2e-5, 4e-9, 0.0 if points is FRESH else 3e-7, rectangle)
        noise = np.random.default_rng(seed).uniform(-0.02, 0.02, len(points))
        samples = [
            replace(sample, seconds=sample.seconds * (1 + float(off)))
            for sample, off in zip(timed(cost, points), noise, strict=True)
        ]
        fit = fit_pass(samples, rectangle=rectangle).cost
        unseen = [(0, 256), (0, 12_370)] if points is FRESH else [(11_776, 594), (2048, 2048), (300, 16)]
        for resident, new in unseen:
            assert fit.pass_s(resident, new) == pytest.approx(cost.pass_s(resident, new), rel=0.05)

    @given(
        seconds=st.lists(magnitudes(-6, 4), min_size=12, max_size=12),
        rectangle=st.booleans(),
        points=st.sampled_from((FRESH, EXTEND)),
    )
    def test_whatever_was_measured_no_coefficient_is_negative_and_the_error_is_the_largest_residual(
        self, seconds: list[float], rectangle: bool, points: list[tuple[int, int]]
    ):
        samples = [
            PrefillSample(resident, new, taken)
            for (resident, new), taken in zip(points, seconds, strict=False)
        ]
        fit = fit_pass(samples, rectangle=rectangle)
        cost = fit.cost
        assert min(cost.overhead_s, cost.token_s, cost.pair_s, cost.context_s) >= 0
        residuals = [abs(cost.pass_s(s.resident_tokens, s.new_tokens) / s.seconds - 1) for s in samples]
        assert fit.relative_error == pytest.approx(max(residuals), rel=1e-6, abs=1e-12)

    @given(drawn=pass_costs(), shuffled=st.randoms(use_true_random=False), off=st.floats(-0.3, 0.3))
    def test_the_order_of_the_samples_does_not_matter(
        self, drawn: tuple[PassCost, list[tuple[int, int]]], shuffled, off: float
    ):
        cost, points = drawn
        samples = timed(cost, points)
        samples[0] = replace(samples[0], seconds=samples[0].seconds * (1 + off))
        other = list(samples)
        shuffled.shuffle(other)
        one, two = (fit_pass(order, rectangle=cost.rectangle) for order in (samples, other))
        for resident, new in points:
            assert one.cost.pass_s(resident, new) == pytest.approx(two.cost.pass_s(resident, new), rel=1e-6)
        assert one.relative_error == pytest.approx(two.relative_error, rel=1e-6, abs=1e-9)

    def test_the_context_is_a_term_only_after_a_prefix(self):
        assert fit_pass(timed(PassCost(1e-3, 1e-5, 1e-9), FRESH)).cost.context_s == 0
        # Three terms need three samples from token 0, and four after a prefix.
        fit_pass(timed(PassCost(1e-3, 1e-5, 1e-9), FRESH[:3]))
        fit_pass(timed(PassCost(1e-3, 1e-5, 1e-9), EXTEND[:4]))

    def test_a_short_sample_weighs_as_much_as_a_long_one(self):
        # By absolute seconds the last sample would outweigh the first one a million times, and the overhead be lost.
        cost = PassCost(5e-4, 1e-5, 1e-8)
        samples = timed(cost, FRESH)
        samples[-1] = replace(samples[-1], seconds=samples[-1].seconds * 1.01)
        assert fit_pass(samples).cost.pass_s(0, 16) == pytest.approx(cost.pass_s(0, 16), rel=0.02)

    @pytest.mark.parametrize(
        "samples",
        [
            [],
            timed(PassCost(1e-3, 1e-5, 1e-9), FRESH[:2]),
            timed(PassCost(1e-3, 1e-5, 1e-9), EXTEND[:3]),
        ],
        ids=["none", "two from token 0", "three after a prefix"],
    )
    def test_fewer_samples_than_coefficients_are_refused(self, samples: list[PrefillSample]):
        with pytest.raises(InputError, match="at least") as caught:
            fit_pass(samples)
        assert caught.value.field == "samples"

    @pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf])
    def test_seconds_that_are_none_are_refused(self, seconds: float):
        assert_refused(fit_pass, [*timed(PassCost(1e-3, 1e-5, 1e-9), FRESH), PrefillSample(0, 100, seconds)])

    @pytest.mark.parametrize(("resident", "new"), [(0, 0), (16, 0), (0, -1), (-1, 16)])
    def test_a_pass_that_computes_nothing_is_refused(self, resident: int, new: int):
        assert_refused(
            fit_pass, [*timed(PassCost(1e-3, 1e-5, 1e-9), FRESH), PrefillSample(resident, new, 1.0)]
        )


class TestLink:
    @given(per_copy=st.just(0.0) | magnitudes(-8, -2), rate=magnitudes(5, 12))
    def test_exact_samples_give_back_rate_and_copy_cost(self, per_copy: float, rate: float):
        link = Link("pcie", rate, per_copy_s=per_copy)
        samples = carried(link, SIZES)
        # A term that no sample shows a millionth of cannot be told from none.
        assume(max(s.bytes / rate / s.seconds for s in samples) > 1e-3)
        fit = fit_link("pcie", samples, "nine transfers")
        assert fit.link.rate_bytes_per_s == pytest.approx(rate, rel=1e-6)
        off = abs(fit.link.per_copy_s - per_copy)
        assert max(s.copies * off / s.seconds for s in samples) < 1e-6
        assert fit.relative_error < 1e-9

    def test_says_that_it_was_measured_and_has_no_latency_of_its_own(self):
        link = fit_link("pcie", carried(Link("any", 2e10, per_copy_s=1e-5), SIZES), "nine transfers").link
        assert (link.name, link.source, link.origin) == ("pcie", "calibration", "nine transfers")
        assert (link.latency_s, link.rate_table) == (0.0, ())

    @given(noise=st.lists(st.floats(-0.2, 0.2), min_size=len(SIZES), max_size=len(SIZES)))
    def test_the_error_is_the_largest_residual_and_noise_is_not_amplified(self, noise: list[float]):
        samples = [
            replace(sample, seconds=sample.seconds * (1 + off))
            for sample, off in zip(carried(Link("pcie", 2e10, per_copy_s=1e-5), SIZES), noise, strict=True)
        ]
        fit = fit_link("pcie", samples, "noisy transfers")
        again = carried(fit.link, SIZES)
        residuals = [abs(b.seconds / a.seconds - 1) for a, b in zip(samples, again, strict=True)]
        assert fit.relative_error == pytest.approx(max(residuals), rel=1e-6, abs=1e-12)
        assert fit.relative_error <= math.sqrt(sum((1 / (1 + off) - 1) ** 2 for off in noise)) + 1e-9
        assert fit.link.per_copy_s >= 0

    @given(
        shuffled=st.randoms(use_true_random=False),
        noise=st.lists(st.floats(-0.2, 0.2), min_size=len(SIZES), max_size=len(SIZES)),
    )
    def test_the_order_of_the_samples_does_not_matter(self, shuffled, noise: list[float]):
        samples = [
            replace(sample, seconds=sample.seconds * (1 + off))
            for sample, off in zip(carried(Link("pcie", 2e10, per_copy_s=1e-5), SIZES), noise, strict=True)
        ]
        other = list(samples)
        shuffled.shuffle(other)
        one, two = (fit_link("pcie", order, "transfers") for order in (samples, other))
        assert one.link.rate_bytes_per_s == pytest.approx(two.link.rate_bytes_per_s, rel=1e-6)
        assert one.link.per_copy_s == pytest.approx(two.link.per_copy_s, rel=1e-6, abs=1e-15)

    @given(
        size=st.integers(1, 1 << 30),
        steps=st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0.1, 0.95)), min_size=1, max_size=6),
        seconds=magnitudes(-2, 2),
        copies=st.integers(1, 100),
    )
    def test_more_bytes_in_less_time_are_no_link(
        self, size: int, steps: list[tuple[int, float]], seconds: float, copies: int
    ):
        samples = [TransferSample(size, copies, seconds)]
        for more, share in steps:
            last = samples[-1]
            samples.append(TransferSample(last.bytes + more, copies, last.seconds * share))
        assert_refused(slope_of, samples, match="do not take longer for more bytes")

    def test_as_much_time_for_any_bytes_is_no_link(self):
        samples = [TransferSample(size, 2, 1e-3) for size in (1_000_000, 10_000_000, 100_000_000)]
        assert_refused(slope_of, samples, match="do not take longer for more bytes")

    @pytest.mark.parametrize("count", [0, 1])
    def test_fewer_than_two_samples_are_refused(self, count: int):
        samples = carried(Link("pcie", 2e10, per_copy_s=1e-5), SIZES[:count])
        assert_refused(slope_of, samples, match="at least 2")

    @pytest.mark.parametrize(
        "bad",
        [
            TransferSample(0, 1, 1.0),
            TransferSample(-1, 1, 1.0),
            TransferSample(4096, 0, 1.0),
            TransferSample(4096, -1, 1.0),
            *(TransferSample(4096, 1, taken) for taken in (0.0, -1.0, math.nan, math.inf)),
        ],
        ids=str,
    )
    def test_what_is_no_measurement_is_refused(self, bad: TransferSample):
        assert_refused(slope_of, [*carried(Link("pcie", 2e10, per_copy_s=1e-5), SIZES), bad])


def slope_of(samples: Sequence[TransferSample]) -> object:
    return fit_link("pcie", samples, "made up by a test")


def assert_refused(
    fit: Callable[..., object], samples: Sequence[object], match: str = "no measurement"
) -> None:
    with pytest.raises(InputError, match=match) as caught:
        fit(samples)
    assert caught.value.field == "samples"
