"""`serve.toml`, and the same from flags: what `kvlane serve` is told at its start.

```toml
listen = "127.0.0.1:8780"
state_dir = "/var/lib/kvlane"

[[deployments]]
name = "chat"
model = "llama-3.1-8b"
aliases = ["meta-llama/Llama-3.1-8B-Instruct"]
machine = "h100-sxm"
prefill_chunk_tokens = 8192

[deployments.links.pcie5-x16]
scope = "device"
rate = "50 GB/s"
```
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvlane.policy.booking import Scope
from kvlane.policy.errors import InputError
from kvlane.policy.plan import Executor
from kvlane.policy.service.types import Name, SomeTokens

_Positive = Annotated[float, Meta(gt=0, le=86400)]
_Count = Annotated[int, Meta(ge=1, le=1 << 24)]
_LARGEST_BYTES = 1 << 20


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class LinkSettings(_Section, frozen=True):
    """What one link of a deployment is shared by, and its achieved rate where it is known better than the profile.

    `device`: each instance has its own; `node`: those that name the same `node` in their requests share it;
    `fleet`: all share it.
    """

    scope: Scope = "device"
    rate: str | None = None


class DeploymentSettings(_Section, frozen=True):
    """One model on one kind of machine as one engine runs it."""

    name: Name
    model: str | None = None
    machine: str | None = None
    aliases: list[Name] = []
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=1024)] | None = None
    kv_cache_dtype: Name | None = None
    engine: Name | None = None
    executor: Executor = "bulk"
    prefill_chunk_tokens: SomeTokens | None = None
    load_unit_tokens: SomeTokens = 16
    calibration: str | None = None
    links: dict[Name, LinkSettings] = {}


class Limits(_Section, frozen=True):
    """What one caller, or all of them together, can make the service spend. Sizes in bytes, times in seconds."""

    body_bytes: _Count = 4 << 20
    header_bytes: Annotated[int, Meta(ge=256, le=1 << 16)] = 8190
    headers: Annotated[int, Meta(ge=8, le=1024)] = 64
    connections: _Count = 1024
    in_flight: _Count = 256
    candidates: _Count = 256
    batch: _Count = 10_000
    observations: _Count = 1000
    reservations: _Count = 100_000
    remembered: _Count = 65_536
    request_ids: _Count = 10_000
    request_s: _Positive = 10.0
    idle_s: _Positive = 75.0
    drain_s: _Positive = 15.0


class Settings(_Section, frozen=True):
    """Everything `kvlane serve` is told; `folder` of relative paths is that of the file."""

    deployments: Annotated[list[DeploymentSettings], Meta(min_length=1, max_length=1000)]
    listen: str = "127.0.0.1:8780"
    hosts: list[Name] = []
    state_dir: str | None = None
    flush_s: Annotated[float, Meta(gt=0, le=60)] = 1.0
    snapshot_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    token_file: str | None = None
    observe_token_file: str | None = None
    insecure: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        self.address()
        names: set[str] = set()
        for deployment in self.deployments:
            for name in (deployment.name, *deployment.aliases):
                if name in names:
                    raise ValueError(f"deployments: two go by {name!r}")
                names.add(name)

    def address(self) -> tuple[str, int]:
        """Host and port to listen on; raises ValueError for a text that is none."""
        host, sign, port = self.listen.rpartition(":")
        if not sign or not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise ValueError(f"listen: {self.listen!r} is not HOST:PORT")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.address()[0])


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; a name other than localhost never is."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def from_fields(fields: Mapping[str, Any], where: str = "") -> Settings:
    """Settings from plain values; raises `InputError` naming the field (`deployments[0].model`)."""
    try:
        return msgspec.convert(fields, Settings, strict=True)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at `$")
        text = f"{where}: {problem}" if where else problem
        raise InputError(at.strip("`.") or "config", text) from None


def overridden(settings: Settings, fields: Mapping[str, Any]) -> Settings:
    """The same with other values for some fields; raises `InputError` naming the field."""
    return from_fields({**msgspec.to_builtins(settings), **fields})


def decode(raw: bytes, where: str) -> Settings:
    """Settings from TOML text; raises `InputError` naming the field."""
    try:
        fields = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError("config", f"{where} is not TOML: {str(error) or type(error).__name__}") from None
    return from_fields(fields, where)


def read(path: Path) -> Settings:
    """Settings from a file, its relative paths taken from the file's folder; raises `InputError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise InputError("--config", f"{path}: {error.strerror or error}", "a readable serve.toml") from None
    if len(raw) > _LARGEST_BYTES:
        raise InputError("--config", f"{path} is larger than 1 MiB", "a serve.toml")
    return _anchored(decode(raw, str(path)), path.resolve().parent)


def _anchored(settings: Settings, folder: Path) -> Settings:
    def whole(text: str | None) -> str | None:
        return None if text is None else str(folder / Path(text).expanduser())

    def file_of(text: str | None, suffix: str) -> str | None:
        return whole(text) if text is not None and text.endswith(suffix) else text

    return msgspec.structs.replace(
        settings,
        state_dir=whole(settings.state_dir),
        token_file=whole(settings.token_file),
        observe_token_file=whole(settings.observe_token_file),
        deployments=[
            msgspec.structs.replace(
                each,
                model=file_of(each.model, ".json"),
                machine=file_of(each.machine, ".toml"),
                calibration=whole(each.calibration),
            )
            for each in settings.deployments
        ],
    )
