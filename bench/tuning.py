"""Calibrates the policy for one scenario: on other prompts, other lengths and other prefixes than it measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlane.bench.lab import Ids, Lab
from kvlane.bench.observations import Observation, prefill, transfer
from kvlane.policy.calibration import LinkFit, PassFit, PrefillSample, TransferSample, fit_link, fit_pass
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Device, Link, Machine, Tier
from kvlane.policy.model import ModelSpec
from kvlane.policy.path_cost import PathCost
from kvlane.policy.plan import Executor
from kvlane.policy.planner import Calibration, Planner
from kvlane.policy.prefill_cost import PrefillCost
from kvlane.policy.units import show_rate
from kvlane.streams.executor import Mode
from kvlane.transfer.host import HostStore
from kvlane.transfer.probe import CopySample

# Smaller copies than a layer's come from the interpreter's speed, not the link's.
_SMALLEST_PROBED_BYTES = 4 << 20
# A paced link is never faster than its pace; a fit that says so by more than this has fitted noise.
_PACE_MARGIN = 1.05
# Shares of the longest transfer a link is calibrated on, which on a paced link takes at most so many seconds.
_LINK = (1 / 8, 1 / 2, 1.0)
_LONGEST_PROBE_S = 0.4
# Prefills of at most so many tokens are cheap enough to repeat.
_REPEATED_TOKENS = 5_200
_MODES: tuple[Mode, ...] = ("bulk", "layered")

Tick = Callable[[str, float], None]
"""Called after each step: what it was, and its share of the work (FLOP)."""


@dataclass(frozen=True, slots=True)
class Point:
    """One prefill to sample: `new` tokens after `resident`, so many times."""

    resident: int
    new: int
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class PassSamples:
    """Samples of one kind of pass, the fit to them, and the LM head's seconds."""

    samples: tuple[PrefillSample, ...]
    fit: PassFit
    head_s: float


def fresh_points(lengths: Sequence[int]) -> list[Point]:
    """Full prefills of these lengths, the short ones three times: a passing disturbance must not decide."""
    return [Point(0, length, 3 if length <= _REPEATED_TOKENS else 1) for length in sorted(lengths)]


