"""Runs one load beside one forward pass: copies enqueued off the compute thread, one event per layer.

The pass tells `LayerPass` where it is (`begin`, `ready`, `end` of each layer), and `ready` holds the compute stream
until that layer's KV has arrived. All scheduling is here and none of it in a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvlane.policy.errors import InputError
from kvlane.streams.backend import Backend, Event, Stream
from kvlane.transfer.layout import CopyDescriptor, KvRegion, total_bytes
from kvlane.transfer.store import KvSafetyError, StoredRun

if TYPE_CHECKING:
    import torch

Mode: TypeAlias = Literal["bulk", "layered"]

DEFAULT_DEADLINE_S = 60.0
MAX_DEADLINE_S = 1e6
"""Eleven days, below what every clock and lock can wait: a load without a deadline could hold its memory for ever."""


def check_deadline(deadline_s: float) -> None:
    """Raises InputError for a time that is not positive, or longer than can be waited."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        raise InputError(
            "deadline_s", f"is {deadline_s}", f"a positive time of at most {MAX_DEADLINE_S:.0f} s"
        )


class LoadError(RuntimeError):
    """A load did not deliver a layer's KV: it raised, came late, or was given up. No token came out of the pass."""

    def __init__(self, layer: int, reason: str) -> None:
        self.layer = layer
        self.reason = reason
        super().__init__(f"layer {layer}: {reason}")


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """What happened to one layer, in seconds after the submission.

    Attributes:
        layer: index among the layers that hold KV.
        bytes: loaded for it; 0 without a load, and the four load fields are None then.
        copies: copies that carried them.
        enqueue_s: its copies were handed to the device.
        start_s: the copy stream reached them.
        arrive_s: the last of them was done.
        reached_s: compute came to need the KV: before the forward in bulk, inside the layer when layered.
        compute_begin_s: the layer's compute began.
        compute_end_s: the layer's compute ended, waiting included.
        exposed_s: how long compute stood still for this layer's KV (in bulk, layer 0 carries the whole wait).
    """

    layer: int
    bytes: int
    copies: int
    enqueue_s: float | None
    start_s: float | None
    arrive_s: float | None
    reached_s: float | None
    compute_begin_s: float
    compute_end_s: float
    exposed_s: float

    @property
    def compute_s(self) -> float:
        """The layer's own compute, its wait taken out where that lies inside it."""
        inside = self.reached_s is not None and self.reached_s >= self.compute_begin_s
        return self.compute_end_s - self.compute_begin_s - (self.exposed_s if inside else 0.0)

    @property
    def copy_s(self) -> float | None:
        """Time the layer's copies took on their stream, None without a load."""
        if self.start_s is None or self.arrive_s is None:
            return None
        return self.arrive_s - self.start_s


