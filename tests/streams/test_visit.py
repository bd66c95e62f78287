"""A run as a store's visitor has it: what it keeps."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace

from kvlane.streams.cpu import CpuBackend
from kvlane.streams.store_thread import StoreThread
from kvlane.streams.visit import Visit, VisitedRun


def test_a_pin_that_failed_keeps_no_run():
    """It is the handle on a prompt's memory."""

    def refuse():
        raise OSError("gone")

    told: list[str] = []
    with CpuBackend() as backend:
        visit = Visit(backend, StoreThread(backend, "store-disk", 1.0), backend.now() + 60, told.append)
        gc.collect()
        gc.disable()
        try:
            run = VisitedRun(SimpleNamespace(retain=refuse, close=refuse), visit, 0.0)
            seen = weakref.ref(run)
            run.pin()
            with suppress(OSError):
                run.retain()
            run.put_away()
            del run
            assert seen() is None
        finally:
            gc.enable()
    assert told == ["close failed: gone"]
