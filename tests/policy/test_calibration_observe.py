"""Calibrators fed one sample at a time: what is refused, what is cold, and how a change is followed."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import LayerSpec, ModelSpec
from kvlane.policy.calibration import (
    Calibrator,
    LinkCalibrator,
    PrefillCalibrator,
    PrefillLimits,
    PrefillSample,
    TransferSample,
)
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Link
from kvlane.policy.prefill_cost import PassCost, PrefillCost

LATENCY_S, PER_COPY_S = 2e-3, 5e-6
SHAPES = [(size, copies) for size in (10**8, 4 * 10**8, 10**9) for copies in (64, 640)]
TRUE = PassCost(0.01, 2e-5, 6e-10)


class Wire:
    """A link that can be made to change, seen through noise."""

    def __init__(self, seed: int, noise: float = 0.05, rate: float = 20e9) -> None:
        self.draw = np.random.default_rng(seed)
        self.noise, self.rate = noise, rate

    def seconds(self, size: int, copies: int) -> float:
        return LATENCY_S + copies * PER_COPY_S + size / self.rate

    def sample(self, factor: float = 1.0) -> TransferSample:
        size, copies = SHAPES[int(self.draw.integers(len(SHAPES)))]
        noise = float(np.exp(self.noise * self.draw.standard_normal()))
        return TransferSample(size, copies, self.seconds(size, copies) * noise * factor)


def fed(wire: Wire, count: int, **options) -> LinkCalibrator:
    link = LinkCalibrator("link", **options)
    for _ in range(count):
        assert link.add(wire.sample()) is None
    return link


class TestAChangedLink:
    @pytest.mark.parametrize("seed", range(8))
    def test_at_half_its_rate_is_followed_within_tens_of_samples(self, seed: int) -> None:
        wire = Wire(seed)
        link = fed(wire, 100)
        assert link.estimate().estimate.link.rate_bytes_per_s == pytest.approx(20e9, rel=0.06)
        wire.rate = 10e9
        for _ in range(30):
            link.add(wire.sample())
        found = link.estimate().estimate
        assert found.link.rate_bytes_per_s == pytest.approx(10e9, rel=0.06)
        # And stays there.
        for _ in range(100):
            link.add(wire.sample())
        assert link.estimate().estimate.link.rate_bytes_per_s == pytest.approx(10e9, rel=0.06)

    def test_is_not_followed_without_recency(self) -> None:
        """The control: with equal weights the old rate keeps its majority."""
        wire = Wire(1)
        link = fed(wire, 100, half_life=None)
        wire.rate = 10e9
        for _ in range(30):
            link.add(wire.sample())
        assert link.estimate().estimate.link.rate_bytes_per_s == pytest.approx(20e9, rel=0.1)

    @pytest.mark.parametrize("seed", range(5))
    def test_widens_the_band_while_nobody_knows(self, seed: int) -> None:
        wire = Wire(seed)
        link = fed(wire, 100)
        steady = link.estimate().estimate.relative_error
        wire.rate = 10e9
        for _ in range(12):
            link.add(wire.sample())
        assert link.estimate().estimate.relative_error > 3 * steady

    @pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0, 1000.0])
    @pytest.mark.parametrize("ago", [0, 1, 5])
    def test_but_one_outlier_moves_nothing_noticeable(self, factor: float, ago: int) -> None:
        wires = Wire(3, noise=0.02), Wire(3, noise=0.02)
        clean, hit = (fed(wire, 40) for wire in wires)
        clean.add(wires[0].sample())
        hit.add(wires[1].sample(factor))
        for _ in range(ago):
            clean.add(wires[0].sample())
            hit.add(wires[1].sample())
        before, after = clean.estimate().estimate.link, hit.estimate().estimate.link
        for size, copies in SHAPES:
            was, now = (
                link.latency_s + copies * link.per_copy_s + size / link.rate_bytes_per_s
                for link in (before, after)
            )
            assert now == pytest.approx(was, rel=0.01)

    def test_memory_is_bounded(self) -> None:
        link = fed(Wire(1), 1000, window=50)
        assert link.estimate().estimate.samples == 50


class TestAColdSample:
    def test_the_first_of_a_series_only_tells_the_first_use(self) -> None:
        wire = Wire(2, noise=0.0)
        link = LinkCalibrator("link")
        for _ in range(3):
            link.begin_series()
            size, copies = SHAPES[0]
            link.add(TransferSample(size, copies, wire.seconds(size, copies) + 0.7))
            for _ in range(10):
                link.add(wire.sample())
        found = link.estimate().estimate
        assert found.samples == 30
        assert link.cold_discarded == 3
        assert found.link.rate_bytes_per_s == pytest.approx(20e9, rel=1e-3)
        assert found.first_use_s == pytest.approx(0.7, rel=1e-3)

    def test_one_that_says_so_is_not_used_later_either(self) -> None:
        wire = Wire(2, noise=0.0)
        link = fed(wire, 20)
        link.add(TransferSample(10**8, 64, 5.0, cold=True))
        assert link.estimate().estimate.samples == 19
        assert link.cold_discarded == 2

    def test_of_prefills_is_dropped(self) -> None:
        prefill = PrefillCalibrator(4)
        prefill.add(PrefillSample(0, 1000, 99.0))
        for tokens in (1000, 2000, 4000, 8000):
            prefill.add(PrefillSample(0, tokens, TRUE.pass_s(0, tokens)))
        found = prefill.estimate()
        assert found.fresh.samples == 4
        assert found.fresh.cost.pass_s(0, 1000) == pytest.approx(TRUE.pass_s(0, 1000))


class TestRefusals:
    def test_above_the_ceiling(self) -> None:
        link = LinkCalibrator("link", ceiling_bytes_per_s=30e9)
        refusal = link.add(TransferSample(62 * 10**9, 1, 2.0))
        assert refusal is not None
        assert (refusal.kind, refusal.field) == ("above_ceiling", "seconds")
        assert refusal.reason == "31 GB/s is above the link's ceiling of 30 GB/s"
        link.add(TransferSample(62 * 10**9, 1, 2.0))
        assert link.refused == {"above_ceiling": 2}

    def test_a_refused_sample_is_no_series_first(self) -> None:
        link = LinkCalibrator("link", ceiling_bytes_per_s=30e9)
        link.add(TransferSample(62 * 10**9, 1, 2.0))
        link.add(TransferSample(10**9, 1, 2.0))
        assert link.cold_discarded == 1

    def test_above_the_peak(self) -> None:
        limits = PrefillLimits(peak_flops=1e12, flop=lambda resident, new: 1e9 * new)
        prefill = PrefillCalibrator(4, limits=limits)
        refusal = prefill.add(PrefillSample(0, 1000, 0.5))
        assert refusal is not None
        assert (refusal.kind, refusal.field) == ("above_peak", "seconds")
        assert refusal.reason == "500.0 ms is less than 1.00 s, what the device's peak allows"
        assert prefill.add(PrefillSample(0, 1000, 1.0)) is None
        assert prefill.refused == {"above_peak": 1}

    def test_limits_of_a_model(self) -> None:
        layer = LayerSpec(heads=8, kv_heads=2, k_width=64, v_width=64, weights=10**6)
        model = ModelSpec("m", (layer,) * 4, 512, 1000, "bf16", "bf16")
        assert PrefillLimits(1e12, model.prefill_flop).token_s == pytest.approx(8 * 10**6 / 1e12)

    @pytest.mark.parametrize(
        ("sample", "field"),
        [
            (TransferSample(0, 1, 1.0), "bytes"),
            (TransferSample(-5, 1, 1.0), "bytes"),
            (TransferSample(10**6, 0, 1.0), "copies"),
            (TransferSample(10, 11, 1.0), "copies"),
            (TransferSample(10**6, 1, 0.0), "seconds"),
            (TransferSample(10**6, 1, -1.0), "seconds"),
            (TransferSample(10**6, 1, float("nan")), "seconds"),
            (TransferSample(10**6, 1, float("inf")), "seconds"),
            (TransferSample(cast(Any, 1.5), 1, 1.0), "bytes"),
            (TransferSample(True, 1, 1.0), "bytes"),
            (TransferSample(10**6, 1, 1.0, submissions=-1), "submissions"),
        ],
    )
    def test_no_transfer(self, sample: TransferSample, field: str) -> None:
        refusal = LinkCalibrator("link").add(sample)
        assert refusal is not None
        assert (refusal.kind, refusal.field) == ("not_a_measurement", field)

    @pytest.mark.parametrize(
        ("sample", "field"),
        [
            (PrefillSample(-1, 1, 1.0), "resident_tokens"),
            (PrefillSample(0, 0, 1.0), "new_tokens"),
            (PrefillSample(0, 1, float("nan")), "seconds"),
            (PrefillSample(0, 1, 0.0), "seconds"),
        ],
    )
    def test_no_prefill(self, sample: PrefillSample, field: str) -> None:
        refusal = PrefillCalibrator(1).add(sample)
        assert refusal is not None
        assert (refusal.kind, refusal.field) == ("not_a_measurement", field)

    def test_a_link_nobody_configured(self) -> None:
        calibrator = Calibrator(PrefillCalibrator(1), [LinkCalibrator("pcie")])
        with pytest.raises(InputError, match="link: there is no link 'nvme'"):
            calibrator.add_transfer("nvme", TransferSample(10**6, 1, 1.0))


class TestFewSamples:
    def test_a_link_without_any_says_so(self) -> None:
        with pytest.raises(InputError, match="samples"):
            LinkCalibrator("link").estimate()
        with pytest.raises(InputError, match="samples"):
            LinkCalibrator("link", prior=Link("link", 1e9)).estimate()

    def test_a_diet_of_one_size_scales_what_was_well_known_before(self) -> None:
        wire = Wire(4, noise=0.01)
        link = fed(wire, 60, window=30)
        known = link.estimate().estimate
        assert not known.scaled
        wire.rate = 10e9
        for _ in range(30):
            size, copies = SHAPES[-1]
            link.add(TransferSample(size, copies, wire.seconds(size, copies)))
        found = link.estimate().estimate
        assert found.scaled
        assert "all scaled by" in found.notes[0]
        size, copies = SHAPES[-1]
        predicted = found.link.latency_s + copies * found.link.per_copy_s + size / found.link.rate_bytes_per_s
        assert predicted == pytest.approx(wire.seconds(size, copies), rel=0.02)

    def test_prefills_that_are_too_few_say_so(self) -> None:
        prefill = PrefillCalibrator(4)
        prefill.begin_series()
        for tokens in (1000, 1000, 2000):
            prefill.add(PrefillSample(0, tokens, 1.0))
        with pytest.raises(InputError, match="samples: of passes are 2, too few or too alike"):
            prefill.estimate()

    def test_or_scale_the_prior(self) -> None:
        prior = PrefillCost(4, TRUE, TRUE)
        prefill = PrefillCalibrator(4, prior=prior)
        for tokens in (1000, 1000, 2000):
            prefill.add(PrefillSample(0, tokens, 1.5 * TRUE.pass_s(0, tokens)))
        found = prefill.estimate()
        assert found.fresh.scaled
        assert found.fresh.cost.token_s == pytest.approx(1.5 * TRUE.token_s)
        assert any("all scaled by 1.5" in note for note in found.notes)
        assert any("passes after a prefix: not measured" in note for note in found.notes)
        assert found.extend.relative_error >= 0.25

    def test_a_scaled_prior_keeps_its_floor(self) -> None:
        prior = PrefillCost(4, TRUE, TRUE, floor_s=0.5, floor_context_s=1e-6)
        prefill = PrefillCalibrator(4, prior=prior)
        for tokens in (10, 10, 20):
            prefill.add(PrefillSample(0, tokens, 2 * prior.pass_s(0, tokens)))
        cost = prefill.cost()
        assert (cost.floor_s, cost.floor_context_s) == pytest.approx((1.0, 2e-6), rel=0.01)
        assert cost.pass_s(0, 15) == pytest.approx(2 * prior.pass_s(0, 15), rel=0.01)

    def test_a_fit_needs_none_and_the_other_kind_keeps_it_as_a_fixed_cost(self) -> None:
        prior = PrefillCost(4, TRUE, TRUE, floor_s=0.5)
        prefill = PrefillCalibrator(4, prior=prior, rectangle=True)
        prefill.add(PrefillSample(0, 10, 1.0))
        for resident, new in ((0, 1000), (0, 4000), (0, 16_000), (8000, 10)):
            prefill.add(PrefillSample(resident, new, TRUE.pass_s(resident, new) + 0.5))
        cost = prefill.cost()
        assert cost.floor_s == 0
        assert cost.pass_s(0, 4000) == pytest.approx(TRUE.pass_s(0, 4000) + 0.5, rel=0.01)
        assert cost.pass_s(8000, 10) == pytest.approx(TRUE.pass_s(8000, 10) + 0.5, rel=0.01)

    def test_few_passes_after_a_prefix_are_fitted_with_those_from_token_0(self) -> None:
        prefill = PrefillCalibrator(4)
        prefill.add(PrefillSample(0, 10, 1.0))
        for resident, new in ((0, 1000), (0, 4000), (0, 16_000), (0, 8000), (8000, 1000)):
            prefill.add(PrefillSample(resident, new, TRUE.pass_s(resident, new)))
        found = prefill.estimate()
        assert found.extend.cost.pass_s(20_000, 500) == pytest.approx(TRUE.pass_s(20_000, 500), rel=0.02)
        assert found.notes == ("passes after a prefix: fitted together with the other kind",)

    def test_but_not_where_another_kernel_serves_them(self) -> None:
        prefill = PrefillCalibrator(4, rectangle=True)
        prefill.add(PrefillSample(0, 10, 1.0))
        for resident, new in ((0, 1000), (0, 4000), (0, 16_000), (8000, 1000)):
            prefill.add(PrefillSample(resident, new, TRUE.pass_s(resident, new)))
        found = prefill.estimate()
        assert found.extend.samples == 0
        assert "not measured" in found.extend.notes[0]


@given(
    st.lists(
        st.tuples(
            st.integers(-2, 10**13), st.integers(-2, 10**6), st.floats(allow_nan=True, allow_infinity=True)
        ),
        max_size=60,
    )
)
def test_whatever_comes_in_an_estimate_is_a_link_below_its_ceiling_or_an_input_error(rows: list) -> None:
    link = LinkCalibrator("link", ceiling_bytes_per_s=50e9)
    for row in rows:
        link.add(TransferSample(*row))
    try:
        found = link.estimate()
    except InputError:
        return
    assert 0 < found.estimate.link.rate_bytes_per_s <= 50e9 * (1 + 1e-9)
    assert 0 < found.estimate.relative_error < float("inf")


@pytest.mark.parametrize("options", [{"window": 0}, {"half_life": 0.0}, {"half_life": float("nan")}])
def test_a_window_that_is_none(options: dict) -> None:
    with pytest.raises(InputError):
        LinkCalibrator("link", **options)