class LayerLoad:
    """One load in flight: every layer's copies, enqueued by a thread of its own.

    The source stays pinned until the last copy that was enqueued is done, however the load ends; `settled` says that
    it is, and only then may the destination be used for something else.
    """

    def __init__(
        self,
        backend: Backend,
        stream: Stream,
        source: StoredRun,
        destination: torch.Tensor,
        region: KvRegion,
        *,
        mode: Mode,
        deadline_s: float,
    ) -> None:
        self.mode = mode
        self.layers = region.layout.layers
        self._backend = backend
        self._stream = stream
        self._destination = destination
        self._region = region
        self._deadline = backend.now() + deadline_s
        self._error: LoadError | None = None
        self._checked = 0  # layers before it are known to have arrived whole
        self.copies: list[tuple[CopyDescriptor, ...]] = [()] * self.layers
        self.enqueued_at = [0.0] * self.layers
        self.started = [backend.event() for _ in range(self.layers)]
        self.arrived = [backend.event() for _ in range(self.layers)]
        self._issued = [backend.flag() for _ in range(self.layers)]
        self._cancel = backend.flag()
        self._settled = backend.flag()
        # The copies may overwrite what earlier compute still reads: they wait for it.
        self._fence = backend.event()
        backend.record(backend.compute, self._fence)
        self._source = source.retain()
        try:
            backend.start(self._run, "enqueue")
        except BaseException:
            self._source.close()
            raise

    def hold(self, layer: int) -> None:
        """Hold the compute stream until a layer's KV is there.

        Raises:
            LoadError: it is not, and will not be.
        """
        self._await_issue(layer)
        try:
            self._backend.wait(self._backend.compute, self.arrived[layer], self._left())
        except TimeoutError as error:
            raise self._fail(layer, "not arrived before the deadline") from error
        self._check(layer)

    def finish(self) -> None:
        """Make sure on the host that every layer arrived whole, and that source and destination are free again.

        Raises:
            LoadError: one did not; what compute made of it must not be used.
        """
        for layer in range(self.layers):
            self._await_issue(layer)
            try:
                self._backend.synchronize(self.arrived[layer], self._left())
            except TimeoutError as error:
                raise self._fail(layer, "not arrived before the deadline") from error
            self._check(layer)
        if not self._settled.wait(self._left()):
            raise self._fail(self.layers - 1, "not settled before the deadline")

    def give_up(self) -> None:
        """Let copies that have not begun be dropped. The pins go once those that have begun are done."""
        self._cancel.set()

    def settle(self, timeout_s: float | None) -> bool:
        """Wait until no copy is under way any more; False when the timeout passed first."""
        return self._settled.wait(timeout_s)

    @property
    def settled(self) -> bool:
        return self._settled.is_set()

    def _await_issue(self, layer: int) -> None:
        # Always before waiting for a layer's event: where nobody has recorded it yet, a device would not wait.
        if self._error is None and not self._issued[layer].wait(self._left()):
            raise self._fail(layer, "not enqueued before the deadline")
        if self._error is not None:
            raise self._error

    def _check(self, layer: int) -> None:
        # Every layer up to this one: a bulk load waits for the last only. Where waiting is the device's, some have
        # not fired yet; `finish` comes back for them.
        while self._checked <= layer and self._backend.fired(self.arrived[self._checked]):
            failure = self._backend.failure(self.arrived[self._checked])
            if failure is not None:
                raise self._fail(self._checked, f"copy failed: {failure}") from failure
            self._checked += 1

    def _fail(self, layer: int, reason: str) -> LoadError:
        if self._error is None:
            self._error = LoadError(layer, reason)
        # After the error: the enqueuing thread reports what it then leaves out as given up, unless there is one.
        self._cancel.set()
        return self._error

    def _left(self) -> float:
        return max(0.0, self._deadline - self._backend.now())

    def _run(self) -> None:
        """The enqueuing thread: give the copies to the stream, then stay to free the source."""
        layer = 0
        try:
            self._backend.wait(self._stream, self._fence)
            for layer in range(self.layers):
                if self._cancel.is_set():
                    break
                self._enqueue(layer)
        except Exception as error:  # noqa: BLE001  it reaches the compute thread as the LoadError that `hold` raises
            self._fail(layer, f"enqueue failed: {error}")
        # Those that were not enqueued will never be: wake whoever waits for them.
        if not all(flag.is_set() for flag in self._issued):
            self._fail(layer, "given up")
        issued = [layer for layer, flag in enumerate(self._issued) if flag.is_set()]
        for flag in self._issued:
            flag.set()
        self._settle(issued)

    def _enqueue(self, layer: int) -> None:
        self.copies[layer] = copies = self._source.copies(layer, self._region)
        self.enqueued_at[layer] = self._backend.now()
        self._backend.copy(
            self._stream,
            self._destination,
            self._source.memory,
            copies,
            self._cancel,
            began=self.started[layer],
            done=self.arrived[layer],
        )
        self._issued[layer].set()

    def _settle(self, issued: list[int]) -> None:
        # The stream runs in order, and a layer that was not issued gave it nothing: the last one issued ends last.
        if issued:
            self._backend.synchronize(self.arrived[issued[-1]])
        for layer in issued:
            if self._backend.failure(self.arrived[layer]) is None:
                self._source.count_moved(total_bytes(self.copies[layer]))
        self._source.close()
        self._settled.set()


