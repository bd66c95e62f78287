"""Fits of passes and links: known answers, known parameters under noise, and what too few samples give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy.calibration import (
    PrefillSample,
    TransferSample,
    calibrate_link,
    calibrate_pass,
    fit_link,
    fit_pass,
)
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link
from kvlane.policy.prefill_cost import PassCost
from kvlane.policy.units import parse_rate, show_rate

TRUE_PASS = PassCost(overhead_s=0.01, token_s=2e-5, pair_s=6e-10)
TRUE_LINK = Link("link", 20e9, per_copy_s=5e-6, latency_s=2e-3)
LENGTHS = (1024, 2048, 4096, 8192, 16384)


@pytest.fixture(scope="module")
def known() -> dict:
    """The published answers, beside the checkout where there are any."""
    file = Path(__file__).resolve().parents[2].parent / "shared" / "known_answers.json"
    if not file.is_file():
        pytest.skip("needs ../shared/known_answers.json beside the checkout")
    return json.loads(file.read_text(encoding="utf-8"))


def passes(count: int, noise: float, seed: int, cost: PassCost = TRUE_PASS) -> list[PrefillSample]:
    draw = np.random.default_rng(seed)
    lengths = draw.permutation(np.resize(LENGTHS, count))
    factors = np.exp(noise * draw.standard_normal(count))
    return [
        PrefillSample(0, int(length), cost.pass_s(0, int(length)) * factor)
        for length, factor in zip(lengths, factors, strict=True)
    ]


def seconds(link: Link, count: int, copies: int) -> float:
    return link.latency_s + copies * link.per_copy_s + count / link.rate_bytes_per_s


def transfers(count: int, noise: float, seed: int, link: Link = TRUE_LINK) -> list[TransferSample]:
    draw = np.random.default_rng(seed)
    shapes = [(size, copies) for size in (10**7, 10**8, 10**9) for copies in (64, 640, 6400)]
    found = []
    for at in draw.permutation(np.resize(np.arange(len(shapes)), count)):
        size, copies = shapes[at]
        factor = float(np.exp(noise * draw.standard_normal()))
        found.append(TransferSample(size, copies, seconds(link, size, copies) * factor))
    return found


class TestKnownAnswers:
    def test_a_load_is_a_floor_plus_a_slope(self, known: dict) -> None:
        case = known["pull_fit"]
        per_token = 131_072
        samples = [TransferSample(tokens * per_token, 1, ms / 1e3) for tokens, ms in case["points_ms"]]
        plain, noisy = fit_link("pull", samples, "").link, calibrate_link("pull", samples).link
        # With single copies throughout, the floor is the copy's in one fit and the transfer's in the other.
        for floor, link in ((plain.per_copy_s, plain), (noisy.latency_s, noisy)):
            assert floor * 1e3 == pytest.approx(case["floor_ms"], abs=0.05)
            assert per_token / link.rate_bytes_per_s * 1e6 == pytest.approx(case["us_per_token"], abs=5e-4)
            for tokens, ms in case["predict_ms"].items():
                predicted = floor + int(tokens) * per_token / link.rate_bytes_per_s
                assert predicted * 1e3 == pytest.approx(ms, abs=0.05)
                assert predicted * 1e3 == pytest.approx(case["measured_ms"][tokens], rel=0.05)

    def test_recompute_is_quadratic(self, known: dict) -> None:
        case = known["recompute_fit"]
        samples = [PrefillSample(0, tokens, ms / 1e3) for tokens, ms in case["points_ms"]]
        cost = fit_pass(samples, absolute=True).cost
        errors = [abs(cost.pass_s(0, s.new_tokens) - s.seconds) * 1e3 for s in samples]
        assert max(errors) <= case["max_error_ms"]
        (short, first), (longer, second) = case["points_ms"][:2]
        line = first + (second - first) / (longer - short) * (49152 - short)
        assert line / case["points_ms"][-1][1] == pytest.approx(0.65, abs=0.05)

    def test_the_relative_fit_of_the_same_is_within_a_hundredth_everywhere(self, known: dict) -> None:
        samples = [PrefillSample(0, tokens, ms / 1e3) for tokens, ms in known["recompute_fit"]["points_ms"]]
        assert fit_pass(samples).relative_error < 0.01

    def test_units(self, known: dict) -> None:
        gib, bits, per_ms = known["units"]
        rate = TransferSample(gib["bytes"], 1, gib["seconds"]).rate_bytes_per_s
        assert rate / 1e9 == pytest.approx(gib["gb_per_s"], abs=0.01)
        assert rate / 2**30 == pytest.approx(gib["gib_per_s"], abs=0.01)
        assert show_rate(rate) == "350 GB/s"
        assert TransferSample(4_194_304_000, 1, 0.176).rate_bytes_per_s / 1e9 == pytest.approx(
            23.83, abs=0.005
        )
        assert parse_rate(bits["text"]) == bits["bytes_per_s"]
        assert parse_rate(per_ms["text"]) == pytest.approx(per_ms["gb_per_s"] * 1e9)


class TestParametersAreRecovered:
    @pytest.mark.parametrize("seed", range(5))
    def test_of_a_pass(self, seed: int) -> None:
        found = calibrate_pass(passes(100, 0.03, seed))
        for tokens in (1500, 10_000, 20_000):
            assert found.cost.pass_s(0, tokens) == pytest.approx(TRUE_PASS.pass_s(0, tokens), rel=0.02)
        for name in ("overhead_s", "token_s", "pair_s"):
            off = abs(getattr(found.cost, name) - getattr(TRUE_PASS, name))
            assert off < 4 * getattr(found.standard_errors, name)

    @pytest.mark.parametrize("rectangle", [False, True])
    def test_of_a_pass_after_a_prefix(self, rectangle: bool) -> None:
        true = PassCost(0.01, 2e-5, 6e-10, 3e-7, rectangle)
        points = [(p, m) for p in (1000, 5000, 20_000, 60_000) for m in (1, 64, 1000, 8000)]
        found = calibrate_pass(
            [PrefillSample(p, m, true.pass_s(p, m)) for p, m in points], rectangle=rectangle
        )
        for name in ("overhead_s", "token_s", "pair_s", "context_s"):
            assert getattr(found.cost, name) == pytest.approx(getattr(true, name), rel=1e-3)
        assert found.cost.rectangle is rectangle

    @pytest.mark.parametrize("seed", range(5))
    def test_of_a_link(self, seed: int) -> None:
        found = calibrate_link("link", transfers(90, 0.03, seed)).link
        assert found.rate_bytes_per_s == pytest.approx(TRUE_LINK.rate_bytes_per_s, rel=0.03)
        assert found.per_copy_s == pytest.approx(TRUE_LINK.per_copy_s, rel=0.05)
        assert found.latency_s == pytest.approx(TRUE_LINK.latency_s, rel=0.15)
        assert found.source == "calibration"

    def test_latency_is_told_by_copies_timed_without_a_submission(self) -> None:
        loads = [TransferSample(size, 64, seconds(TRUE_LINK, size, 64)) for size in (10**7, 10**8, 10**9)]
        probes = [
            TransferSample(size * 100, 100, 100 * (5e-6 + size / 20e9), submissions=0)
            for size in (4096, 65_536, 10**6)
        ]
        found = calibrate_link("link", loads + probes).link
        assert found.latency_s == pytest.approx(2e-3, rel=0.01)
        assert found.per_copy_s == pytest.approx(5e-6, rel=0.01)

    def test_nine_of_ten_new_samples_lie_in_the_band(self) -> None:
        inside, seeds = 0.0, 10
        for seed in range(seeds):
            found = calibrate_pass(passes(60, 0.05, seed))
            new = passes(200, 0.05, 1000 + seed)
            off = [abs(s.seconds / found.cost.pass_s(0, s.new_tokens) - 1) for s in new]
            inside += sum(one <= found.relative_error for one in off) / len(off) / seeds
        assert 0.85 <= inside <= 0.96


class TestOneOutlierInTwenty:
    @pytest.mark.parametrize("factor", [0.01, 0.2, 0.5, 1.5, 3.0, 10.0, 1000.0])
    @pytest.mark.parametrize("at", [0, 7, 19])
    def test_changes_nothing_noticeable_of_a_pass(self, factor: float, at: int) -> None:
        clean = passes(20, 0.02, 5)
        hit = list(clean)
        hit[at] = replace(hit[at], seconds=hit[at].seconds * factor)
        before, after = calibrate_pass(clean).cost, calibrate_pass(hit).cost
        for tokens in (1024, 5000, 16_384):
            assert after.pass_s(0, tokens) == pytest.approx(before.pass_s(0, tokens), rel=0.01)

    @pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 1000.0])
    @pytest.mark.parametrize("at", [0, 7, 19])
    def test_changes_nothing_noticeable_of_a_link(self, factor: float, at: int) -> None:
        clean = transfers(20, 0.02, 5)
        hit = list(clean)
        hit[at] = replace(hit[at], seconds=hit[at].seconds * factor)
        before, after = (calibrate_link("link", samples).link for samples in (clean, hit))
        for size, copies in ((10**7, 64), (10**9, 640), (10**8, 6400)):
            assert seconds(after, size, copies) == pytest.approx(seconds(before, size, copies), rel=0.01)

    def test_is_counted(self) -> None:
        samples = passes(20, 0.02, 5)
        samples[3] = replace(samples[3], seconds=9 * samples[3].seconds)
        assert calibrate_pass(samples).outliers == 1

    def test_plain_least_squares_does_notice(self) -> None:
        """The control: without the robust fit the same outlier moves the prediction."""
        clean = passes(20, 0.02, 5)
        hit = [replace(clean[0], seconds=clean[0].seconds * 0.1), *clean[1:]]
        before, after = fit_pass(clean).cost, fit_pass(hit).cost
        assert after.pass_s(0, 1024) != pytest.approx(before.pass_s(0, 1024), rel=0.1)


class TestTooFewOrTooAlike:
    def test_a_prior_is_scaled_by_one_factor_and_that_is_said(self) -> None:
        samples = [PrefillSample(0, n, 1.2 * TRUE_PASS.pass_s(0, n)) for n in (2048, 2048, 8192)]
        found = calibrate_pass(samples, prior=TRUE_PASS)
        assert found.scaled
        for name in ("overhead_s", "token_s", "pair_s"):
            assert getattr(found.cost, name) == pytest.approx(1.2 * getattr(TRUE_PASS, name))
        assert found.notes == (
            "2 different lengths cannot tell the coefficients of a pass apart: those known before, all scaled by 1.2",
        )
        assert found.relative_error >= 0.10

    def test_nearly_equal_lengths_are_too_alike(self) -> None:
        samples = [PrefillSample(0, n, 0.1) for n in (8000, 8001, 8002, 8003)]
        with pytest.raises(InputError, match="samples: of 4 different lengths cannot tell"):
            calibrate_pass(samples)
        assert calibrate_pass(samples, prior=TRUE_PASS).scaled

    def test_no_samples_at_all_are_refused_even_with_a_prior(self) -> None:
        with pytest.raises(InputError, match="samples"):
            calibrate_pass([], prior=TRUE_PASS)
        with pytest.raises(InputError, match="samples"):
            calibrate_link("link", [], prior=TRUE_LINK)

    def test_a_link_seen_at_one_size_scales_its_prior(self) -> None:
        samples = [TransferSample(10**8, 64, 2 * seconds(TRUE_LINK, 10**8, 64))] * 5
        with pytest.raises(InputError, match="samples: of 1 different size cannot tell"):
            calibrate_link("link", samples)
        found = calibrate_link("link", samples, prior=TRUE_LINK)
        assert found.scaled
        assert found.link.rate_bytes_per_s == pytest.approx(10e9)
        assert found.link.per_copy_s == pytest.approx(10e-6)
        assert "all scaled by 2" in found.notes[0]
        assert found.link.source == "calibration"

    def test_equal_copy_counts_do_not_split_the_fixed_cost(self) -> None:
        samples = [TransferSample(size, 64, seconds(TRUE_LINK, size, 64)) for size in (10**7, 10**8, 10**9)]
        found = calibrate_link("link", samples)
        assert found.link.latency_s == 0
        assert seconds(found.link, 5 * 10**8, 64) == pytest.approx(seconds(TRUE_LINK, 5 * 10**8, 64))
        assert found.notes == ("latency and per-copy cost could not be told apart: all given to the copies",)

    def test_an_exact_fit_claims_no_certainty(self) -> None:
        samples = [PrefillSample(0, n, TRUE_PASS.pass_s(0, n)) for n in (1000, 4000, 16_000)]
        assert calibrate_pass(samples).relative_error == 0.25


class TestPhysics:
    def test_no_rate_is_fitted_above_the_ceiling(self) -> None:
        samples = transfers(60, 0.05, 1)
        found = calibrate_link("link", samples, ceiling_bytes_per_s=19e9)
        assert found.link.rate_bytes_per_s <= 19e9 * (1 + 1e-12)
        scaled = calibrate_link("link", samples[:1], prior=Link("link", 40e9), ceiling_bytes_per_s=19e9)
        assert scaled.link.rate_bytes_per_s <= 19e9

    def test_no_token_costs_less_than_at_peak(self) -> None:
        assert calibrate_pass(passes(60, 0.05, 1), least_token_s=2.5e-5).cost.token_s >= 2.5e-5

    @given(
        st.lists(
            st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.floats(1e-9, 1e4)),
            min_size=1,
            max_size=40,
        )
    )
    def test_whatever_was_measured_no_coefficient_is_negative_or_infinite(self, rows: list) -> None:
        samples = [PrefillSample(*row) for row in rows]
        found = calibrate_pass(samples, prior=TRUE_PASS)
        cost = found.cost
        parts = (cost.overhead_s, cost.token_s, cost.pair_s, cost.context_s, found.relative_error)
        assert all(0 <= part < float("inf") for part in parts)

    @given(
        st.lists(
            st.tuples(st.integers(1, 10**12), st.integers(1, 10**5), st.floats(1e-9, 1e4)),
            min_size=1,
            max_size=40,
        )
    )
    def test_whatever_was_measured_a_link_is_a_link(self, rows: list) -> None:
        found = calibrate_link("link", [TransferSample(*row) for row in rows], prior=TRUE_LINK)
        assert 0 < found.link.rate_bytes_per_s < float("inf")
        assert 0 <= found.relative_error < float("inf")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_measurement_is_refused(bad: float) -> None:
    with pytest.raises(InputError, match="samples"):
        fit_pass([PrefillSample(0, 10, bad)])
    with pytest.raises(InputError, match="samples"):
        fit_link("link", [TransferSample(10, 1, bad)], "")
