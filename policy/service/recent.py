"""The last outcomes and refusals, kept for whoever looks at the page; the metrics count them all."""

from __future__ import annotations

from collections import deque
from time import time

from kvlane.policy.plan import Path
from kvlane.policy.service.answers import LiveRefused, LiveRequest, Refused

_REQUESTS = 200
_REFUSED = 20


class Recent:
    """Oldest first, times in seconds since 1970 UTC; a restart forgets them."""

    def __init__(self) -> None:
        self.requests: deque[LiveRequest] = deque(maxlen=_REQUESTS)
        self.refused: deque[LiveRefused] = deque(maxlen=_REFUSED)

    def scored(self, deployment: str, path: Path, predicted_s: float, ttft_s: float) -> None:
        """A decision was followed, and this is the TTFT it had."""
        self.requests.append(LiveRequest(time(), deployment, path, predicted_s, ttft_s))

    def refuse(self, deployment: str | None, refused: Refused) -> None:
        """An observation was not taken."""
        self.refused.append(LiveRefused(time(), deployment, refused.index, refused.field, refused.reason))
