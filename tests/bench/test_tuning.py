"""The calibration: what is sampled, what the policy is made of afterwards, and that any prompt can be calibrated on."""

from __future__ import annotations

import statistics

import pytest

from kvlane.bench.lab import Lab
from kvlane.bench.reproduce import _HELD, _lengths, _points, _scenarios
from kvlane.bench.shape import Shape, build_model, random_prompt, spec_of
from kvlane.bench.tuning import PassSamples, Point, Tuner, cpu_machine, whole_units
from kvlane.policy.calibration import LinkFit, PassFit, PrefillSample
from kvlane.policy.machine import Link
from kvlane.policy.prefill_cost import PassCost
from kvlane.transfer.probe import MIB, CopySample

LENGTHS = (24, 48, 100)
POINTS = (Point(96, 6, 3), Point(64, 32), Point(50, 20), Point(100, 30))


@pytest.fixture
def ticks():
    return []


@pytest.fixture
def tuner(small, ticks):
    return Tuner(small.lab, small.spec, small.ids, 16, lambda what, work: ticks.append((what, work)))


class TestSamples:
    def test_full_prefills_are_fitted_without_a_prefix(self, tuner, ticks, small):
        taken = tuner.fresh(LENGTHS[::-1])
        assert [(s.resident_tokens, s.new_tokens) for s in taken.samples] == [(0, n) for n in LENGTHS]
        assert not taken.fit.cost.rectangle
        assert taken.fit.cost.context_s == 0
        assert taken.head_s > 0
        assert [what for what, _ in ticks] == [f"calibrating on {n} tokens" for n in LENGTHS]
        # Short ones three times: the median is what counts, and a passing disturbance does not.
        assert [work for _, work in ticks] == [3 * small.spec.prefill_flop(0, n) for n in LENGTHS]

    def test_passes_after_a_prefix_are_fitted_to_the_rectangle_each_as_often_as_it_counts(self, tuner, ticks):
        tuner.lab.recompute(tuner.ids)
        tuner.keep(128)
        ticks.clear()
        taken = tuner.extend(POINTS)
        assert [(s.resident_tokens, s.new_tokens) for s in taken.samples] == [
            (96, 6),
            (96, 6),
            (96, 6),
            (64, 32),
            (50, 20),
            (100, 30),
        ]
        assert taken.fit.cost.rectangle
        assert [what for what, _ in ticks] == [
            f"calibrating on {point.new} tokens after {point.resident}" for point in POINTS
        ]

    def test_what_another_prompt_displaced_is_held_again_before_it_is_sampled(self, tuner, kit):
        tuner.keep(128)
        tuner.lab.recompute(random_prompt(kit.shape, kit.tokens, seed=9))
        assert len(tuner.extend(POINTS).samples) == 6
        assert tuner.lab.engine.holds(tuner.ids, 100)


class TestKeep:
    def test_computes_only_what_is_not_held_yet(self, tuner, ticks):
        tuner.fresh(LENGTHS)
        ticks.clear()
        tuner.keep(112)
        assert [what for what, _ in ticks] == ["calibrating on 12 tokens after 100"]
        assert tuner.store.lookup(tuner.lab.engine.identity, tuner.ids).tokens == 112

    def test_computes_nothing_that_is_held(self, tuner, ticks):
        tuner.lab.recompute(tuner.ids)
        tuner.keep(112)
        assert ticks == []
        assert tuner.store.lookup(tuner.lab.engine.identity, tuner.ids).tokens == 112

    @pytest.mark.parametrize("tokens", [512, 513, 578, 682, 1000])
    def test_every_point_of_a_reproduction_can_be_held_from_what_is_kept(self, tokens):
        """As `reproduce` does it, for prompts in which a load unit is a large share."""
        shape = Shape(layers=1, hidden=8, heads=4, kv_heads=2, ffn=8, vocab=32)
        model = build_model(shape, tokens, seed=1)
        with Lab(model, tokens, "seed-1") as lab:
            tuner = Tuner(lab, spec_of(model), random_prompt(shape, tokens, 2), 16, lambda what, work: None)
            scenarios = _scenarios(tokens)
            tuner.fresh(_lengths(scenarios[0]))
            tuner.keep(whole_units(_HELD * tokens, 16))
            for scenario in scenarios:
                if scenario.key == "C":
                    tuner.fresh(_lengths(scenario))
                points = _points(scenario)
                assert len(tuner.extend(points).samples) == sum(point.repeats for point in points)


