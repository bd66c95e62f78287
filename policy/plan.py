"""What a decision takes and what it says: the request, the chosen path and what every path would cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvlane.policy.errors import InputError
from kvlane.policy.machine import Source
from kvlane.policy.reason import reason
from kvlane.policy.units import LONGEST_S

if TYPE_CHECKING:
    from kvlane.policy.basis import Basis

Path = Literal["load", "recompute", "split"]
Executor = Literal["bulk", "layered", "two_ended"]
EXECUTORS: tuple[Executor, ...] = ("bulk", "layered", "two_ended")
MEASURED: frozenset[Source] = frozenset(("calibration", "explicit"))


# Several of these are made for every decision: a struct takes a sixth of the time that a dataclass does.
class LoadSegment(msgspec.Struct, frozen=True, gc=False):
    """One run of stored prefix tokens `[start, end)` that a plan loads from one tier.

    `bytes` is what one rank moves for it.
    """

    tier: str
    start: int
    end: int
    bytes: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


# Beyond any context there is; keeps every sum within a float's reach.
MOST_TOKENS = 1 << 24


_NO_COPIES: Mapping[str, int] = MappingProxyType({})


def _count(value: object, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        shown = str(value)[:40] if isinstance(value, int) else f"{str(value)[:40]} ({type(value).__name__})"
        raise InputError(name, f"is {shown}", f"a whole number of tokens from {least} to {MOST_TOKENS:,}")
    return value


def _seconds(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST_S:
        raise InputError(name, f"is {str(value)[:40]}", f"seconds from 0 to {LONGEST_S:g}")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: a prompt, and where how much of its prefix is stored.

    `hits` maps a tier to the stored tokens counted from token 0 (one number, or one per rank of which the
    smallest counts). `resident_tokens` lie in device KV already. `load_unit_tokens` is the smallest loadable
    run; `tail_tokens` are always computed, since logits are needed. `prefill_chunk_tokens` is the most an
    engine prefills in one pass, None for no limit. `state_checkpoints` lists, by tier or for all of them, the
    token counts after which a snapshot of recurrent state is stored there: a hit of a model with such layers ends
    at one of them, and is worth nothing without. `link_queue_s` is the seconds of copies already queued, by tier, on
    the link a load would take: they are waited out first. `copies` is how many copies one layer of everything
    usable and not resident takes from a tier, where who holds the block table has counted them. `cold` names the
    tiers whose peer has not been used yet, so that a load pays the link's first use.
    `device_busy_s` is the seconds of work ahead of this request on the device: no pass starts before, copies do.

    Raises `InputError` naming the field.
    """

    prompt_tokens: int
    hits: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    resident_tokens: int = 0
    load_unit_tokens: int = 16
    prefill_chunk_tokens: int | None = None
    tail_tokens: int = 1
    state_checkpoints: Mapping[str, Sequence[int]] | Sequence[int] = ()
    link_queue_s: Mapping[str, float] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    cold: Collection[str] = ()
    device_busy_s: float = 0.0

    def __post_init__(self) -> None:
        prompt = _count(self.prompt_tokens, "prompt_tokens", 1)
        _count(self.load_unit_tokens, "load_unit_tokens", 1)
        _count(self.tail_tokens, "tail_tokens", 1)
        if self.prefill_chunk_tokens is not None:
            _count(self.prefill_chunk_tokens, "prefill_chunk_tokens", 1)
        if _count(self.resident_tokens, "resident_tokens", 0) >= prompt:
            raise InputError(
                "resident_tokens", f"{self.resident_tokens} leave nothing to compute", f"fewer than {prompt}"
            )
        if not isinstance(self.hits, Mapping):
            raise InputError("hits", f"is a {type(self.hits).__name__}", "a mapping of tiers to token counts")
        for tier, tokens in self.hits.items():
            ranks = tuple(tokens) if isinstance(tokens, (tuple, list)) else (tokens,)
            if not ranks:
                raise InputError(f"hits.{tier}", "names no tokens", "a number of tokens, or one per rank")
            for count in ranks:
                if _count(count, f"hits.{tier}", 0) > prompt:
                    raise InputError(
                        f"hits.{tier}", f"{count} tokens are more than the prompt's", f"at most {prompt}"
                    )

        for tier, queued in self.link_queue_s.items():
            _seconds(queued, f"link_queue_s.{tier}")
        for tier, copies in self.copies.items():
            _count(copies, f"copies.{tier}", 1)
        if isinstance(self.cold, str) or not all(isinstance(tier, str) for tier in self.cold):
            raise InputError("cold", f"is {str(self.cold)[:40]!r}", "names of tiers")
        _seconds(self.device_busy_s, "device_busy_s")
        listed = self.state_checkpoints
        if not listed and isinstance(listed, (Mapping, tuple)):
            return
        for tier in self.hits if isinstance(listed, Mapping) else ("",):
            for at in self.checkpoints(tier):
                _count(at, f"state_checkpoints.{tier}" if tier else "state_checkpoints", 1)
        if isinstance(listed, Mapping):
            for tier in listed:
                if tier not in self.hits:
                    raise InputError(
                        f"state_checkpoints.{tier}", "has no hit", ", ".join(self.hits) or "a hit"
                    )

    @classmethod
    def of_decoded(
        cls,
        prompt_tokens: int,
        hits: Mapping[str, int],
        resident_tokens: int,
        load_unit_tokens: int,
        prefill_chunk_tokens: int | None,
        link_queue_s: Mapping[str, float],
        device_busy_s: float,
    ) -> Request:
        """The same from numbers whose types and limits were checked where they were decoded.

        What is left to check is what they say together; looking at each again takes as long as weighing a path.
        """
        if resident_tokens >= prompt_tokens or (hits and max(hits.values()) > prompt_tokens):
            # Refused there, with the words for it.
            return cls(prompt_tokens, hits, resident_tokens, load_unit_tokens)
        made = object.__new__(cls)
        put = object.__setattr__
        put(made, "prompt_tokens", prompt_tokens)
        put(made, "hits", hits)
        put(made, "resident_tokens", resident_tokens)
        put(made, "load_unit_tokens", load_unit_tokens)
        put(made, "prefill_chunk_tokens", prefill_chunk_tokens)
        put(made, "tail_tokens", 1)
        put(made, "state_checkpoints", ())
        put(made, "link_queue_s", link_queue_s)
        put(made, "copies", _NO_COPIES)
        put(made, "cold", ())
        put(made, "device_busy_s", device_busy_s)
        return made

    def checkpoints(self, tier: str) -> tuple[int, ...]:
        """Token counts after which `tier` holds a snapshot of recurrent state."""
        listed = self.state_checkpoints
        found = listed.get(tier, ()) if isinstance(listed, Mapping) else listed
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise InputError("state_checkpoints", f"is {str(found)[:40]}", "a list of token counts")
        return tuple(found)

    def hit(self, tier: str) -> int:
        """Stored tokens in `tier` on the rank that has fewest."""
        tokens = self.hits[tier]
        return min(tokens) if isinstance(tokens, (tuple, list)) else tokens


