"""Links that keep failing are left alone for a while, then tried again with one load.

Keyed by whose link it is; only links that have failed are remembered, and of those a bounded number.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy.booking import LinkKey

_MOST = 10_000


@dataclass(slots=True)
class _Broken:
    failures: int
    retry_at_s: float


class Breakers:
    """Shuts a link off after `failures` loads in a row that failed; after `probe_after_s` lets one through to see."""

    def __init__(self, failures: int = 3, probe_after_s: float = 10.0) -> None:
        self.failures, self.probe_after_s = failures, probe_after_s
        self._broken: dict[LinkKey, _Broken] = {}

    def would_admit(self, link: LinkKey, now: float) -> bool:
        """Whether a load may be weighed over that link."""
        broken = self._broken.get(link)
        return broken is None or broken.failures < self.failures or now >= broken.retry_at_s

    def admit(self, link: LinkKey, now: float) -> None:
        """A load over that link was decided: of one that is shut off it is the one probe of this interval."""
        broken = self._broken.get(link)
        if broken is not None and broken.failures >= self.failures:
            broken.retry_at_s = now + self.probe_after_s

    def failed(self, link: LinkKey, now: float) -> None:
        """A load over that link failed."""
        broken = self._broken.pop(link, None) or _Broken(0, 0.0)
        broken.failures += 1
        broken.retry_at_s = now + self.probe_after_s
        self._broken[link] = broken
        if len(self._broken) > _MOST:
            del self._broken[next(iter(self._broken))]

    def succeeded(self, link: LinkKey) -> None:
        """A load over that link arrived."""
        self._broken.pop(link, None)

    def shut(self, now: float) -> list[LinkKey]:
        """Links over which nothing is loaded now."""
        return [link for link in self._broken if not self.would_admit(link, now)]
