"""A real `kvlane serve` on a loopback port for each test that wants one, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ONE = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}


@dataclass
class Answer:
    """What came back: the body decoded where it is JSON."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


@dataclass
class Served:
    """One server process."""

    process: subprocess.Popen[bytes]
    port: int
    log: list[str] = field(default_factory=list)
    drain: threading.Thread | None = None

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            sent = dict(headers or {})
            raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            if raw is not None:
                sent.setdefault("Content-Type", "application/json")
            connection.request(method, path, raw, sent)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def decide(self, **fields: Any) -> Any:
        """The decision for a request that must be answered."""
        answer = self.ask("POST", "/v1/decide", fields)
        assert answer.status == 200, answer.raw
        return answer.body

    def observe(self, *records: Mapping[str, Any]) -> Any:
        """What became of records that must be acknowledged."""
        answer = self.ask("POST", "/v1/observe", list(records))
        assert answer.status == 202, answer.raw
        return answer.body

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the labels not named; 0 where there is none."""
        total = 0.0
        for line in self.ask("GET", "/metrics").raw.decode().splitlines():
            if line.partition("{")[0].partition(" ")[0] != name:
                continue
            if all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=30)
        assert self.drain is not None
        self.drain.join()
        return status

    def wait_for_log(self, words: str, seconds: float = 10.0) -> str:
        """The first log line with these words, which must come."""
        waiter = threading.Event()
        for _ in range(int(seconds / 0.02)):
            for line in list(self.log):
                if words in line:
                    return line
            waiter.wait(0.02)
        raise AssertionError(f"no log line with {words!r} in {self.log}")


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Served]]:
    """Starts a server; the caller stops it, and what a failed test left running is stopped at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, environment: Mapping[str, str] | None = None) -> Served:
        command = [sys.executable, "-c", "from kvlane.policy.cli import main; main()", "serve", *arguments]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("KVLANE_")}
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**clean, **(environment or {})}
        )
        started.append(process)
        assert process.stderr is not None
        log: list[str] = []
        port = 0
        for raw in process.stderr:
            line = raw.decode().rstrip()
            log.append(line)
            if line.startswith("kvlane listens on "):
                port = int(line.rpartition(":")[2])
                break
        else:
            process.stderr.close()
            raise AssertionError(f"exit status {process.wait()}: {log}")
        served = Served(process, port, log)

        def drain() -> None:
            assert process.stderr is not None
            with process.stderr:
                for raw in process.stderr:
                    log.append(raw.decode().rstrip())

        served.drain = threading.Thread(target=drain, daemon=True)
        served.drain.start()
        return served

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def serve(start_server: Serve, tmp_path: Path) -> Iterator[Serve]:
    """Serves a configuration, given as a mapping or as arguments; stopped at the end of the test."""
    running: list[Served] = []

    def start(
        config: Mapping[str, Any] | None = None,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> Served:
        if config is not None:
            file = tmp_path / "serve.toml"
            file.write_text(to_toml({"listen": "127.0.0.1:0", "deployments": [ONE], **config}))
            arguments = ("--config", str(file), *arguments)
        served = start_server(*arguments, environment=environment)
        running.append(served)
        return served

    yield start
    for served in running:
        served.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def server(start_server: Serve) -> Iterator[Served]:
    """One server with one deployment for the tests of a module that leave it as it was."""
    served = start_server(
        "--model", "llama-3.1-8b", "--machine", "h100-sxm", "--name", "chat", "--listen", "127.0.0.1:0"
    )
    yield served
    assert served.stop() == 0


def to_toml(fields: Mapping[str, Any]) -> str:
    """As much of TOML as a configuration needs: tables written inline."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(key)} = {_value(each)}" for key, each in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Path):
        return json.dumps(str(value))
    return json.dumps(value)


@pytest.fixture(scope="session")
def write_toml() -> Callable[[Path, Mapping[str, Any]], None]:
    """Writes a configuration file, with the default deployment where none is named."""

    def write(path: Path, config: Mapping[str, Any]) -> None:
        path.write_text(to_toml({"listen": "127.0.0.1:0", "deployments": [ONE], **config}))

    return write
