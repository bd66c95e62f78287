"""What survives a restart: a snapshot, written whole or not at all, and a journal of what was acknowledged since.

After the snapshot's line come parts on lines of their own; one that is torn costs no other.
A journal's lines are flushed at an interval. Taking a snapshot begins the next journal first and removes the older
ones last, so that at every moment the snapshot and the journals after it hold everything. Each carries checksums; what
does not match its own is set aside under another name, and never stops a start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import threading
import zlib
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import sleep
from typing import Literal, TypeVar

import msgspec

from kvlane.policy.booking import SavedLedger
from kvlane.policy.errors import InputError
from kvlane.policy.service.kept import Part
from kvlane.policy.service.types import Observation, PrefillObservation, TransferObservation

log = logging.getLogger("kvlane.serve")

T = TypeVar("T")

_LARGEST_BYTES = 1 << 30
_MOST_TORN = 10


class Learnt(msgspec.Struct, frozen=True):
    """What is kept of one deployment: the record in force, and the samples to go on from.

    `mark` says of what they are: another model, device or engine under the same name has no use for them.
    """

    mark: str
    record: msgspec.Raw
    samples: list[TransferObservation | PrefillObservation]
    accepted: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """The state as a whole; `journal` is the first journal that is not in it, `seen` the ids acknowledged."""

    format: Literal["kvlane-state/1"]
    at_s: float
    journal: int
    deployments: dict[str, Learnt]
    seen: list[str]
    ledger: SavedLedger | None = None


class Entry(msgspec.Struct, frozen=True):
    """One acknowledged observation, of which deployment, and of what its measurements are."""

    deployment: str | None
    mark: str
    observation: Observation


Lines = list[tuple[int, bytes]]

# Who writes many parts lets others have the interpreter after each.
_BREATH_S = 0.0005

_snapshots = msgspec.json.Decoder(Snapshot)
_parts = msgspec.json.Decoder(Part)
_entries = msgspec.json.Decoder(Entry)
_encode = msgspec.json.Encoder().encode


class Store:
    """A folder that one process at a time owns.

    `note`, `take` and `next_journal` touch no file. `write`, `sync`, `prepare` and `save` do: each in any thread, one
    at a time, and not held up by the others.

    Raises `InputError` where the folder cannot be written or another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: Lines = []
        self._journal = 0
        self._opened = 0
        self._file: int | None = None
        self._retired: list[int] = []
        self._next: tuple[int, int] | None = None
        self._files = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise InputError(
                "state_dir", f"{folder}: {error.strerror}", "a folder that can be written"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(
                "state_dir", f"{folder} is in use by another process", "a folder for each process"
            ) from None

    def load(self) -> tuple[Snapshot | None, list[Part], list[Entry]]:
        """The last snapshot with its parts, and what the journals hold after it; begins a new journal."""
        for draft in self.folder.glob(".snapshot-*"):
            draft.unlink(missing_ok=True)
        snapshot, parts = self._read_snapshot()
        first = 0 if snapshot is None else snapshot.journal
        numbers = self._journals()
        entries: list[Entry] = []
        for number in numbers:
            if number >= first:
                entries += self._read_journal(number)
        self._journal = max([first, *numbers])
        self.prepare()
        self.next_journal()
        return snapshot, parts, entries

    def note(self, entry: Entry) -> None:
        """Takes an acknowledged observation; the next `write` of what is taken makes it last."""
        self._waiting.append((self._journal, _line(_encode(entry))))

    def take(self) -> Lines:
        """What was noted since the last time, to be written."""
        lines, self._waiting = self._waiting, []
        return lines

    def put_back(self, lines: Lines) -> None:
        """What was taken and could not be written; what is written twice is told by its id."""
        self._waiting[:0] = lines

    def prepare(self) -> None:
        """Makes the next journal's file ahead, which may have to wait for the disk; raises OSError."""
        number = self._journal + 1
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        file = os.open(self._path(number), flags, 0o600)
        self._sync_folder()
        with self._files:
            if self._next is not None:
                os.close(self._next[1])
            self._next = (number, file)

    def next_journal(self) -> int:
        """Begins the journal that a snapshot taken right after this will name; `prepare` comes before."""
        self._journal += 1
        return self._journal

    def write(self, lines: Lines) -> None:
        """Hands lines to the operating system, which keeps them whatever becomes of this process; raises OSError."""
        with self._files:
            for number, group in groupby(lines, key=itemgetter(0)):
                if self._file is None or self._opened != number:
                    self._open(number)
                assert self._file is not None
                try:
                    _write_all(self._file, b"".join(line for _, line in group))
                except OSError:
                    # What was written half must not run into what comes next, which begins by opening again.
                    self._retire()
                    raise

    def sync(self) -> None:
        """Waits until what was written is on the disk; raises OSError. A slow disk keeps nobody else waiting."""
        with self._files:
            retired, self._retired = self._retired, []
            if self._file is not None:
                retired.append(os.dup(self._file))
        try:
            for file in retired:
                os.fsync(file)
        finally:
            for file in retired:
                os.close(file)

    def save(self, snapshot: Snapshot, parts: Iterable[Part] = ()) -> None:
        """Puts a snapshot in the place of the last one and removes the journals it holds; raises OSError."""
        raw = _encode(snapshot)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".snapshot-", delete=False) as file:
            try:
                file.write(_line(raw))
                for part in parts:
                    file.write(_line(_encode(part)))
                    sleep(_BREATH_S)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(self.folder / "snapshot.json")
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        self._sync_folder()
        for number in self._journals():
            if number < snapshot.journal:
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the folder."""
        with self._files:
            self._retire()
            if self._next is not None:
                self._retired.append(self._next[1])
                self._next = None
        self.sync()
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self.folder / f"journal-{number:08d}.jsonl"

    def _journals(self) -> list[int]:
        found = []
        for path in self.folder.glob("journal-*.jsonl"):
            digits = path.stem.removeprefix("journal-")
            if digits.isdecimal():
                found.append(int(digits))
        return sorted(found)

    def _open(self, number: int) -> None:
        self._retire()
        self._opened = number
        if self._next is not None and self._next[0] == number:
            (_, self._file), self._next = self._next, None
        else:
            self._file = os.open(self._path(number), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            os.write(self._file, b"\n")

    def _retire(self) -> None:
        """No more is written to the file that is open; the next `sync` is its last."""
        if self._file is not None:
            self._retired.append(self._file)
            self._file = None

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read_snapshot(self) -> tuple[Snapshot | None, list[Part]]:
        path = self.folder / "snapshot.json"
        try:
            raw = path.read_bytes() if path.stat().st_size <= _LARGEST_BYTES else b""
        except FileNotFoundError:
            return None, []
        except OSError as error:
            log.warning("snapshot cannot be read and is not used: %s", error.strerror)
            return None, []
        first, *others = raw.rstrip(b"\n").split(b"\n")
        snapshot = _decoded(_snapshots, first)
        if snapshot is None:
            self._set_aside(path)
            return None, []
        parts = [_decoded(_parts, line) for line in others]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            lost = len(parts) - len(whole)
            log.warning("%d parts of %s are torn, and the others are used", lost, path.name)
        return snapshot, whole

    def _read_journal(self, number: int) -> list[Entry]:
        path = self._path(number)
        entries: list[Entry] = []
        torn = False
        try:
            raw = path.read_bytes()
        except OSError as error:
            log.warning("journal %d cannot be read and is not used: %s", number, error.strerror)
            return []
        for line in raw.split(b"\n"):
            if not line:
                continue
            entry = _decoded(_entries, line)
            if entry is None:
                torn = True
            else:
                entries.append(entry)
        if torn:
            self._set_aside(path)
            # What could be read must outlive the next restart too, also without a snapshot.
            self._rewrite(path, entries)
        return entries

    def _rewrite(self, path: Path, entries: Iterable[Entry]) -> None:
        with path.open("wb") as file:
            file.writelines(_line(_encode(entry)) for entry in entries)
            file.flush()
            os.fsync(file.fileno())

    def _set_aside(self, path: Path) -> None:
        """Gives a torn file a name under which it is not read again; the newest of many takes the last name."""
        names = [path.with_name(f"{path.name}.torn-{number}") for number in range(_MOST_TORN)]
        aside = next((name for name in names if not name.exists()), names[-1])
        try:
            path.replace(aside)
            log.warning(
                "%s is torn: what can be read of it is used, and it is kept as %s", path.name, aside.name
            )
        except OSError as error:
            log.warning("%s is torn, and cannot be set aside: %s", path.name, error.strerror)


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes) -> T | None:
    """What a line holds, None where it is torn or of another kind."""
    body = _checked(line)
    if body is None:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _checked(line: bytes) -> bytes | None:
    """A line's body, None where it is not what its checksum says."""
    mark, body = line[:9], line[9:]
    return body if mark == b"%08x " % zlib.crc32(body) else None


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
