"""The 12,370-token reproduction on this machine's CPU: calibrate, predict, measure, compare."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from kvlane.bench.lab import LOAD_DEADLINE_S, Answer, Ids, Lab
from kvlane.bench.measuring import Outcome
from kvlane.bench.observations import Observation
from kvlane.bench.paths import UNIT_TOKENS
from kvlane.bench.progress import Steps
from kvlane.bench.scenarios import (
    Scenario,
    chat_turn,
    measure,
    near_break_even,
    published,
)
from kvlane.bench.shape import Shape, build_model, config_of, random_prompt, spec_of
from kvlane.bench.tuning import PassSamples, Point, Tick, Tuner, fresh_points, whole_units
from kvlane.policy.calibration import LinkFit
from kvlane.policy.errors import InputError
from kvlane.policy.model import ModelSpec
from kvlane.policy.plan import Executor
from kvlane.policy.planner import Planner
from kvlane.policy.units import show_bytes, show_rate, show_seconds
from kvlane.streams.probe import probe_link
from kvlane.transfer.host import HostStore
from kvlane.transfer.probe import CopySample

SHORTEST_PROMPT = 512
# What the engine can do.
_EXECUTOR: Executor = "two_ended"
_SEED = 12_370


@dataclass(frozen=True, slots=True)
class Options:
    """What to reproduce. `link_bytes_per_s` is scenario A's link, None for plain memcpy."""

    tokens: int = 12_370
    reps: int = 3
    shape: Shape = field(default_factory=Shape)
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.tokens < SHORTEST_PROMPT:
            raise InputError(
                "tokens", f"is {self.tokens}", f"{SHORTEST_PROMPT} or more: shorter prompts measure nothing"
            )
        if self.reps < 1:
            raise InputError("reps", f"is {self.reps}", "1 or more")


@dataclass(slots=True)
class Report:
    """One scenario done: the policy as calibrated for it, its link's pace (None for plain memcpy), the outcomes."""

    scenario: Scenario
    planner: Planner
    paced_bytes_per_s: float | None
    outcomes: list[Outcome]


@dataclass(slots=True)
class Reproduction:
    """Everything measured, for the table and for `results.json`.

    `memcpy` is the plain link by copy size; `core_share` how much of its computing the compute thread had a core.
    `config` holds the model's numbers under a config.json's field names, `observed` what the policy was calibrated on.
    """

    options: Options
    spec: ModelSpec
    reports: list[Report]
    top2_gap: float
    memcpy: tuple[CopySample, ...]
    core_share: float
    config: dict[str, Any]
    observed: tuple[Observation, ...]


# What to calibrate each scenario on, in shares of its prompt: full prefills, and passes (prefix, suffix, times)
# after a prefix, a suffix of 0 being the scenario's own bare suffix after another prefix. No scenario's own
# length or prefix is among them.
_FRESH = {"A": (1 / 6, 1 / 3, 1 / 2, 3 / 4), "C": (3 / 8, 1 / 2, 3 / 4, 5 / 4)}
_EXTEND = {
    "A": ((0.94, 0.0, 4), (0.8, 0.0, 3), (0.9, 0.02, 1), (0.75, 0.05, 1), (0.4, 0.1, 1)),
    "B": ((0.9, 0.024, 1), (0.9, 0.04, 1), (0.8, 0.075, 1), (0.7, 0.05, 1), (0.6, 0.09, 1), (0.5, 0.03, 1)),
    "C": (
        (1.1, 0.0, 1),
        (0.7, 0.0, 1),
        (0.9, 0.15, 1),
        (0.75, 0.2, 1),
        (0.7, 0.5, 1),
        (0.5, 0.25, 1),
        (0.5, 0.4, 1),
        (0.3, 0.55, 1),
        (0.1, 0.8, 1),
    ),
}
_OFF_UNIT = 5
# Whole loads to calibrate A on, in shares of its prompt.
_LOADED = (0.8, 0.94)
# The calibration prompt is held up to this share of the prompt.
_HELD = 0.95


def reproduce(options: Options) -> Reproduction:
    """Runs the three scenarios, one request at a time, on one compute thread.

    Raises `InputError` for sizes that cannot be run here, `WrongAnswerError` when any path's answer differs.
    """
    check(options)
    torch.set_num_threads(1)
    # The copies' thread must not wait 5 ms for the interpreter while the compute thread runs Python.
    sys.setswitchinterval(5e-4)
    model = build_model(options.shape, options.tokens, _SEED)
    spec = spec_of(model)
    with Steps(_total_work(spec, options)) as step, _lab(model, options, None) as home:
        return _Bench(options, model, spec, home, step).run()


