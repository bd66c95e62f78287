"""Events of a CUDA device, and its times on the host's clock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from kvlane.transfer.store import KvSafetyError

# An anchor's age: clocks drift apart by some ten microseconds a second, and elapsed times lose digits as they grow.
_ANCHOR_S = 1.0
_ANCHOR_TRIES = 3
_ANCHOR_WAIT_S = 1e-3


@dataclass(frozen=True, slots=True)
class Anchor:
    """A moment known on both clocks: `event` fired on the device at `host_s`, give or take `error_s`."""

    event: torch.cuda.Event
    host_s: float
    error_s: float

    def time_of(self, event: torch.cuda.Event) -> float:
        """When a later event fired, on the host's clock; both have fired."""
        return self.host_s + float(self.event.elapsed_time(event)) * 1e-3


class DeviceClock:
    """Ties the device's clock to `time.perf_counter`. Methods may be called from any thread.

    Attributes:
        drift: how much faster the device's clock ran than the host's between the last two anchors, as a share; None
            before there were two. No time is corrected by it: an event is read from the anchor just before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.drift: float | None = None
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        found = self._take(wait_s=10.0)
        if found is None:
            raise RuntimeError(f"{device} does not answer: an event on an idle stream has not fired in 10 s")
        self._anchor = found

    def anchor(self) -> Anchor:
        """A recent anchor. Renewing one takes some ten microseconds; a device that does not answer keeps the old one.

        Raises:
            RuntimeError: the device reports an error.
        """
        now = time.perf_counter()
        if now - self._anchor.host_s > _ANCHOR_S and self._lock.acquire(blocking=False):
            try:
                found = self._take(_ANCHOR_WAIT_S)
                if found is not None:
                    passed = found.host_s - self._anchor.host_s
                    self.drift = (self._anchor.time_of(found.event) - found.host_s) / passed
                    self._anchor = found
            finally:
                self._lock.release()
        return self._anchor

    @property
    def latest(self) -> Anchor:
        """The anchor in force, without asking the device."""
        return self._anchor

    def _take(self, wait_s: float) -> Anchor | None:
        """The narrowest of a few readings; None where one did not come in time."""
        best: Anchor | None = None
        for _ in range(_ANCHOR_TRIES):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter()
            event.record(self._stream)
            while not event.query():
                if time.perf_counter() - before > wait_s:
                    return None
            after = time.perf_counter()
            # It fired between the two.
            if best is None or (after - before) / 2 < best.error_s:
                best = Anchor(event, (before + after) / 2, (after - before) / 2)
        return best


class Mark:
    """One recording of an event: asked of the device until it has fired, and then known without it.

    Attributes:
        failure: what failed in the copies it closes.
        fired_s: when it fired, None while it has not been seen to.

    Args:
        held: what the work before it uses, kept until it is seen to have fired.
    """

    __slots__ = ("_anchor", "_held", "_torch", "failure", "fired_s")

    def __init__(
        self, event: torch.cuda.Event, anchor: Anchor, failure: BaseException | None, held: object = None
    ) -> None:
        self._torch = event
        self._anchor = anchor
        self._held = held
        self.failure = failure
        self.fired_s: float | None = None

    def ask(self) -> bool:
        """Whether it has fired.

        Raises:
            RuntimeError: the device reports an error, and will from then on.
        """
        if self.fired_s is None and self._torch.query():
            self.fired_s = self._anchor.time_of(self._torch)
            self._held = None
        return self.fired_s is not None

    def lose(self, error: BaseException) -> None:
        """The device will never reach it: it has stopped, and so has all that was given to it before."""
        if self.fired_s is None:
            self.failure, self.fired_s = error, time.perf_counter()
            self._held = None


class CudaEvent:
    """See `Event`. Its torch event is used again after each reset: making one takes the driver's lock.

    A reset while a stream's wait for it is still to run is harmless, and not refused: the device waits for the
    recording that was there when the wait was given, and a fired one is past waiting for.
    """

    __slots__ = ("_lock", "_mark", "_torch", "_waiting")

    def __init__(self) -> None:
        self._torch = torch.cuda.Event(enable_timing=True)
        self._mark: Mark | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    def check_unrecorded(self) -> None:
        if self._mark is not None:
            raise KvSafetyError("an event is recorded once: whoever waits for it could be let go too early")

    def record(
        self,
        stream: torch.cuda.Stream,
        anchor: Anchor,
        failure: BaseException | None = None,
        held: object = None,
    ) -> Mark:
        """Record it; `failure` is what the copies before it came to, `held` what they use.

        Raises:
            RuntimeError: the device reports an error.
        """
        self._torch.record(stream)
        return self._set(Mark(self._torch, anchor, failure, held))

    def lose(self, anchor: Anchor, error: BaseException) -> None:
        """It cannot be recorded: it counts as fired, with the error as its failure."""
        self._set(Mark(self._torch, anchor, None)).lose(error)

    def _set(self, mark: Mark) -> Mark:
        with self._lock:
            self._mark = mark
        return mark

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Hold the stream's later work until this recording has fired.

        Raises:
            RuntimeError: the device reports an error.
        """
        stream.wait_event(self._torch)

    @property
    def mark(self) -> Mark | None:
        """The recording that counts, None of an event that is free to be recorded."""
        return self._mark

    def join(self) -> Mark:
        """A thread is going to wait for it: until it `leave`s it cannot be reset."""
        with self._lock:
            # The driver lets this pass, and who waits would read what is not there yet.
            if self._mark is None:
                raise KvSafetyError("waiting for an event that nobody has recorded")
            self._waiting += 1
            return self._mark

    def leave(self) -> None:
        with self._lock:
            self._waiting -= 1

    def reset(self) -> None:
        """The caller has made sure that it has fired."""
        with self._lock:
            if self._waiting:
                raise KvSafetyError(
                    "an event that is still waited for would let go of whoever waits too late"
                )
            self._mark = None
