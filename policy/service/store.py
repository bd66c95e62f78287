"""What survives a restart: a snapshot, written whole or not at all, and a journal of what was acknowledged since.

A journal's lines are flushed at an interval. Taking a snapshot begins the next journal first and removes the older
ones last, so that at every moment the snapshot and the journals after it hold everything. Each carries checksums; what
does not match its own is set aside under another name, and never stops a start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import zlib
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import msgspec

from kvlane.policy.booking import SavedLedger
from kvlane.policy.errors import InputError
from kvlane.policy.service.types import Observation, PrefillObservation, TransferObservation

log = logging.getLogger("kvlane.serve")

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

_snapshots = msgspec.json.Decoder(Snapshot)
_entries = msgspec.json.Decoder(Entry)
_encode = msgspec.json.Encoder().encode


class Store:
    """A folder that one process at a time owns.

    `note`, `take` and `next_journal` touch no file; `write` and `save` do, in any thread, one at a time.
    Raises `InputError` where the folder cannot be written or another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting: Lines = []
        self._journal = 0
        self._opened = 0
        self._file: int | None = None
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

    def load(self) -> tuple[Snapshot | None, list[Entry]]:
        """The last snapshot and what the journals hold after it; begins a new journal."""
        for draft in self.folder.glob(".snapshot-*"):
            draft.unlink(missing_ok=True)
        snapshot = self._read_snapshot()
        first = 0 if snapshot is None else snapshot.journal
        numbers = self._journals()
        entries: list[Entry] = []
        for number in numbers:
            if number >= first:
                entries += self._read_journal(number)
        self._journal = max([first, *numbers]) + 1
        return snapshot, entries

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

    def next_journal(self) -> int:
        """Begins the journal that a snapshot taken right after this will name."""
        self._journal += 1
        return self._journal

    def write(self, lines: Lines) -> None:
        """Writes lines to their journals, through to the disk; raises OSError."""
        for number, group in groupby(lines, key=itemgetter(0)):
            if self._file is None or self._opened != number:
                self._open(number)
            assert self._file is not None
            try:
                _write_all(self._file, b"".join(line for _, line in group))
                os.fsync(self._file)
            except OSError:
                # What was written half must not run into what comes next: the next write begins another file.
                self._close_file()
                raise

    def save(self, snapshot: Snapshot) -> None:
        """Puts a snapshot in the place of the last one and removes the journals it holds; raises OSError."""
        raw = _encode(snapshot)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".snapshot-", delete=False) as file:
            try:
                file.write(_line(raw))
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
        self._close_file()
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
        self._close_file()
        path = self._path(number)
        fresh = not path.exists()
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self._opened = number
        if fresh:
            self._sync_folder()
        else:
            os.write(self._file, b"\n")

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _sync_folder(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read_snapshot(self) -> Snapshot | None:
        path = self.folder / "snapshot.json"
        try:
            raw = path.read_bytes() if path.stat().st_size <= _LARGEST_BYTES else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("snapshot cannot be read and is not used: %s", error.strerror)
            return None
        body = _checked(raw.rstrip(b"\n"))
        try:
            if body is not None:
                return _snapshots.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        self._set_aside(path)
        return None

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
            body = _checked(line)
            try:
                if body is None:
                    torn = True
                else:
                    entries.append(_entries.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                torn = True
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


def _checked(line: bytes) -> bytes | None:
    """A line's body, None where it is not what its checksum says."""
    mark, sign, body = line[:8], line[8:9], line[9:]
    return body if sign == b" " and mark == b"%08x" % zlib.crc32(body) else None


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
