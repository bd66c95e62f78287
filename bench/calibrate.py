"""Measures this machine: passes of several lengths after several prefixes, and its link by copy size and by load.

Every measurement is taken several times, the rounds one after another so that a drifting machine drifts through all
of them, and goes through the same calibrators that a running service feeds.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass

import torch

from kvlane.bench.host import fingerprint, machine
from kvlane.bench.lab import Ids, Lab
from kvlane.bench.progress import Steps
from kvlane.bench.subject import Subject
from kvlane.bench.tuning import Tick
from kvlane.policy.calibration import Calibrator, LinkCalibrator, PrefillCalibrator, TransferSample
from kvlane.policy.calibration_build import build_record
from kvlane.policy.calibration_record import Record
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Tier
from kvlane.policy.units import show_rate, show_seconds
from kvlane.streams.cuda_setup import check_cuda
from kvlane.streams.probe import probe_link
from kvlane.transfer.host import HostStore

LINK, TIER = "host link", "host"
UNIT_TOKENS = 16
SHORTEST_TOKENS = 256
SEED = 20_250

# Timings that repeat no better than this were disturbed.
_STEADY_ERROR = 0.25
_BUSY = "note     times spread widely: on a machine that is less busy the estimates' band would be narrower"
# In shares of the longest prompt: full prefills, and passes (prefix, new), a new of 0 being a single token.
_FRESH = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
_EXTEND = (
    (1 / 8, 0.0),
    (1 / 2, 0.0),
    (15 / 16, 0.0),
    (1 / 8, 1 / 16),
    (1 / 2, 1 / 32),
    (7 / 8, 1 / 16),
    (1 / 4, 1 / 4),
    (1 / 2, 1 / 4),
    (1 / 8, 1 / 2),
    (1 / 2, 1 / 2),
)
_LOAD_SERIES = 8  # each length as often as any other, the first one cold
_LOADS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 15 / 16)


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure: up to how many tokens, each so many times, the first (cold) one not counted."""

    tokens: int = 4096
    reps: int = 4

    def __post_init__(self) -> None:
        if self.tokens < SHORTEST_TOKENS:
            raise InputError(
                "tokens", f"is {self.tokens}", f"{SHORTEST_TOKENS} or more: shorter prompts measure nothing"
            )
        if self.reps < 2:
            raise InputError("reps", f"is {self.reps}", "2 or more: one alone shows no spread")


def check_device(device: str) -> None:
    """Raises `InputError` naming `--device` for one that cannot be measured here."""
    if device not in ("cpu", "cuda"):
        raise InputError("--device", f"{device!r} is not a device", "cpu or cuda")
    if device == "cuda":
        try:
            check_cuda()
        except InputError as error:
            raise InputError("--device", error.problem, f"cpu, or {error.expected}") from None


def calibrate_cpu(subject: Subject, options: Options, at_s: float) -> Record:
    """Measures the subject on one CPU thread and its host memory; `at_s` is now, seconds since 1970 UTC.

    Raises `InputError` naming `samples` when what came out shows no cost.
    """
    torch.set_num_threads(1)
    # The copies' thread must not wait 5 ms for the interpreter while the compute thread runs Python.
    sys.setswitchinterval(5e-4)
    with (
        Steps(total_work(subject, options)) as step,
        Lab(subject.model, options.tokens, f"seed-{SEED}") as lab,
    ):
        return calibrate_lab(subject, options, at_s, lab, step)


def calibrate_lab(
    subject: Subject, options: Options, at_s: float, lab: Lab, step: Tick, device: str | None = None
) -> Record:
    """Measures the subject on whatever the lab computes on, `device` by name and one CPU thread if None.

    Raises `InputError` naming `samples` when what came out shows no cost.
    """
    return _Calibration(subject, options, lab, step).run(at_s, device)