class Tuner:
    """Measures a calibration prompt on the lab whose link is plain memory, and fits the policy to it.

    The prompt's KV is kept in a store of its own, so that any prefix of it can be held again at once. `observed` is
    all that was measured.
    """

    def __init__(self, lab: Lab, spec: ModelSpec, ids: Ids, unit_tokens: int, tick: Tick) -> None:
        self.lab, self.spec, self.ids, self.tick = lab, spec, ids, tick
        self.store = HostStore(unit_tokens)
        self.observed: list[Observation] = []

    def fresh(self, lengths: Sequence[int]) -> PassSamples:
        """Full prefills of these lengths. One causal kernel serves them: it skips what is masked."""
        taken = [self._sample(point) for point in fresh_points(lengths)]
        samples = [sample for sample, _ in taken]
        return PassSamples(tuple(samples), fit_pass(samples), statistics.median(head for _, head in taken))

    def keep(self, tokens: int) -> None:
        """Stores the calibration prompt's KV up to so many tokens, computing those the engine does not hold yet."""
        if not self.lab.engine.holds(self.ids, tokens):
            held = self.lab.engine.held_tokens
            self._sample(Point(held, tokens - held))
        self.lab.keep(self.store, self.ids, tokens)

    def extend(self, points: Sequence[Point]) -> PassSamples:
        """Passes after a held prefix. With one transformers builds a mask, and the CPU kernel then computes
        masked entries too: the rectangle."""
        samples, heads = [], []
        for point in points:
            self.lab.hold(self.store, self.ids, point.resident)
            sample, head = self._sample(point)
            # A repeated point counts as often in the fit: it is the one the scenario leans on.
            samples += [sample] * point.repeats
            heads.append(head)
        return PassSamples(tuple(samples), fit_pass(samples, rectangle=True), statistics.median(heads))

    def link_up_to(self, lab: Lab, longest: float, probed: Sequence[CopySample]) -> LinkFit:
        """Copies of up to `longest` tokens of those kept over the link of `lab`; of plain memory also what was probed
        of it."""
        rate = lab.backend.link_bytes_per_s
        if rate is not None:
            longest = min(longest, _LONGEST_PROBE_S * rate / self.spec.kv_bytes_per_token("fp32"))
        lengths = {whole_units(share * longest, self.store.unit_tokens) for share in _LINK}
        return self.link(lab, sorted(lengths), probed if rate is None else ())

    def link(self, lab: Lab, lengths: Sequence[int], probed: Sequence[CopySample] = ()) -> LinkFit:
        """Copies of these lengths over the link of `lab`, with nothing computing, and what was probed of it."""
        samples = [
            TransferSample(sample.copy_bytes * sample.copies, sample.copies, sample.seconds)
            for sample in probed
            if sample.copy_bytes >= _SMALLEST_PROBED_BYTES
        ]
        for length in lengths:
            sample = lab.sample_transfer(self.store, self.ids, length)
            samples.append(sample)
            self.observed.append(transfer(link_name(lab.backend.link_bytes_per_s), sample))
            self.tick(f"calibrating the link on {length:,} tokens", 0.0)
        origin = f"{len(samples)} transfers measured on this machine"
        pace = lab.backend.link_bytes_per_s
        try:
            fit = fit_link("host link", samples, origin)
        except InputError:
            if pace is None:
                raise
            fit = None
        if fit is None or (pace is not None and fit.link.rate_bytes_per_s > pace * _PACE_MARGIN):
            assert pace is not None
            # Loads so small that the machine's pauses hide their sizes; the rate they are paced at is known.
            over = statistics.median(
                max(0.0, sample.seconds - sample.bytes / pace) / sample.copies for sample in samples
            )
            link = Link("host link", pace, per_copy_s=over, source="calibration", origin=origin)
            measured = [sample.copies * over + sample.bytes / pace for sample in samples]
            error = max(abs(s / sample.seconds - 1) for s, sample in zip(measured, samples, strict=True))
            return LinkFit(link, error)
        return fit

    def load_overhead_s(self, lab: Lab, planner: Planner, suffix: int, ends: Sequence[int]) -> float:
        """What a load takes beyond its predicted copies and compute: starting its threads, and what copying takes
        from computing beside it. From loads of other lengths, in bulk and by layer, with as long a suffix."""
        beyond = []
        for end in ends:
            ids = self.ids[: end + suffix]
            transfer = planner.transfer("host", self.store.unit_tokens)
            for mode in _MODES:
                predicted = PathCost(planner.prefill, mode).load_s(transfer, 0, end, len(ids))
                answers = [lab.load(self.store, ids, end, mode) for _ in range(3)]
                beyond.append(statistics.median(answer.result.total_s for answer in answers) - predicted)
            self.tick(f"calibrating on loads of {end:,} tokens", 0.0)
        return max(0.0, statistics.median(beyond))

    def planner(
        self,
        prompt_tokens: int,
        fresh: PassSamples,
        extend: PassSamples,
        link: LinkFit,
        executor: Executor,
        overhead_s: float = 0.0,
    ) -> Planner:
        """The policy for this machine as just measured. Looking the prompt up counts as load time, and so does
        `overhead_s`, what each load costs beside its copies."""
        lookup_s = self.lab.lookup_s(self.store, self.ids) * prompt_tokens / len(self.ids)
        cost = PrefillCost(
            layers=len(self.spec.layers),
            fresh=fresh.fit.cost,
            extend=extend.fit.cost,
            head_s=statistics.median((fresh.head_s, extend.head_s)),
        )
        count = len(fresh.samples) + len(extend.samples)
        error = max(fresh.fit.relative_error, extend.fit.relative_error)
        calibration = Calibration(cost, error, f"{count} prefills measured on this machine")
        machine = cpu_machine(link, lookup_s + overhead_s)
        return Planner(self.spec, machine, executor=executor, kv_dtype="fp32", calibration=calibration)

    def _sample(self, point: Point) -> tuple[PrefillSample, float]:
        taken = self.lab.sample_prefill(self.ids, point.resident, point.new, point.repeats)
        self.observed.append(prefill(taken[0]))
        after = f" after {point.resident:,}" if point.resident else ""
        work = point.repeats * self.spec.prefill_flop(point.resident, point.new)
        self.tick(f"calibrating on {point.new:,} tokens{after}", work)
        return taken


def whole_units(tokens: float, unit_tokens: int) -> int:
    """Tokens rounded to whole load units, one at least."""
    return max(unit_tokens, round(tokens / unit_tokens) * unit_tokens)


def link_name(paced_bytes_per_s: float | None) -> str:
    """What a link is called in observations: those paced at different rates are different links."""
    return "host link" if paced_bytes_per_s is None else f"link paced at {show_rate(paced_bytes_per_s)}"


def cpu_machine(link: LinkFit, latency_s: float) -> Machine:
    """This machine: host memory one link away from the device's KV, K and V lying apart."""
    measured = link.link.with_latency(latency_s)
    tier = Tier("host", measured.name, run_tokens=None, runs_per_layer=2)
    return Machine(
        name="this machine",
        device=Device("one CPU core"),
        links={measured.name: measured},
        tiers={tier.name: tier},
        prefill=(),
    )
