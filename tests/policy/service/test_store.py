"""What is kept: snapshot and journals on a real disk, whole, torn, and interrupted at every point."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlane.policy import InputError
from kvlane.policy.service.store import Entry, Learnt, Snapshot, Store
from kvlane.policy.service.types import PrefillObservation


def entry(number: int) -> Entry:
    return Entry("chat", "mark", PrefillObservation(f"o{number}", 0, 100 + number, 0.5))


def snapshot(journal: int, *numbers: int) -> Snapshot:
    samples = [PrefillObservation(f"o{number}", 0, 100 + number, 0.5) for number in numbers]
    learnt = Learnt("mark", msgspec.Raw(b"null"), list(samples), len(numbers))
    seen = [f"o{number}" for number in numbers]
    return Snapshot("kvlane-state/1", 1000.0, journal, {"chat": learnt}, seen)


def kept(folder: Path) -> set[str]:
    """The ids that a start from that folder would know; the folder is let go again."""
    store = Store(folder)
    found, _, entries = store.load()
    store.close()
    ids = set(found.seen) if found is not None else set()
    return ids | {each.observation.observation_id for each in entries}


def write(folder: Path, *numbers: int) -> None:
    store = Store(folder)
    store.load()
    for number in numbers:
        store.note(entry(number))
    store.write(store.take())
    store.close()


def test_what_is_written_is_there_at_the_next_start(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    write(tmp_path, 3)
    assert kept(tmp_path) == {"o1", "o2", "o3"}


def test_what_is_only_noted_is_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.load()
    store.note(entry(1))
    store.close()
    assert kept(tmp_path) == set()


def test_a_snapshot_takes_the_place_of_the_journals_before_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.load()
    store.note(entry(1))
    store.prepare()
    taken = snapshot(store.next_journal(), 1)
    store.note(entry(2))
    store.write(store.take())
    assert len(list(tmp_path.glob("journal-*"))) == 2
    store.save(taken)
    assert len(list(tmp_path.glob("journal-*"))) == 1
    store.close()
    assert kept(tmp_path) == {"o1", "o2"}


def test_a_snapshot_that_never_came_to_be_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.load()
    store.note(entry(1))
    store.write(store.take())
    store.prepare()
    store.next_journal()  # a snapshot was to be taken, and the process ended
    store.note(entry(2))
    store.write(store.take())
    store.close()
    (tmp_path / ".snapshot-draft").write_bytes(b"half")
    assert kept(tmp_path) == {"o1", "o2"}
    assert not list(tmp_path.glob(".snapshot-*"))


def test_one_process_at_a_time_owns_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InputError, match="in use by another process") as caught:
        Store(tmp_path)
    assert caught.value.field == "state_dir"
    store.close()
    Store(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        Store(tmp_path / "file" / "state")
    assert caught.value.field == "state_dir"


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_journal_cut_off_anywhere_keeps_what_stands_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("state")
    write(folder, *range(5))
    (journal,) = folder.glob("journal-*")
    raw = journal.read_bytes()
    cut = data.draw(st.integers(0, len(raw)))
    journal.write_bytes(raw[:cut])
    # A line whose line end alone is missing is whole.
    whole = raw[:cut].count(b"\n") + (raw[cut : cut + 1] == b"\n")
    expected = {f"o{number}" for number in range(whole)}
    assert kept(folder) == expected
    assert kept(folder) == expected  # and again: setting aside what is torn loses nothing


def test_a_checksum_in_other_letters_is_another(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.load()
    for number in range(20):  # a checksum without letters is one in forty
        store.note(entry(number))
    store.write(store.take())
    store.close()
    path = next(tmp_path.glob("journal-*"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line[:8].upper() + line[8:] for line in lines))
    unlike = {f"o{number}" for number, line in enumerate(lines) if line[:8].upper() != line[:8]}
    assert unlike
    assert not kept(tmp_path) & unlike


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bit_turned_in_a_snapshot_sets_it_aside_and_the_journal_is_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("state")
    store = Store(folder)
    store.load()
    store.prepare()
    store.save(snapshot(store.next_journal(), 1, 2))
    store.note(entry(3))
    store.write(store.take())
    store.close()
    path = folder / "snapshot.json"
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 2))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    assert kept(folder) == {"o3"}
    assert (folder / "snapshot.json.torn-0").read_bytes() == raw


@pytest.mark.parametrize("raw", [b"", b"\n", b"{}", b"\x00" * 100, b"0" * 8 + b" {}\n", b"zzzzzzzz {}"])
def test_no_snapshot_stops_a_start(tmp_path: Path, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "snapshot.json").write_bytes(raw)
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path) == set()
    assert "torn" in caplog.text
    assert not (tmp_path / "snapshot.json").exists()


def test_many_torn_files_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(15):
        (tmp_path / "snapshot.json").write_bytes(b"torn")
        kept(tmp_path)
    assert len(list(tmp_path.glob("*.torn-*"))) == 10


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from kvlane.policy.service.store import Entry, Store
from kvlane.policy.service.types import PrefillObservation

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = Store(Path(sys.argv[1]))
store.load()
def note(number):
    store.note(Entry("chat", "mark", PrefillObservation(f"o{number}", 0, 100, 0.5)))
note(0)
store.write(store.take())
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
for number in range(1, 10):
    note(number)
lines = store.take()
try:
    store.write(lines)
except OSError as error:
    print("refused", error.errno)
    store.put_back(lines)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.write(store.take())
store.close()
"""


def test_a_write_that_fails_in_the_middle_is_made_good_by_the_next(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, env=os.environ
    )
    assert ran.stderr == ""
    assert ran.stdout.startswith("refused")
    assert kept(tmp_path) == {f"o{number}" for number in range(10)}
