"""How many decisions a second one core answers, beside a bare aiohttp handler with a fixed reply of the same size.

    python tests/policy/service/rates.py [--seconds 5] [--json FILE]

The servers take turns on one core, the client keeps another busy with 16 connections, one request on each at a time.
Of several short rounds the least disturbed counts for the rate. CPU time, which others on the machine disturb less, is
the server's over all rounds: its clock ticks are too coarse for one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

CONNECTIONS = 16
COLUMN = 100
KVLANE = "from kvlane.policy.cli import main; main()"
BARE = """
import asyncio, sys
import uvloop
from aiohttp import web

reply = b"{" + b" " * (int(sys.argv[1]) - 2) + b"}"

async def handle(request):
    await request.read()
    return web.Response(body=reply, content_type="application/json")

async def main():
    app = web.Application()
    app.router.add_post("/v1/decide", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"listens on http://127.0.0.1:{runner.addresses[0][1]}", file=sys.stderr, flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


class Server:
    """One server process on one core."""

    def __init__(self, core: int, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", *arguments], stderr=subprocess.PIPE)
        os.sched_setaffinity(self.process.pid, {core})
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if b"listens on" in line:
                self.port = int(line.rpartition(b":")[2])
                return
        raise SystemExit("a server did not start")

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        parts = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Client(asyncio.Protocol):
    """Sends one request after the other on one connection and counts the answers."""

    def __init__(self, requests: Sequence[bytes], first: int, until: float) -> None:
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._requests, self._next, self._until = requests, first, until
        self._count = 0
        self._received = b""
        self._length = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1

    def data_received(self, data: bytes) -> None:
        received = self._received = self._received + data if self._received else data
        if not self._length:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return
            if not received.startswith(b"HTTP/1.1 200"):
                self.done.set_exception(SystemExit(f"answered {received[:300]!r}"))
                return
            head = received[:end].lower()
            self._length = end + 4 + int(head.partition(b"content-length:")[2].partition(b"\r")[0])
        if len(received) < self._length:
            return
        self._received, self._length = b"", 0
        self._count += 1
        if time.monotonic() < self._until:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(self._count)


async def drive(port: int, requests: Sequence[bytes], seconds: float) -> int:
    """Answers counted in that time."""
    loop = asyncio.get_running_loop()
    until = time.monotonic() + seconds
    clients = []
    for number in range(CONNECTIONS):
        first = number * len(requests) // CONNECTIONS
        make = partial(Client, requests, first, until)
        _, client = await loop.create_connection(make, "127.0.0.1", port)
        clients.append(client)
    return sum(await asyncio.gather(*(client.done for client in clients)))


def measure(server: Server, requests: Sequence[bytes], seconds: float) -> tuple[float, float, int]:
    """Requests a second, the server's CPU seconds, and how many requests took them."""
    cpu, begun = server.cpu_s(), time.monotonic()
    count = asyncio.run(drive(server.port, requests, seconds))
    return count / (time.monotonic() - begun), server.cpu_s() - cpu, count


def post(path: str, fields: dict[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def lengths(count: int) -> list[tuple[int, int]]:
    """Prompts and how much of them is stored, always the same ones."""
    choose = random.Random(7)
    found = []
    for _ in range(count):
        prompt = choose.randrange(500, 16_000)
        found.append((prompt, choose.randrange(0, prompt)))
    return found


def single(prompt: int, stored: int) -> bytes:
    return post("/v1/decide", {"prompt_tokens": prompt, "hits": [{"tier": "host", "tokens": stored}]})


def workloads() -> dict[str, tuple[list[bytes], int]]:
    """Requests by name, and how many decisions one of them is."""
    pairs = lengths(20_000)
    columns = [pairs[first : first + COLUMN] for first in range(0, len(pairs), COLUMN)]
    return {
        "one decision, asked again": ([single(12_370, 12_368)], 1),
        "one decision, each another": ([single(*pair) for pair in pairs], 1),
        f"{COLUMN} decisions as columns": (
            [
                post(
                    "/v1/decide/batch",
                    {
                        "prompt_tokens": [prompt for prompt, _ in column],
                        "hits": {"host": [stored for _, stored in column]},
                    },
                )
                for column in columns
            ],
            COLUMN,
        ),
    }


def reply_size(port: int, request: bytes) -> int:
    """Bytes of the body answered to one request."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(
        "POST",
        "/v1/decide",
        request.partition(b"\r\n\r\n")[2],
        {"Content-Type": "application/json"},
    )
    size = len(connection.getresponse().read())
    connection.close()
    return size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.7, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    server_core, client_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {client_core})
    kvlane = Server(
        server_core,
        KVLANE,
        "serve",
        "--model",
        "llama-3.1-8b",
        "--machine",
        "h100-sxm",
        "--listen",
        "127.0.0.1:0",
    )
    loads = workloads()
    size = reply_size(kvlane.port, loads["one decision, asked again"][0][0])
    bare = Server(server_core, BARE, str(size))
    found: dict[str, list[tuple[float, float, int]]] = {"bare": [], **{name: [] for name in loads}}
    try:
        for _ in range(options.rounds):
            found["bare"].append(measure(bare, loads["one decision, asked again"][0], options.seconds))
            for name, (requests, _) in loads.items():
                found[name].append(measure(kvlane, requests, options.seconds))
    finally:
        kvlane.stop()
        bare.stop()
    best = {
        name: (max(row[0] for row in rows), sum(row[1] for row in rows) / sum(row[2] for row in rows) * 1e6)
        for name, rows in found.items()
    }
    rate, cpu = best["bare"]
    print(f"bare aiohttp handler, {size} bytes: {rate:,.0f} requests/s, {cpu:.1f} us of CPU each")
    figures = {"bare": {"per_s": rate, "cpu_us": cpu, "reply_bytes": size}}
    for name, (_, decisions) in loads.items():
        per_s, own = best[name]
        figures[name] = {"per_s": per_s, "cpu_us": own, "decisions_per_s": per_s * decisions}
        print(
            f"{name}: {per_s * decisions:,.0f} decisions/s, {own:.1f} us of CPU a request;"
            f" requests at {per_s / rate:.0%} of the bare rate, {cpu / own:.0%} by CPU time"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