class Estimate(msgspec.Struct, gc=False):
    """What one path would take, in seconds, and what it would load.

    `transfer_s` (the queue on its link included) and `compute_s` are what copies and compute would take alone;
    `front_s` is the part of compute that runs while the load does, before the tokens loaded. `exposed_s` is TTFT
    minus compute. `load` lists the runs loaded, `group_layers` how many layers share an event. `low_s` and
    `high_s` span the error band of the parameters this path depends on.
    """

    path: Path
    ttft_s: float
    compute_s: float
    transfer_s: float = 0.0
    load: tuple[LoadSegment, ...] = ()
    front_s: float = 0.0
    group_layers: int = 1
    band: float = 0.0

    @property
    def start(self) -> int:
        """The first token loaded; 0 when nothing is."""
        return self.load[0].start if self.load else 0

    @property
    def end(self) -> int:
        """The first token after those loaded; 0 when nothing is."""
        return self.load[-1].end if self.load else 0

    @property
    def load_tokens(self) -> int:
        return self.end - self.start

    @property
    def load_bytes(self) -> int:
        """Bytes one rank moves."""
        return sum(segment.bytes for segment in self.load)

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.ttft_s - self.compute_s)

    @property
    def low_s(self) -> float:
        return self.ttft_s * max(0.0, 1 - self.band)

    @property
    def high_s(self) -> float:
        return self.ttft_s * (1 + self.band)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ttft_s": self.ttft_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "transfer_s": self.transfer_s,
            "compute_s": self.compute_s,
            "front_s": self.front_s,
            "exposed_s": self.exposed_s,
            "load": [msgspec.structs.asdict(segment) for segment in self.load],
            "load_tokens": self.load_tokens,
            "load_bytes": self.load_bytes,
            "group_layers": self.group_layers,
        }


