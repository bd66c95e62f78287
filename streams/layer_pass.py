"""One forward pass over the layers, beside a load or without one: where it waits, and when everything ran."""

from __future__ import annotations

from kvlane.streams.backend import Backend, Event, Flag
from kvlane.streams.faults import PrefillCancelledError
from kvlane.streams.load import LayerLoad
from kvlane.streams.timing import CopyTiming, LayerTiming
from kvlane.transfer.store import KvSafetyError


class LayerPass:
    """Used by the thread that computes: it says where it is (`begin`, `ready`, `end` of each layer).

    Args:
        layers: every layer of the model, those without KV included.
        load: what the pass waits for, None for one that waits for nothing.
        submitted_s: when the request arrived, on the backend's clock.
        cancel: looked at in every layer, if given.
    """

    def __init__(
        self,
        backend: Backend,
        layers: int,
        load: LayerLoad | None,
        submitted_s: float,
        cancel: Flag | None = None,
    ) -> None:
        self._backend = backend
        self._load = load
        self._submitted_s = submitted_s
        self._cancel = cancel
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
            self._load.hold_all()
            self._resumed[0] = self._record()

    def begin(self, layer: int) -> None:
        """The layer's compute begins.

        Raises:
            LoadError: a layer is known not to arrive.
            PrefillCancelledError: it need not.
        """
        self._check_worthwhile()
        self._begun[layer] = self._record()

    def ready(self, layer: int) -> None:
        """Return when work given to the compute stream may read the layer's KV.

        Raises:
            LoadError: it did not arrive, or another layer is known not to.
            PrefillCancelledError: nobody wants it any more.
        """
        if self._load is not None and self._load.mode == "layered" and self._load.awaits(layer):
            self._reached[layer] = self._record()
            self._load.hold(layer)
            self._resumed[layer] = self._record()
        self._check_worthwhile()

    def end(self, layer: int) -> None:
        """The layer's compute has been given to the stream."""
        self._ended[layer] = self._record()

    def finish(self) -> None:
        """Call once the result is on the host, to make sure that every layer arrived.

        Raises:
            LoadError: one did not; the result must not be used.
        """
        if self._load is not None:
            self._load.finish()

    def timings(self) -> tuple[LayerTiming, ...]:
        """One row per layer, once the pass has ended on the device.

        Raises:
            KvSafetyError: it has not, or left a layer out.
        """
        copies: dict[int, list[CopyTiming]] = {}
        if self._load is not None:
            for part in self._load.timings(self._submitted_s):
                for row in part.layers:
                    copies.setdefault(row.layer, []).append(row)
        return tuple(self._row(layer, copies.get(layer, [])) for layer in range(len(self._begun)))

    def _check_worthwhile(self) -> None:
        """That there is a reason to go on."""
        if self._cancel is not None and self._cancel.is_set():
            raise PrefillCancelledError("the request was called off")
        if self._load is not None and self._load.mode == "layered":
            self._load.check()

    def _record(self) -> Event:
        event = self._backend.event()
        self._backend.record(self._backend.compute, event)
        return event

    def _at(self, event: Event | None) -> float:
        if event is None:
            raise KvSafetyError("the pass did not visit every layer")
        return self._backend.time_of(event) - self._submitted_s

    def _row(self, layer: int, copies: list[CopyTiming]) -> LayerTiming:
        reached = self._reached[layer]
        return LayerTiming(
            layer=layer,
            bytes=sum(row.bytes for row in copies),
            copies=sum(row.copies for row in copies),
            enqueue_s=min((row.enqueue_s for row in copies), default=None),
            start_s=min((row.start_s for row in copies), default=None),
            arrive_s=max((row.arrive_s for row in copies), default=None),
            reached_s=None if reached is None else self._at(reached),
            compute_begin_s=self._at(self._begun[layer]),
            compute_end_s=self._at(self._ended[layer]),
            exposed_s=0.0 if reached is None else self._at(self._resumed[layer]) - self._at(reached),
        )