class _Calibration:
    """One calibration under way."""

    def __init__(self, subject: Subject, options: Options, lab: Lab, step: Tick) -> None:
        self.subject, self.options, self.lab, self.step = subject, options, lab, step
        self.store = HostStore(UNIT_TOKENS, allocate=lab.backend.host_bytes)
        self.ids = _prompt(subject, options.tokens)
        # No recency: all of it is measured in one go. With a prefix transformers builds a mask, and the CPU kernel
        # then computes masked entries too. Nobody states a CPU thread's peak, nor its memory's.
        self.prefill = PrefillCalibrator(
            len(subject.spec.layers), rectangle=True, half_life=None, window=4096
        )
        self.link = LinkCalibrator(LINK, half_life=None, window=4096)
        self.calibrator = Calibrator(self.prefill, [self.link])

    def run(self, at_s: float, device: str | None) -> Record:
        heads = self._passes([(0, length) for length in fresh_lengths(self.options.tokens)])
        self.lab.recompute(self.ids)
        self.lab.keep(self.store, self.ids, self.options.tokens)
        self.step("stored", self.subject.spec.prefill_flop(0, self.options.tokens))
        heads += self._passes(extend_points(self.options.tokens))
        self._transfers()
        self.prefill.head_s = statistics.median(heads)
        # A lookup is part of every load.
        observed = self.link.estimate().with_latency(self.lab.lookup_s(self.store, self.ids))
        return build_record(
            fingerprint(machine(), self.subject.name, self.subject.spec.weight_dtype, device),
            at_s,
            prefill=(self.prefill.estimate(), self.prefill.cost()),
            links={LINK: observed},
            tiers={TIER: self.lab.copies_of(self.store, self.ids).of(Tier(TIER, LINK))},
            model_config=self.subject.config,
        )

    def _passes(self, points: list[tuple[int, int]]) -> list[float]:
        """Measures every point in every round; returns the LM head's seconds."""
        heads = []
        self.prefill.begin_series()
        self._pass(*points[0])
        for rep in range(self.options.reps):
            for resident, new in points:
                heads.append(self._pass(resident, new))
                after = f" after {resident:,}" if resident else ""
                self.step(
                    f"{new:,} tokens{after}, {rep + 1} of {self.options.reps}",
                    self.subject.spec.prefill_flop(resident, new),
                )
        return heads

    def _pass(self, resident: int, new: int) -> float:
        if resident:
            self.lab.hold(self.store, self.ids, resident)
        sample, head_s = self.lab.sample_prefill(self.ids, resident, new)
        self.calibrator.add_prefill(sample)
        return head_s

    def _transfers(self) -> None:
        for length in load_lengths(self.options.tokens):
            self.link.begin_series()
            for sample in self.lab.transfer_series(self.store, self.ids, length, _LOAD_SERIES):
                self.calibrator.add_transfer(LINK, sample)
            self.step(f"loading {length:,} tokens", 0.0)
        for probe in probe_link(self.lab.backend):
            # The probe has discarded its own cold series; what it gives is a median.
            self.calibrator.add_transfer(
                LINK,
                TransferSample(probe.copy_bytes * probe.copies, probe.copies, probe.seconds, submissions=0),
            )
        self.step("copies of all sizes", 0.0)


def summary(record: Record, where: object) -> str:
    """What was found, in words, and what to do with it."""
    prefill, tier = record.prefill, record.tiers[TIER]
    assert prefill is not None
    link = record.links[tier.link]
    lines = [
        f"model    {record.fingerprint.model}, {record.fingerprint.dtype}",
        f"device   {record.fingerprint.device}",
    ]
    for name, cost, span in (
        ("prefill", prefill.fresh, f"{prefill.new_tokens.low:,.0f} to {prefill.new_tokens.high:,.0f} tokens"),
        ("extend", prefill.extend, f"after up to {prefill.resident_tokens.high:,.0f} tokens"),
    ):
        parts = [
            f"{show_seconds(cost.overhead_s)} per pass",
            f"{show_seconds(cost.token_s)} per token",
            f"{show_seconds(cost.pair_s)} per {'masked or attended' if cost.rectangle else 'attended'} pair",
        ]
        parts += [f"{show_seconds(cost.context_s)} per context token"] if cost.context_s else []
        lines.append(
            f"{name:8} {', '.join(parts)}; {span}, {cost.samples} passes, nine of ten within"
            f" {cost.relative_error:.0%}"
        )
    worst = max(prefill.fresh.relative_error, prefill.extend.relative_error, link.relative_error)
    lines += [
        f"link     {show_rate(link.rate_bytes_per_s)}, {show_seconds(link.per_copy_s)} per copy,"
        f" {show_seconds(link.latency_s)} per load; {link.samples} transfers, nine of ten within"
        f" {link.relative_error:.0%}",
        *(f"note     {note}" for note in (*prefill.fresh.notes, *prefill.extend.notes, *link.notes)),
        *([_BUSY] if worst > _STEADY_ERROR else []),
        f"written  {where}: kvlane decide --calibration {where} --prompt-tokens 2048 --hit {TIER}=2048",
    ]
    return "\n".join(lines)


def fresh_lengths(tokens: int) -> list[int]:
    """Full prefills to measure, in tokens, rising."""
    return sorted({_whole_units(share * tokens) for share in _FRESH})


def extend_points(tokens: int) -> list[tuple[int, int]]:
    """Passes after a prefix to measure: resident and new tokens."""
    points = [
        (_whole_units(prefix * tokens), _whole_units(new * tokens) if new else 1) for prefix, new in _EXTEND
    ]
    return list(dict.fromkeys((min(prefix, tokens - new), new) for prefix, new in points))


def load_lengths(tokens: int) -> list[int]:
    """Loads to measure, in tokens, rising."""
    return sorted({_whole_units(share * tokens) for share in _LOADS})


def _whole_units(tokens: float) -> int:
    return max(UNIT_TOKENS, int(tokens / UNIT_TOKENS) * UNIT_TOKENS)


def _prompt(subject: Subject, tokens: int) -> Ids:
    generator = torch.Generator().manual_seed(SEED)
    ids: Ids = torch.randint(subject.vocab, (tokens,), generator=generator).numpy()
    return ids


def total_work(subject: Subject, options: Options) -> float:
    """FLOP of everything to come, for the progress bar."""
    passes = [(0, length) for length in fresh_lengths(options.tokens)] + extend_points(options.tokens)
    once = subject.spec.prefill_flop(0, options.tokens)
    return once + options.reps * sum(subject.spec.prefill_flop(resident, new) for resident, new in passes)
