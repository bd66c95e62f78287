"""Requests whose head is known: one that begins like one that was let through, byte for byte, is let through as well.

To parse a head, to make an object and a task of it, and to look at its fields takes as long as a decision, and clients
send the same head again and again: only the length in it differs. So a head is remembered once aiohttp has parsed it
and it has passed all that is asked of it; when the same bytes come again, and with them a body of the length they
declare and nothing more, the body is all that is left to look at. What differs by a single byte, comes in several
pieces, or comes while another request is on its way goes through aiohttp, as everything does at first.
"""

from __future__ import annotations

from aiohttp import web

_END = b"\r\n\r\n"

# As many as there are lengths of bodies, for each kind of client.
_MOST_HEADS = 4096
_LONGEST_HEAD = 1024

# What a head says beyond where a body goes, and who sends it: these are answered in ways of their own.
_APART = ("Transfer-Encoding", "Upgrade", "Expect", "traceparent")


class KnownHeads:
    """Heads of requests for one operation that were let through, with the lengths of their bodies.

    They hold as long as the gate that let them pass.
    """

    def __init__(self) -> None:
        self._lengths: dict[bytes, int] = {}
        self._gate: object = None

    def learn(self, head: bytes, request: web.BaseRequest, gate: object) -> None:
        """Remembers the head of a request that was answered and leaves its connection open."""
        if len(head) > _LONGEST_HEAD or any(name in request.headers for name in _APART):
            return
        length = request.content_length
        if length is None:
            return
        if len(self._lengths) >= _MOST_HEADS:
            self._lengths.clear()
        self._check(gate)
        self._lengths[head] = length

    def body(self, data: bytes, gate: object) -> bytes | None:
        """The body, where `data` is one whole request with a known head."""
        self._check(gate)
        end = data.find(_END) + len(_END)
        if self._lengths.get(data[:end]) != len(data) - end:
            return None
        return data[end:]

    def _check(self, gate: object) -> None:
        if gate is not self._gate:
            self._lengths.clear()
            self._gate = gate


def head_of(received: bytes, body: bytes) -> bytes | None:
    """The head of what was received, where that is one request with this body as it is and nothing more."""
    length = len(received) - len(body)
    if received.find(_END) + len(_END) != length or received[length:] != body:
        return None
    return received[:length]