class LayerPass:
    """One forward pass over the layers, beside a load or without one. Used by the thread that computes."""

    def __init__(self, backend: Backend, layers: int, load: LayerLoad | None, submitted_s: float) -> None:
        self._backend = backend
        self._load = load
        self._submitted_s = submitted_s
        self._begun: list[Event | None] = [None] * layers
        self._ended: list[Event | None] = [None] * layers
        self._reached: list[Event | None] = [None] * layers
        self._resumed: list[Event | None] = [None] * layers

    def before(self) -> None:
        """Call before the forward: in bulk everything is awaited here.

        Raises:
            LoadError: a layer did not arrive.
        """
        if self._load is not None and self._load.mode == "bulk":
            self._reached[0] = self._record()
            self._load.hold(self._load.layers - 1)
            self._resumed[0] = self._record()

    def begin(self, layer: int) -> None:
        """The layer's compute begins."""
        self._begun[layer] = self._record()

    def ready(self, layer: int) -> None:
        """Return when work given to the compute stream may read the layer's KV.

        Raises:
            LoadError: it did not arrive.
        """
        if self._load is not None and self._load.mode == "layered":
            self._reached[layer] = self._record()
            self._load.hold(layer)
            self._resumed[layer] = self._record()

    def end(self, layer: int) -> None:
        """The layer's compute has been given to the stream."""
        self._ended[layer] = self._record()

    def finish(self) -> tuple[LayerTiming, ...]:
        """Call once the result is on the host: one row per layer, after making sure that every layer arrived.

        Raises:
            LoadError: one did not; the result must not be used.
        """
        if self._load is not None:
            self._load.finish()
        return tuple(self._row(layer) for layer in range(len(self._begun)))

    def _record(self) -> Event:
        event = self._backend.event()
        self._backend.record(self._backend.compute, event)
        return event

    def _at(self, event: Event | None) -> float:
        if event is None:
            raise KvSafetyError("the pass did not visit every layer")
        return self._backend.time_of(event) - self._submitted_s

    def _row(self, layer: int) -> LayerTiming:
        load, reached = self._load, self._reached[layer]
        enqueue = start = arrive = None
        copies: tuple[CopyDescriptor, ...] = ()
        if load is not None:
            copies = load.copies[layer]
            enqueue = load.enqueued_at[layer] - self._submitted_s
            start, arrive = self._at(load.started[layer]), self._at(load.arrived[layer])
        return LayerTiming(
            layer=layer,
            bytes=total_bytes(copies),
            copies=len(copies),
            enqueue_s=enqueue,
            start_s=start,
            arrive_s=arrive,
            reached_s=None if reached is None else self._at(reached),
            compute_begin_s=self._at(self._begun[layer]),
            compute_end_s=self._at(self._ended[layer]),
            exposed_s=0.0 if reached is None else self._at(self._resumed[layer]) - self._at(reached),
        )


class LayerExecutor:
    """Starts loads on one copy stream of a backend, which it makes. Methods may be called from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = backend.stream("copy")
        self._closed = False

    def close(self) -> None:
        """Give the stream back; returns at once. Copies it was given still run, and their loads settle.

        A load whose layers are not all enqueued yet fails at the first that is not.
        """
        self._closed = True
        self._backend.release(self._stream)

    def submit(
        self,
        source: StoredRun,
        destination: torch.Tensor,
        region: KvRegion,
        *,
        mode: Mode,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> LayerLoad:
        """Start copying every layer of a run into the same tokens of a device region; returns at once.

        Args:
            source: the run; it is retained, so the caller's handle may be closed at any time.
            destination: device memory, uint8 [region.nbytes]. Nothing else may touch the run's tokens in it until
                the load has settled.
            region: how `destination` is arranged.
            mode: `layered`, or `bulk`, which differs only in what the pass waits for.
            deadline_s: from now; a layer that has not arrived by then is given up.

        Raises:
            InputError: a mode that does not exist, a deadline that is not positive or above `MAX_DEADLINE_S`, a run
                that does not fit.
            KvSafetyError: the executor or its backend is closed.
        """
        if mode not in ("bulk", "layered"):
            raise InputError("mode", f"is {mode!r}", "bulk or layered")
        check_deadline(deadline_s)
        if source.region.layout != region.layout:
            raise InputError("layout", f"{source.region.layout.name} is stored", region.layout.name)
        if source.end > region.capacity_tokens:
            raise InputError("source.end", f"is {source.end}", f"at most {region.capacity_tokens} tokens")
        if self._closed:
            raise KvSafetyError("the executor is closed")
        return LayerLoad(
            self._backend, self._stream, source, destination, region, mode=mode, deadline_s=deadline_s
        )
