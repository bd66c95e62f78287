"""Every path on links of several speeds, and loads beside their bound.

A rung of the sweep is a link on which copying everything usable takes `ratio` times as long as recomputing the prompt
is predicted to take: `rate = bytes of all usable tokens / (ratio * predicted recompute)`. The policy is calibrated
before each rung, on other lengths and prefixes than it measures there, and predicts every path before one is measured.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass, field

import torch
from transformers import LlamaForCausalLM

from kvlane.bench.lab import Answer, Ids, Lab
from kvlane.bench.measuring import Condition, Outcome, Setting, measure_conditions
from kvlane.bench.paths import UNIT_TOKENS, decide, path_conditions
from kvlane.bench.progress import Steps
from kvlane.bench.rounds import KEPT, Rounds, calibration_points, longest_point
from kvlane.bench.shape import Shape, build_model, random_prompt, spec_of
from kvlane.bench.tuning import Tick, Tuner
from kvlane.policy.calibration import LinkFit
from kvlane.policy.errors import InputError
from kvlane.policy.plan import Plan, Request
from kvlane.policy.planner import Planner
from kvlane.streams.probe import probe_link
from kvlane.transfer.host import HostStore

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SHORTEST_PROMPT = 256
_SEED = 54_321


@dataclass(frozen=True, slots=True)
class Overlap:
    """A load over plain memory, by layer: `loaded` tokens, and `new` ones computed after them."""

    loaded: int
    new: int

    @property
    def tokens(self) -> int:
        return self.loaded + self.new


@dataclass(frozen=True, slots=True)
class Options:
    """What to sweep.

    `reps` measurements of each path, the parts of each load alone in the first `alone_reps` of them; `overlaps` are
    measured `overlap_reps` times. Raises `InputError` naming the field.
    """

    tokens: int = 2560
    reps: int = 7
    alone_reps: int = 3
    ratios: tuple[float, ...] = RATIOS
    shape: Shape = field(default_factory=Shape)
    overlaps: tuple[Overlap, ...] = (
        Overlap(4096, 16),
        Overlap(8192, 16),
        Overlap(12_288, 16),
        Overlap(12_288, 256),
    )
    overlap_reps: int = 9

    def __post_init__(self) -> None:
        if self.tokens < SHORTEST_PROMPT:
            raise InputError(
                "tokens", f"is {self.tokens}", f"{SHORTEST_PROMPT} or more: shorter prompts measure nothing"
            )
        for name in ("reps", "alone_reps", "overlap_reps"):
            if getattr(self, name) < 1:
                raise InputError(name, f"is {getattr(self, name)}", "1 or more")
        if not self.ratios:
            raise InputError("--ratios", "is empty", "one ratio or more")
        for ratio in self.ratios:
            if not 0.01 <= ratio <= 100:
                raise InputError("--ratios", f"holds {ratio:g}", "ratios from 0.01 to 100")

    @property
    def usable(self) -> int:
        """Tokens that can be loaded: whole units before the last token."""
        return (self.tokens - 1) // UNIT_TOKENS * UNIT_TOKENS


@dataclass(frozen=True, slots=True)
class Rung:
    """One link done. `core_share` is how much of its computing the compute thread had a core, waits apart."""

    ratio: float
    link_bytes_per_s: float
    plan: Plan
    outcomes: list[Outcome]
    core_share: float

    def named(self, name: str) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.condition.name == name), None)

    @property
    def choice(self) -> Outcome:
        found = self.named("choice")
        assert found is not None
        return found

    @property
    def paths(self) -> list[Outcome]:
        """What there was to choose from."""
        return [outcome for outcome in self.outcomes if outcome.condition.name != "choice"]

    @property
    def chosen(self) -> str:
        """The name of the path that the policy chose."""
        condition = self.choice.condition
        if condition.start:
            return "two-ended"
        return {"recompute": "recompute", "load": "layered load", "split": "prefix split"}[condition.path]

    @property
    def best(self) -> Outcome:
        return min(self.paths, key=lambda outcome: outcome.median_s)

    @property
    def regret(self) -> float:
        """How much longer the choice took than the best path, as a share; negative where it was faster."""
        return self.choice.median_s / self.best.median_s - 1

    @property
    def measured_ratio(self) -> float:
        """The ratio as measured: everything usable copied with nothing computing, over recomputing."""
        bulk, recompute = self.named("bulk load"), self.named("recompute")
        assert bulk is not None
        assert recompute is not None
        return statistics.median(alone.arrivals[-1] for alone in bulk.alone) / recompute.median_s


@dataclass(frozen=True, slots=True)
class Overlapped:
    """One load over plain memory done: the bytes of one layer, and what was measured."""

    overlap: Overlap
    layer_bytes: int
    outcome: Outcome
    core_share: float


@dataclass(frozen=True, slots=True)
class Sweep:
    """Everything measured."""

    options: Options
    rungs: list[Rung]
    overlapped: list[Overlapped]


def sweep(options: Options) -> Sweep:
    """Measures all rungs and overlaps, one request at a time, on one compute thread.

    Raises `WrongAnswerError` when any path's answer differs from recomputing.
    """
    torch.set_num_threads(1)
    # The copies' thread must not wait 5 ms for the interpreter while the compute thread runs Python.
    sys.setswitchinterval(5e-4)
    longest = max([_held(options), *(each.tokens for each in options.overlaps)])
    model = build_model(options.shape, longest, _SEED)
    with Steps(_steps(options)) as steps, _lab(model, longest, None) as home:
        return _Run(options, model, home, lambda what, _: steps(what, 1)).run()


class _Run:
    """One sweep under way. `home` is the lab whose link is plain memory, where passes are calibrated."""

    def __init__(self, options: Options, model: LlamaForCausalLM, home: Lab, tick: Tick) -> None:
        self.options, self.model, self.home, self.tick = options, model, home, tick
        self.spec = spec_of(model)
        calibration_ids = random_prompt(options.shape, _held(options), _SEED + 1)
        self.tuner = Tuner(home, self.spec, calibration_ids, UNIT_TOKENS, tick)
        self.rounds = Rounds(self.tuner, options.tokens)
        self.ids = random_prompt(options.shape, options.tokens, _SEED + 2)
        self.store = HostStore(UNIT_TOKENS)
        self.memcpy = probe_link(home.backend)

    def run(self) -> Sweep:
        options, home = self.options, self.home
        for store, ids in ((self.store, self.ids), (self.tuner.store, self.tuner.ids)):
            self.tick(f"a prefill of {ids.size:,} tokens that are stored", 0.0)
            home.recompute(ids)
            home.keep(store, ids, ids.size)
        for _ in range(KEPT - 1):
            self.rounds.measure()
        plain = self.tuner.link_up_to(home, options.tokens, self.memcpy)
        rungs = [self._rung(ratio, plain) for ratio in options.ratios]
        return Sweep(options, rungs, self._overlaps(plain))

    def _rung(self, ratio: float, plain: LinkFit) -> Rung:
        options, home = self.options, self.home
        begun = _core_times(home)
        self.rounds.measure()
        # What a recompute is predicted to take is the same on every link.
        recompute_s = self._planner(plain).decide(Request(options.tokens)).ttft_s
        rate = options.usable * options.shape.kv_bytes_per_token / (ratio * recompute_s)
        with _lab(self.model, options.tokens, rate) as lab:
            planner = self._planner(self.tuner.link_up_to(lab, options.usable, ()))
            setting = Setting(f"ratio {ratio:g}", lab, self.store, self.ids, planner, self.spec)
            outcomes = measure_conditions(
                setting,
                path_conditions(planner, options.tokens, options.tokens),
                options.reps,
                self.tick,
                alone_reps=options.alone_reps,
            )
            share = _core_share(begun, _core_times(home), _core_times(lab))
        return Rung(ratio, rate, decide(planner, options.tokens, options.tokens), outcomes, share)

    def _planner(self, link: LinkFit) -> Planner:
        return self.tuner.planner(
            self.options.tokens, self.rounds.fresh(), self.rounds.extend(), link, "two_ended"
        )

    def _overlaps(self, plain: LinkFit) -> list[Overlapped]:
        if not self.options.overlaps:
            return []
        # The longest first: what is then held is the prefix of all others, computed and never loaded.
        overlaps = sorted(self.options.overlaps, key=lambda each: (each.loaded, each.tokens), reverse=True)
        ids = random_prompt(self.options.shape, overlaps[0].tokens, _SEED + 3)
        store = HostStore(UNIT_TOKENS)
        self.tick(f"a prefill of {ids.size:,} tokens that are stored", 0.0)
        self.home.recompute(ids)
        self.home.keep(store, ids, ids.size)
        references = [
            Answer(self.home.engine.prefill(ids[: each.tokens], resident=each.loaded)) for each in overlaps
        ]
        planner = self._planner(plain)
        return [
            self._overlap(each, store, ids, planner, reference)
            for each, reference in zip(overlaps, references, strict=True)
        ]

    def _overlap(
        self, overlap: Overlap, store: HostStore, ids: Ids, planner: Planner, reference: Answer
    ) -> Overlapped:
        begun = _core_times(self.home)
        name = f"plain memory, {overlap.new:,} tokens after {overlap.loaded:,}"
        setting = Setting(name, self.home, store, ids[: overlap.tokens], planner, self.spec)
        # Held against its bound, not against a prediction.
        layered = Condition("layered load", "load", "layered", overlap.loaded, math.nan)
        (outcome,) = measure_conditions(setting, [layered], self.options.overlap_reps, self.tick, reference)
        layer_bytes = overlap.loaded * self.options.shape.kv_bytes_per_token // self.options.shape.layers
        return Overlapped(overlap, layer_bytes, outcome, _core_share(begun, _core_times(self.home)))


def _held(options: Options) -> int:
    return longest_point(options.tokens, UNIT_TOKENS)


def _lab(model: LlamaForCausalLM, capacity: int, rate: float | None) -> Lab:
    return Lab(model, capacity, f"seed-{_SEED}", rate)


def _core_times(lab: Lab) -> tuple[float, float]:
    return lab.on_core_s, lab.computing_s


def _core_share(begun: tuple[float, float], *ended: tuple[float, float]) -> float:
    """On a core over computing, since `begun` in the first lab and from the start in others."""
    on_core_s = sum(each[0] for each in ended) - begun[0]
    computing_s = sum(each[1] for each in ended) - begun[1]
    return on_core_s / computing_s


def _steps(options: Options) -> int:
    """How many there are, for the progress bar."""
    rounds = len(calibration_points(options.tokens, UNIT_TOKENS))
    rung = rounds + 3 + 6 * options.reps
    overlap = 1 + len(options.overlaps) * options.overlap_reps if options.overlaps else 0
    return 2 + (KEPT - 1) * rounds + 3 + len(options.ratios) * rung + overlap
