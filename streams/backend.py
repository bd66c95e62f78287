"""What a device must offer for the executor: streams, events, async copies, memory, and a host to run on.

Rules that hold on every backend, so that the executor is written once:

- Work given to one stream runs in order. `copy`, `record` and `wait` return before it has run, except on `compute`
  of a backend whose compute is the calling thread.
- An event is recorded once, and once more after each `reset`. Waiting for one that was never recorded is a mistake the
  backend need not notice (on CUDA it returns at once), so whoever waits must know on the host that `record` was called.
- A copy and the events around it are one piece of work: nothing that another thread gives to the stream comes
  between them, and what fails in a copy is on that copy's own `done` and nowhere else. An error that the device
  reports while a copy is being handed over counts as that copy's failure, too.
- What is used wrongly raises `KvSafetyError`: a closed backend or stream, an event recorded twice or reset too early,
  or one read before it has fired.
- The executor takes its threads, flags and clock from the backend too: a backend with a virtual clock can then
  decide every interleaving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvlane.transfer.layout import CopyDescriptor
from kvlane.transfer.store import HostBytes

if TYPE_CHECKING:
    import torch


class Flag(Protocol):
    """A host-side latch, as `threading.Event`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread until set; False when the timeout in seconds passed first."""


class Stream(Protocol):
    """Work in order. Only its backend looks inside."""

    @property
    def name(self) -> str: ...


class Event(Protocol):
    """A point in one stream's work. Only its backend looks inside."""


class Backend(Protocol):
    """One device. Methods may be called from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def compute(self) -> Stream:
        """The stream the model's own work runs on."""

    # The host.

    def now(self) -> float:
        """Seconds on the backend's clock; event times are on the same one."""

    def start(self, task: Callable[[], None], name: str) -> None:
        """Run a task on a thread of its own. `close` waits for it."""

    def flag(self) -> Flag: ...

    # Memory.

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8 [nbytes], touched, writable from any thread."""

    def host_bytes(self, nbytes: int) -> HostBytes:
        """Host memory the device copies from at full speed, uint8 [nbytes], touched."""

    def read(self, device: torch.Tensor) -> HostBytes:
        """A contiguous uint8 device tensor's bytes on the host, in order after `compute`; a view where that is free."""

    # The device.

    def stream(self, name: str) -> Stream:
        """A new copy stream; `release` it when it is no longer needed."""

    def release(self, stream: Stream) -> None:
        """Take no more work on a copy stream; what it was given still runs. Returns at once, also when repeated."""

    def event(self) -> Event: ...

    def reset(self, event: Event) -> None:
        """Let an event be recorded again: it has fired, and nobody waits for it any more.

        Raises:
            KvSafetyError: it has not fired, or a stream or a thread still waits for it.
        """

    def copy(
        self,
        stream: Stream,
        destination: torch.Tensor,
        source: HostBytes,
        copies: Sequence[CopyDescriptor],
        cancel: Flag,
        began: Event,
        done: Event,
    ) -> None:
        """Copy from host to device. Both blocks and `copies` must stay as they are until `done` has fired.

        Records `began` before the first copy and `done` after the last, also when they fail. Once `cancel` is set,
        copies that have not begun may be dropped, which counts as their failure. Where this raises, nothing has been
        given to the stream.
        """

    def record(self, stream: Stream, event: Event) -> None:
        """Fire the event when the stream's work so far is done."""

    def wait(self, stream: Stream, event: Event, timeout_s: float | None = None) -> None:
        """Hold the stream's later work until the event has fired.

        Raises:
            TimeoutError: the calling thread is the stream, and the timeout passed first.
        """

    def synchronize(self, event: Event, timeout_s: float | None = None) -> None:
        """Hold the calling thread until the event has fired.

        Raises:
            TimeoutError: the timeout passed first.
        """

    def fired(self, event: Event) -> bool: ...

    def time_of(self, event: Event) -> float:
        """When a fired event fired."""

    def failure(self, event: Event) -> BaseException | None:
        """What failed in the copies a fired event is the `done` of, None if nothing did or it closes none."""

    def close(self) -> None:
        """Finish what was started and give the threads back."""