class _Bench:
    """One reproduction under way. `home` is the lab whose link is plain memory, where everything is calibrated."""

    def __init__(
        self, options: Options, model: LlamaForCausalLM, spec: ModelSpec, home: Lab, step: Tick
    ) -> None:
        self.options, self.model, self.spec, self.home, self.step = options, model, spec, home, step
        self.tuner = Tuner(home, spec, self._prompt(options.tokens, 1), UNIT_TOKENS, step)
        self.ids = self._prompt(options.tokens, 2)
        self.memcpy = probe_link(home.backend)
        self.stored, self.earlier = HostStore(UNIT_TOKENS), HostStore(UNIT_TOKENS)

    def run(self) -> Reproduction:
        a, b, c = _scenarios(self.options.tokens)
        self.step("the prefill that writes the store", 0.0)
        reference = self.home.recompute(self.ids)
        self.home.keep(self.stored, self.ids, a.stored_tokens)
        self.home.keep(self.earlier, self.ids, b.stored_tokens)
        self.step("stored", self.spec.prefill_flop(0, a.tokens))
        fresh = self.tuner.fresh(_lengths(a))
        self.tuner.keep(whole_units(_HELD * a.tokens, UNIT_TOKENS))
        reports = [self._published(a, fresh), self._chat_turn(b, fresh, reference), self._near_break_even(c)]
        gap = min(_top2_gap(report.outcomes[0].answers[0]) for report in reports)
        share = self.home.on_core_s / self.home.computing_s
        return Reproduction(
            self.options,
            self.spec,
            reports,
            gap,
            self.memcpy,
            share,
            config_of(self.model),
            tuple(self.tuner.observed),
        )

    def _published(self, scenario: Scenario, fresh: PassSamples) -> Report:
        extend = self.tuner.extend(_points(scenario))
        rate = self.options.link_bytes_per_s
        if rate is None:
            return self._report(scenario, self.home, fresh, extend, self.stored, self.ids)
        with _lab(self.model, self.options, rate) as lab:
            return self._report(scenario, lab, fresh, extend, self.stored, self.ids)

    def _chat_turn(self, scenario: Scenario, fresh: PassSamples, reference: Answer) -> Report:
        """On a link on which a layer's KV takes as long to load as a layer of the suffix takes to compute."""
        extend = self.tuner.extend(_points(scenario))
        layer_s = extend.fit.cost.pass_s(scenario.usable_tokens, scenario.suffix_tokens) / len(
            self.spec.layers
        )
        layer_bytes = scenario.usable_tokens * self.spec.kv_bytes_per_token("fp32") / len(self.spec.layers)
        with _lab(self.model, self.options, layer_bytes / layer_s) as lab:
            return self._report(scenario, lab, fresh, extend, self.earlier, self.ids, reference)

    def _near_break_even(self, scenario: Scenario) -> Report:
        """On a link on which loading everything takes as long as computing everything."""
        ids = self._prompt(scenario.tokens, 3)
        store = HostStore(UNIT_TOKENS)
        self.home.recompute(ids)
        self.home.keep(store, ids, scenario.stored_tokens)
        self.step("stored", self.spec.prefill_flop(0, scenario.tokens))
        fresh = self.tuner.fresh(_lengths(scenario))
        extend = self.tuner.extend(_points(scenario))
        # The break-even rate does not depend on the link's own.
        anywhere = self.tuner.planner(scenario.tokens, fresh, extend, self._link(self.home), _EXECUTOR)
        plan = scenario.plan(anywhere)
        load, recompute = plan.estimates["load"], plan.estimates["recompute"]
        assert load is not None
        assert recompute is not None
        # A model so small that loading saves nothing at any rate still gets a link: one as slow as computing.
        rate = plan.break_even_bytes_per_s or load.load_bytes / recompute.ttft_s
        with _lab(self.model, self.options, rate) as lab:
            return self._report(scenario, lab, fresh, extend, store, ids)

    def _report(
        self,
        scenario: Scenario,
        lab: Lab,
        fresh: PassSamples,
        extend: PassSamples,
        store: HostStore,
        ids: Ids,
        reference: Answer | None = None,
    ) -> Report:
        """Calibrates the link of `lab`, predicts, and only then measures."""
        link = self._link(lab)
        planner = self.tuner.planner(scenario.tokens, fresh, extend, link, _EXECUTOR)
        if scenario.key == "A":
            # Little is computed here, so what a load costs beside its copies is no longer small.
            ends = [int(share * self.options.tokens) // UNIT_TOKENS * UNIT_TOKENS for share in _LOADED]
            overhead_s = self.tuner.load_overhead_s(lab, planner, scenario.suffix_tokens, ends)
            planner = self.tuner.planner(scenario.tokens, fresh, extend, link, _EXECUTOR, overhead_s)
        outcomes = measure(
            scenario, lab, store, ids, planner, self.options.reps, reference, self.spec, self.step
        )
        return Report(scenario, planner, lab.backend.link_bytes_per_s, outcomes)

    def _link(self, lab: Lab) -> LinkFit:
        return self.tuner.link_up_to(lab, _HELD * self.options.tokens, self.memcpy)

    def _prompt(self, tokens: int, number: int) -> Ids:
        return random_prompt(self.options.shape, tokens, _SEED + number)


def _top2_gap(answer: Answer) -> float:
    """How far the two largest logits lie apart: what a difference between paths has to stay below."""
    second, first = np.sort(answer.result.logits)[-2:]
    return float(first - second)


def _scenarios(tokens: int) -> tuple[Scenario, Scenario, Scenario]:
    return published(tokens), chat_turn(tokens), near_break_even(tokens)


def _lab(model: LlamaForCausalLM, options: Options, link_bytes_per_s: float | None) -> Lab:
    return Lab(model, options.tokens, f"seed-{_SEED}", link_bytes_per_s)


def _lengths(scenario: Scenario) -> list[int]:
    """Full prefills to calibrate on: none as long as the scenario's prompt, nor as a front, which is whole units."""
    lengths = {
        whole_units(share * scenario.tokens, UNIT_TOKENS) + _OFF_UNIT for share in _FRESH[scenario.key]
    }
    return sorted(length + (length == scenario.tokens) for length in lengths)


def _points(scenario: Scenario) -> list[Point]:
    """Passes after a prefix to calibrate on, none after the scenario's own prefix."""
    return [
        Point(
            round(prefix * scenario.tokens),
            max(scenario.suffix_tokens, round(suffix * scenario.tokens)),
            times,
        )
        for prefix, suffix, times in _EXTEND[scenario.key]
    ]


def _total_work(spec: ModelSpec, options: Options) -> float:
    """FLOP of everything to come, for the progress bar."""
    a, b, c = _scenarios(options.tokens)
    held = whole_units(_HELD * a.tokens, UNIT_TOKENS)
    passes = [(0, a.tokens), (0, c.tokens)]
    passes += [
        (0, point.new)
        for scenario in (a, c)
        for point in fresh_points(_lengths(scenario))
        for _ in range(point.repeats)
    ]
    passes.append((_lengths(a)[-1], held - _lengths(a)[-1]))
    passes += [
        (point.resident, point.new)
        for scenario in (a, b, c)
        for point in _points(scenario)
        for _ in range(point.repeats)
    ]
    measured = [
        (0, a.tokens),
        (0, c.tokens),
        *[(b.usable_tokens, b.suffix_tokens)] * 4,
        *[(c.tokens // 2,) * 2] * 3,
        *[(0, c.tokens // 2)] * 4,
    ]
    passes += measured * options.reps
    return sum(spec.prefill_flop(resident, new) for resident, new in passes)


def check(options: Options) -> None:
    """Raises `InputError` for what this machine cannot run, before anything has begun."""
    _check_memory(options)
    _check_link(options)


def _check_memory(options: Options) -> None:
    """The weights, three stores and three device blocks of the longest prompt, and what a full prefill needs."""
    shape, tokens = options.shape, options.tokens
    activations = 4 * tokens * (8 * shape.hidden + 3 * shape.ffn)
    needed = 2 * shape.weight_bytes + 6 * tokens * shape.kv_bytes_per_token + activations + 1_000_000_000
    available = _available_bytes()
    if available is not None and needed > available:
        raise InputError(
            "tokens",
            f"{tokens} tokens of this model need about {show_bytes(needed)}, {show_bytes(available)} are free",
            "a shorter prompt or a smaller model",
        )


def _available_bytes() -> int | None:
    """Memory that can be had without swapping, page cache included; None on a system that does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _check_link(options: Options) -> None:
    """A load on a link slower than its deadline allows would only fail minutes from now."""
    rate = options.link_bytes_per_s
    loaded = options.tokens * options.shape.kv_bytes_per_token
    if rate is not None and loaded / rate > LOAD_DEADLINE_S / 2:
        raise InputError(
            "--link",
            f"{show_rate(rate)} takes {show_seconds(loaded / rate)} for the {show_bytes(loaded)} of this prompt",
            f"a link that takes at most {show_seconds(LOAD_DEADLINE_S / 2)}",
        )
