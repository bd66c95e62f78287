"""Who may ask what: tokens, the caller's address, and the name the endpoint is asked under."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp.web import BaseRequest

from kvlane.policy.errors import InputError
from kvlane.policy.service.config import Settings, is_loopback
from kvlane.policy.service.problems import ProblemError

_MOST_KNOWN_HOSTS = 256
_LARGEST_TOKEN = 4096


class Gate:
    """Lets a request pass or raises `ProblemError`.

    `Host` must be an address, `localhost` or one of `hosts`: a name somebody else points here is how a web page in
    a browser reaches a local service. With a `token` every endpoint but health and readiness asks for it. To observe
    takes `observe_token`; without one only this machine's own processes may, a proxy's callers not among them.
    """

    def __init__(
        self, token: str | None = None, observe_token: str | None = None, hosts: Iterable[str] = ()
    ) -> None:
        self._token = None if token is None else token.encode()
        self._observe_token = None if observe_token is None else observe_token.encode()
        self._names = {"localhost", *(host.lower() for host in hosts)}
        self._passed: set[str] = set()

    @property
    def needs_token(self) -> bool:
        return self._token is not None

    def check_host(self, request: BaseRequest) -> None:
        """Refuses a request that was meant for another name."""
        host = request.headers.get("Host", "")
        if host in self._passed:
            return
        if not self._known(host):
            raise ProblemError(
                "misdirected_host", f"{host[:80]!r} is none of the names this endpoint is known by"
            )
        if len(self._passed) < _MOST_KNOWN_HOSTS:
            self._passed.add(host)

    def check_token(self, request: BaseRequest) -> None:
        """Refuses a caller without the token, where there is one."""
        if self._token is not None and not _given(request, self._token):
            raise _unauthorized()

    def check_observer(self, request: BaseRequest) -> None:
        """Refuses a caller who may not say what was observed."""
        if self._observe_token is not None:
            if not _given(request, self._observe_token):
                raise _unauthorized()
            return
        self.check_token(request)
        if not _from_here(request):
            raise ProblemError(
                "forbidden", "without an observe token only this machine's own processes may observe"
            )

    def _known(self, host: str) -> bool:
        name = host.strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _given(request: BaseRequest, wanted: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Compared also where the scheme is wrong: how long a refusal takes says nothing.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), wanted)
    return same and scheme.lower() == "bearer"


def _unauthorized() -> ProblemError:
    return ProblemError(
        "unauthorized",
        "a token is needed, in Authorization: Bearer",
        headers={"WWW-Authenticate": 'Bearer realm="kvlane"'},
    )


def _from_here(request: BaseRequest) -> bool:
    if "X-Forwarded-For" in request.headers or "Forwarded" in request.headers:
        return False
    transport = request.transport
    peer = None if transport is None else transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return False
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def gate(settings: Settings, environment: Mapping[str, str] = os.environ) -> Gate:
    """The gate those settings ask for; raises `InputError` where everybody could ask, and nobody said so."""
    token = _token(environment.get("KVLANE_TOKEN"), settings.token_file, "token_file")
    observe = _token(
        environment.get("KVLANE_OBSERVE_TOKEN"), settings.observe_token_file, "observe_token_file"
    )
    host = settings.address()[0]
    if not is_loopback(host) and token is None and not settings.insecure:
        raise InputError(
            "listen",
            f"{settings.listen} can be reached from elsewhere, and there is no token",
            "KVLANE_TOKEN in the environment, --token-file, or --insecure",
        )
    return Gate(token, observe, [*settings.hosts, host])


def _token(from_environment: str | None, file: str | None, field: str) -> str | None:
    """The token in the file, else the environment's; an empty one is refused rather than taken for none."""
    if file is None:
        text = from_environment
        field = "KVLANE_TOKEN" if field == "token_file" else "KVLANE_OBSERVE_TOKEN"
    else:
        try:
            with Path(file).open(encoding="utf-8") as opened:
                text = opened.read(_LARGEST_TOKEN + 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not text"
            raise InputError(field, f"{file}: {reason}", "a file that holds the token") from None
    if text is None:
        return None
    token = text.strip()
    if not token or len(token) > _LARGEST_TOKEN or not token.isprintable() or " " in token:
        raise InputError(field, "holds no token", "one line of printable characters without spaces")
    return token
