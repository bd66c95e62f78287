"""When to stop asking something that keeps failing, and when to try it again.

One breaker serves many keys (a tier, or an instance and a link). It has no clock: `now` is passed in, in seconds
of any clock that does not go back.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

from kvlane.policy.errors import InputError

State = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class BreakerCounts:
    """What has happened to one key: failures reported, times it was shut off, attempts refused while it was, probes
    let through, and those of them whose outcome never came."""

    failures: int = 0
    opened: int = 0
    refused: int = 0
    probes: int = 0
    probes_lost: int = 0


@dataclass(slots=True)
class _Circuit:
    """One key's state: closed while `retry_at` is None, else shut until then; `probing` while a probe is out."""

    in_a_row: int = 0
    retry_at: float | None = None
    wait_s: float = 0.0
    probing: bool = False
    counts: BreakerCounts = field(default_factory=BreakerCounts)


class CircuitBreaker:
    """Shuts a key off after `failures` failures in a row and lets one probe through after `probe_after_s`.

    A probe that succeeds closes the circuit. One that fails shuts it again for `growth` times as long, at most
    `longest_s`. A probe whose outcome does not come within the time the circuit was last shut for is given up, and the
    next one let through. A key that has not failed takes no memory, and of more than `most` that have, the one whose
    last failure is longest ago is forgotten. Not safe for threads: the caller's lock.

    Raises `InputError` naming the field for a count, a time or a growth that cannot be.
    """

    def __init__(
        self,
        failures: int = 3,
        probe_after_s: float = 5.0,
        *,
        growth: float = 2.0,
        longest_s: float = 300.0,
        most: int = 10_000,
    ) -> None:
        for name, number in (("failures", failures), ("most", most)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputError(name, f"is {number!r}", "a whole number of at least 1")
        if not 0 < probe_after_s < math.inf:
            raise InputError("probe_after_s", f"is {probe_after_s!r}", "seconds above zero")
        if not 1 <= growth < math.inf:
            raise InputError("growth", f"is {growth!r}", "a factor of at least 1")
        if not probe_after_s <= longest_s < math.inf:
            raise InputError("longest_s", f"is {longest_s!r}", f"seconds of at least {probe_after_s:g}")
        self.most_failures, self.probe_after_s = failures, probe_after_s
        self.growth, self.longest_s, self.most = growth, longest_s, most
        self._circuits: dict[Hashable, _Circuit] = {}

    def __len__(self) -> int:
        """How many keys have failed, as far as they are remembered: where none has there is nothing to ask."""
        return len(self._circuits)

    def would_admit(self, key: Hashable, now: float) -> bool:
        """Whether `admit` would say yes; changes nothing, so that a key may be weighed and then not used."""
        circuit = self._circuits.get(key)
        return circuit is None or circuit.retry_at is None or now >= circuit.retry_at

    def admit(self, key: Hashable, now: float) -> bool:
        """Whether to use `key` now. A yes to one that was shut off is its probe: report how it went."""
        circuit = self._circuits.get(key)
        if circuit is None or circuit.retry_at is None:
            return True
        if now < circuit.retry_at:
            circuit.counts.refused += 1
            return False
        if circuit.probing:
            circuit.counts.probes_lost += 1
        circuit.probing = True
        circuit.counts.probes += 1
        circuit.retry_at = now + circuit.wait_s  # by then this probe is given up
        return True

    def succeeded(self, key: Hashable) -> None:
        """A use of `key` went well. While it is shut off only a probe's success counts: others began before."""
        circuit = self._circuits.get(key)
        if circuit is None or (circuit.retry_at is not None and not circuit.probing):
            return
        circuit.in_a_row, circuit.retry_at, circuit.probing = 0, None, False

    def failed(self, key: Hashable, now: float) -> None:
        """A use of `key` failed. While it is shut off only a probe's failure counts: others began before."""
        circuit = self._circuits.pop(key, None) or _Circuit()
        self._circuits[key] = circuit  # the last, as the newest to fail
        if len(self._circuits) > self.most:
            del self._circuits[next(iter(self._circuits))]
        circuit.counts.failures += 1
        if circuit.retry_at is None:
            circuit.in_a_row += 1
            if circuit.in_a_row >= self.most_failures:
                self._shut(circuit, self.probe_after_s, now)
        elif circuit.probing:
            self._shut(circuit, min(circuit.wait_s * self.growth, self.longest_s), now)

    def _shut(self, circuit: _Circuit, wait_s: float, now: float) -> None:
        circuit.counts.opened += 1
        circuit.probing = False
        circuit.wait_s, circuit.retry_at = wait_s, now + wait_s

    def state(self, key: Hashable) -> State:
        """`closed`, `open` (shut off, or waiting to be probed) or `half_open` (a probe is out)."""
        circuit = self._circuits.get(key)
        if circuit is None or circuit.retry_at is None:
            return "closed"
        return "half_open" if circuit.probing else "open"

    def known(self) -> tuple[Hashable, ...]:
        """The keys that have failed at least once."""
        return tuple(self._circuits)

    def counts(self, key: Hashable) -> BreakerCounts:
        """What has happened to `key` so far."""
        circuit = self._circuits.get(key)
        return BreakerCounts() if circuit is None else replace(circuit.counts)