class TestLink:
    LENGTHS = (16, 64, 128)
    RATE = 1e6

    @pytest.fixture
    def paced(self, model, kit):
        with Lab(model, kit.tokens, "seed-1", self.RATE) as lab:
            yield lab

    def test_a_paced_link_is_never_fitted_as_faster_than_it_is(self, tuner, ticks, paced, small):
        tuner.keep(128)
        ticks.clear()
        fit = tuner.link(paced, self.LENGTHS)
        assert [what for what, _ in ticks] == [f"calibrating the link on {n} tokens" for n in self.LENGTHS]
        assert fit.link.source == "calibration"
        assert fit.link.origin == "3 transfers measured on this machine"
        for tokens in self.LENGTHS:
            moved = tokens * small.bytes_per_token
            copies = 2 * len(small.spec.layers)
            predicted = copies * fit.link.per_copy_s + moved / fit.link.rate_bytes_per_s
            assert predicted >= moved / self.RATE * (1 - fit.relative_error) * 0.999

    def test_probes_of_small_copies_tell_nothing_of_plain_memory(self, tuner):
        tuner.keep(128)
        # The large ones say 1 GB/s, the small ones a hundredth of a millionth of it.
        probed = [CopySample(4 * MIB * at, 1, 4 * MIB * at / 1e9, 5) for at in (1, 4, 16)]
        small_ones = [CopySample(size, 1, size / 10, 5) for size in (4096, 65_536, MIB)]
        fit = tuner.link(tuner.lab, [16], [*small_ones, *probed])
        assert fit.link.origin == "4 transfers measured on this machine"
        assert fit.link.rate_bytes_per_s == pytest.approx(1e9, rel=0.5)


class TestPlanner:
    def samples(self, count, error, head_s, **cost):
        passes = tuple(PrefillSample(0, 16, 1.0) for _ in range(count))
        return PassSamples(passes, PassFit(PassCost(0.0, 1e-3, 0.0, **cost), error), head_s)

    def test_is_made_of_what_was_measured(self, tuner, kit):
        tuner.keep(128)
        fresh, extend = self.samples(4, 0.02, 1e-3), self.samples(9, 0.2, 3e-3, rectangle=True)
        link = LinkFit(Link("host link", 1e9, per_copy_s=1e-5, source="calibration", origin="measured"), 0.1)
        planner = tuner.planner(kit.tokens, fresh, extend, link, "layered")
        assert planner.executor == "layered"
        assert planner.prefill.fresh == fresh.fit.cost
        assert planner.prefill.extend == extend.fit.cost
        assert planner.prefill.layers == kit.shape.layers
        assert planner.prefill.head_s == statistics.median((1e-3, 3e-3))
        assert planner.layer_bytes_per_token * planner.layers == tuner.lab.engine.layout.bytes_per_token

        plan = _scenarios(512)[0].plan(planner)
        assert plan.calibrated
        assert plan.parameters_from["prefill"].text == "13 prefills measured on this machine"
        # As uncertain as the worse of the two fits.
        recompute = plan.estimates["recompute"]
        assert recompute is not None
        assert recompute.band == 0.2

    def test_looking_the_prompt_up_counts_as_load_time(self, tuner, kit):
        tuner.keep(128)
        samples = self.samples(4, 0.02, 1e-3)
        link = LinkFit(Link("host link", 1e9), 0.1)
        planner = tuner.planner(kit.tokens, samples, samples, link, "bulk")
        latency = planner.machine.links["host link"].latency_s
        assert latency > 0
        load = planner.transfer("host", 16)
        assert load.total_s(16) - load.layers * load.layer_s(16) == pytest.approx(latency)

    def test_keys_and_values_of_a_layer_are_two_copies_of_any_length(self):
        machine = cpu_machine(LinkFit(Link("host link", 1e9), 0.1), 5e-4)
        tier = machine.tier("host")
        assert (tier.layout, tier.run_tokens, tier.runs_per_layer) == ("layer_major", None, 2)
        assert machine.links[tier.link].latency_s == 5e-4