class Parameter(msgspec.Struct, frozen=True, gc=False):
    """Where one parameter came from: how sure it is, and its value and origin in words."""

    source: Source
    text: str


@dataclass(slots=True)
class Plan:
    """The decision for one request.

    `path` is what to do; `load` lists what to load, run after run (nothing when recomputing; beginning above the
    resident tokens when those between are computed meanwhile), and `group_layers` how many layers share one event.
    `estimates` holds every path's own best, None with a word in `unavailable` where a path does not exist; the chosen
    path's is what the plan does. What the answer rests on is worked out when it is asked for. Not frozen, since
    it is built once per decision.
    """

    model: str
    machine: str
    executor: Executor
    prompt_tokens: int
    resident_tokens: int
    path: Path
    load: tuple[LoadSegment, ...]
    group_layers: int
    ttft_s: float
    exposed_s: float
    estimates: dict[Path, Estimate | None]
    unavailable: dict[Path, str]
    tie_margin: float
    kv_bytes_per_token: float
    tp: int
    usable_tokens: int
    basis: Basis = field(compare=False, repr=False)
    remarks: tuple[str, ...] = ()

    def take(self, estimate: Estimate) -> None:
        """Choose this one of the estimates instead."""
        self.path, self.load, self.group_layers = estimate.path, estimate.load, estimate.group_layers
        self.ttft_s, self.exposed_s = estimate.ttft_s, estimate.exposed_s
        self.basis = self.basis.of(estimate)

    @property
    def load_tokens(self) -> int:
        return sum(segment.tokens for segment in self.load)

    @property
    def load_bytes(self) -> int:
        """Bytes one rank moves."""
        return sum(segment.bytes for segment in self.load)

    @property
    def recompute_tokens(self) -> int:
        return self.prompt_tokens - self.resident_tokens - self.load_tokens

    @property
    def link_bytes_per_s(self) -> float | None:
        """The rate achieved in loading everything usable from the tier that crossover and break-even are about."""
        return self.basis.link_rate

    @property
    def crossover_tokens(self) -> int | None:
        """The prefix length from which on loading is not slower; None where there is none, as the note says."""
        return self.basis.crossover[0]

    @property
    def crossover_note(self) -> str:
        return self.basis.crossover[1]

    @property
    def break_even_bytes_per_s(self) -> float | None:
        """The link rate at which load and recompute tie; None where there is none, as the note says."""
        return self.basis.break_even[0]

    @property
    def break_even_note(self) -> str:
        return self.basis.break_even[1]

    @property
    def parameters_from(self) -> dict[str, Parameter]:
        """Where the parameters of prefill and of each link in use come from."""
        return self.basis.parameters

    @property
    def calibrated(self) -> bool:
        """Whether all of them were measured here or stated."""
        return MEASURED.issuperset([parameter.source for parameter in self.parameters_from.values()])

    @property
    def notes(self) -> tuple[str, ...]:
        """Where an estimate leaves the range its calibration was measured in, then the remarks of who asked."""
        return self.basis.notes + self.remarks

    @property
    def reason(self) -> str:
        """One sentence: the inequality that decided, with its numbers."""
        return reason(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values, the same words as the attributes; no infinities."""
        return {
            "model": self.model,
            "machine": self.machine,
            "executor": self.executor,
            "prompt_tokens": self.prompt_tokens,
            "resident_tokens": self.resident_tokens,
            "usable_tokens": self.usable_tokens,
            "path": self.path,
            "load": [msgspec.structs.asdict(segment) for segment in self.load],
            "load_tokens": self.load_tokens,
            "load_bytes": self.load_bytes,
            "group_layers": self.group_layers,
            "recompute_tokens": self.recompute_tokens,
            "ttft_s": self.ttft_s,
            "exposed_s": self.exposed_s,
            "estimates": {
                path: None if estimate is None else estimate.to_dict()
                for path, estimate in self.estimates.items()
            },
            "unavailable": dict(self.unavailable),
            "tie_margin": self.tie_margin,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "tp": self.tp,
            "link_bytes_per_s": self.link_bytes_per_s,
            "crossover_tokens": self.crossover_tokens,
            "crossover_note": self.crossover_note,
            "break_even_bytes_per_s": self.break_even_bytes_per_s,
            "break_even_note": self.break_even_note,
            "calibrated": self.calibrated,
            "parameters_from": {
                name: msgspec.structs.asdict(parameter) for name, parameter in self.parameters_from.items()
            },
            "notes": list(self.notes),
            "reason": self.reason,
        }
