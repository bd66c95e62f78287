"""Sockets that keep a deadline: whatever is done on one ends with it, by TimeoutError."""

from __future__ import annotations

import io
import socket
import ssl
import threading
from collections.abc import Sequence
from http.client import HTTPConnection
from time import monotonic
from typing import Any

# Addresses are looked up again after that long; those known serve until the new ones are there.
_ADDRESSES_S = 30.0

_Addresses = Sequence[tuple[int, int, int, str, Any]]


class Deadline:
    """A moment by which all must be done."""

    __slots__ = ("at",)

    def __init__(self, seconds: float) -> None:
        self.at = monotonic() + seconds

    def left_s(self) -> float:
        """Seconds left; raises TimeoutError when there are none."""
        left = self.at - monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return left


class Addresses:
    """Where a host is. A resolver cannot be told to hurry, so it is asked on a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = threading.Lock()
        self._asked: threading.Event | None = None
        self._known: _Addresses = ()
        self._known_until = 0.0
        self._error: OSError | None = None
        try:
            # A literal address needs no resolver, and never another look.
            self._known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            self._known_until = float("inf")
        except OSError:
            pass

    def find(self, deadline: Deadline) -> _Addresses:
        """The addresses; raises TimeoutError and OSError."""
        if monotonic() < self._known_until:
            return self._known
        with self._lock:
            asked = self._asked
            if asked is None:
                asked = self._asked = threading.Event()
                threading.Thread(target=self._ask, args=(asked,), name="kvlane-resolver", daemon=True).start()
        if not self._known:
            if not asked.wait(deadline.left_s()):
                raise TimeoutError("the name was not resolved in time")
            if not self._known:
                raise self._error or OSError("the name has no address")
        return self._known

    def _ask(self, asked: threading.Event) -> None:
        try:
            self._known = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            self._known_until = monotonic() + _ADDRESSES_S
        except OSError as error:
            self._error = error
        finally:
            with self._lock:
                self._asked = None
            asked.set()


class TimedSocket(io.RawIOBase):
    """A connected socket as `http.client` uses one; every call has what is left of `deadline`."""

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self.deadline = deadline
        self._socket = connected
        self._readers = 0

    def sendall(self, data: Any) -> None:
        view = memoryview(data)
        while view:
            self._socket.settimeout(self.deadline.left_s())
            view = view[self._socket.send(view) :]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(self.deadline.left_s())
        return self._socket.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002
        """A reader of one answer. The socket stays open for it where its connection is closed before."""
        self._readers += 1
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        super().close()
        if self._readers == 0:
            self._socket.close()

    def reader_closed(self) -> None:
        self._readers -= 1
        if self.closed:
            self.close()


class _Reader(io.RawIOBase):
    def __init__(self, source: TimedSocket) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._source.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._source.reader_closed()


class TimedConnection(HTTPConnection):
    """An HTTP connection whose every step keeps the deadline it is given."""

    def __init__(self, addresses: Addresses, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._addresses, self._tls = addresses, tls
        self.deadline = Deadline(0)

    def use(self, deadline: Deadline) -> None:
        """Keeps this deadline from now on."""
        self.deadline = deadline
        if isinstance(self.sock, TimedSocket):
            self.sock.deadline = deadline

    def connect(self) -> None:
        found = self._addresses.find(self.deadline)
        error: OSError = OSError("the name has no address")
        for place, (family, kind, protocol, _, address) in enumerate(found):
            # Each address has its share of the time, so that a dead one does not take that of the next.
            share = self.deadline.left_s() / (len(found) - place)
            connected = socket.socket(family, kind, protocol)
            try:
                connected.settimeout(share)
                connected.connect(address)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connected.settimeout(self.deadline.left_s())
                    connected = self._tls.wrap_socket(connected, server_hostname=self.host)
                self.sock = TimedSocket(connected, self.deadline)
                return
            except OSError as failed:
                connected.close()
                error = failed
        raise error
