"""Running the service: the loop, its signals, and what is done at intervals."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from time import monotonic

from aiohttp import web

from kvlane.policy.errors import InputError
from kvlane.policy.service.app import Endpoint
from kvlane.policy.service.config import Settings
from kvlane.policy.service.service import Service
from kvlane.policy.service.wire import Heads, Server

log = logging.getLogger("kvlane.serve")

_TICK_S = 1.0
_LEARN_EVERY_S = 5.0
# While draining, clients whose connections are open may ask once more and are told that it was the last time.
_LAST_WORDS_S = 1.0
_BACKLOG = 1024
# Nobody is answered while a snapshot is taken: a large one is taken so much more seldom than it takes.
_SNAPSHOT_SHARE = 50


class Running:
    """One service on one socket, until it is told to stop."""

    def __init__(self, settings: Settings, again: Callable[[], Settings]) -> None:
        self.service = Service(settings)
        self._again = again
        self._heads = Heads()
        self._endpoint = Endpoint(self.service, self._heads)
        self._stop = asyncio.Event()
        self._disk = asyncio.Lock()
        self._written = asyncio.Event()

    async def run(self, listening: Callable[[str, int], None]) -> None:
        """Serves until SIGTERM or SIGINT; `listening` is told where. Raises `InputError` where it cannot listen."""
        settings = self.service.settings
        endpoint = self._endpoint
        server = Server(endpoint.handle, endpoint.at_once, settings.limits, self.service.cells, self._heads)
        runner = web.ServerRunner(server, shutdown_timeout=settings.limits.drain_s)
        await runner.setup()
        host, port = settings.address()
        site = web.TCPSite(runner, host or None, port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise InputError(
                "listen", f"{settings.listen}: {error.strerror or error}", "a free port"
            ) from None
        tasks = [
            asyncio.create_task(each)
            for each in (self._tick(server), self._flush(), self._sync(), self._snapshots(), self._learn())
        ]
        for task in tasks:
            task.add_done_callback(self._ended)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        for address in runner.addresses:
            listening(address[0], address[1])
        try:
            await self._stop.wait()
            log.info("draining")
            self._endpoint.draining = True
            await site.stop()
            deadline = monotonic() + _LAST_WORDS_S
            while server.connections and monotonic() < deadline:
                await asyncio.sleep(0.02)
            await runner.cleanup()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._write()
            await self._keep()
            if self.service.store is not None:
                await asyncio.to_thread(self.service.store.close)
        log.info("stopped")

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a defect: better stop than serve on without it."""
        if not task.cancelled() and task.exception() is not None:
            log.critical("a task failed", exc_info=task.exception())
            self._stop.set()

    def _reload(self) -> None:
        try:
            self.service.reload(self._again())
        except InputError as error:
            log.error("not reloaded, all stays as it was: %s", error)
        else:
            log.info("reloaded", extra={"deployments": list(self.service.intake.learners)})

    async def _tick(self, server: Server) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._heads.renew()
            server.sweep()
            self.service.desk.ledger.expire(monotonic())

    async def _flush(self) -> None:
        while True:
            # Several times an interval: also what is acknowledged right after one write, and a disk that makes the next
            # one wait, leave it within the interval. Nothing else may be waited for here.
            await asyncio.sleep(self.service.settings.flush_s / 4)
            await self._write()

    async def _snapshots(self) -> None:
        pause_s = 0.0
        while True:
            await asyncio.sleep(max(self.service.settings.snapshot_s, pause_s))
            if self.service.to_keep:
                pause_s = _SNAPSHOT_SHARE * await self._keep()

    async def _write(self) -> None:
        """Makes what was acknowledged outlive this process; it is on the disk soon after."""
        store = self.service.store
        if store is None:
            return
        async with self._disk:
            lines = store.take()
            if not lines and not self.service.unwritten:
                return
            try:
                await asyncio.to_thread(store.write, lines)
            except OSError as error:
                store.put_back(lines)
                self._failed(error)
            else:
                self._written.set()

    async def _sync(self) -> None:
        while True:
            await self._written.wait()
            self._written.clear()
            store = self.service.store
            assert store is not None
            try:
                await asyncio.to_thread(store.sync)
            except OSError as error:
                self._failed(error)
            else:
                self.service.unwritten = False

    def _failed(self, error: OSError) -> None:
        self.service.cells.journal_failures += 1
        if not self.service.unwritten:
            log.error("the journal cannot be written, and nothing is observed meanwhile: %s", error)
        self.service.unwritten = True

    async def _keep(self) -> float:
        """Takes a snapshot; for as long as is returned nobody was answered. Journals stay until it is written."""
        store = self.service.store
        if store is None:
            return 0.0
        taken_s = 0.0
        try:
            await asyncio.to_thread(store.prepare)
            begun = monotonic()
            snapshot, parts = self.service.snapshot()
            taken_s = monotonic() - begun
            await asyncio.to_thread(store.save, snapshot, parts)
        except OSError as error:
            log.error("the snapshot cannot be written: %s", error)
        return taken_s

    async def _learn(self) -> None:
        while True:
            await asyncio.sleep(_LEARN_EVERY_S)
            for name in list(self.service.intake.learners):
                record = await asyncio.to_thread(self.service.learn, name)
                if record is not None:
                    self.service.put_in_force(name, record)


def serve(settings: Settings, again: Callable[[], Settings], listening: Callable[[str, int], None]) -> None:
    """Serves those settings until SIGTERM or SIGINT; SIGHUP asks `again` for settings to go on with.

    Raises `InputError` for what cannot be served.
    """

    async def main() -> None:
        running = Running(settings, again)
        # What is there now stays, and what a request leaves behind is freed without the collector: it need not look
        # often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 50, 100)
        await running.run(listening)

    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
