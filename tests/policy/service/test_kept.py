"""Decisions and promises over a restart: the same again, within their bounds, and without what is over."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy.booking import LinkKey
from kvlane.policy.service import kept
from kvlane.policy.service.config import from_fields
from kvlane.policy.service.decide import Desk, Made
from kvlane.policy.service.kept import Part
from kvlane.policy.service.problems import ProblemError
from kvlane.policy.service.promises import Promise
from kvlane.policy.service.service import Service
from kvlane.policy.service.types import DecideRequest, Hit, PrefillObservation

names = st.text(min_size=1, max_size=8)
seconds = st.floats(0.001, 1e6)
decisions = st.builds(
    Made,
    st.sampled_from(["chat", "gone"]),
    st.sampled_from(["load", "recompute", "split"]),
    seconds,
    st.integers(0, 1 << 24),
    st.integers(1, 1 << 20),
    st.lists(names, max_size=2).map(tuple),
    st.lists(st.builds(LinkKey, st.sampled_from(["device", "node", "fleet"]), names, names), max_size=2).map(
        tuple
    ),
    st.none() | names,
)


def desk(**limits: int) -> Desk:
    one = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
    return Service(from_fields({"deployments": [one], "limits": limits})).desk


def through_disk(parts: Any) -> list[Part]:
    return [msgspec.json.decode(msgspec.json.encode(part), type=Part) for part in parts]


@given(
    made=st.dictionaries(names, decisions, max_size=20),
    promised=st.dictionaries(
        names, st.tuples(st.binary(min_size=16, max_size=16), names, seconds), max_size=8
    ),
    elapsed_s=seconds,
)
def test_what_was_kept_is_there_again_but_for_what_is_over(
    made: dict[str, Made], promised: dict[str, tuple[bytes, str, float]], elapsed_s: float
) -> None:
    before, after = desk(), desk()
    for decision_id, each in made.items():
        before.keep(decision_id, each)
    for request_id, (digest, word, left_s) in promised.items():
        before.promises.keep(request_id, Promise(digest, json.dumps(word).encode(), 50.0 + left_s))
    kept.restore(after, through_disk(kept.taken(before, 50.0)), 1000.0, elapsed_s)
    assert dict(after.made) == {name: each for name, each in made.items() if each.deployment == "chat"}
    held = dict(after.promises.all())
    assert set(held) <= {name for name, (_, _, left_s) in promised.items() if left_s > elapsed_s * (1 - 1e-9)}
    assert set(held) >= {name for name, (_, _, left_s) in promised.items() if left_s > elapsed_s * (1 + 1e-9)}
    for name, promise in held.items():
        digest, word, left_s = promised[name]
        assert (promise.digest, json.loads(promise.answer)) == (digest, word)
        assert promise.until_s == pytest.approx(1000.0 + left_s - elapsed_s)


def test_the_newest_are_kept_in_their_order_where_there_is_room_for_fewer() -> None:
    before, after = desk(), desk(remembered=3, request_ids=2)
    for number in range(1000):
        before.keep(f"d{number}", Made("chat", "load", 1.0, 16, 16, (), (), None))
        before.promises.keep(f"r{number}", Promise(bytes(16), b"1", 60.0))
    parts = through_disk(kept.taken(before, 0.0))
    assert len(parts) == 4 + 40  # so that none takes long to put into words
    kept.restore(after, parts, 0.0, 0.0)
    assert list(after.made) == ["d997", "d998", "d999"]
    assert [name for name, _ in after.promises.all()] == ["r998", "r999"]


def test_a_body_is_told_from_another_as_before_and_one_of_another_version_not_at_all() -> None:
    before, after, newer = desk(), desk(), desk()
    asked = DecideRequest(1 << 20, request_id="r")
    answer = before.decide(asked)
    parts = through_disk(kept.taken(before, 0.0))
    kept.restore(after, parts, 0.0, 0.0)
    assert after.promises.kept(asked, 0.0) == answer
    with pytest.raises(ProblemError):
        after.promises.kept(DecideRequest(1000, request_id="r"), 0.0)
    other = [msgspec.structs.replace(part, asked="another") for part in parts]
    kept.restore(newer, other, 0.0, 0.0)
    assert newer.promises.kept(asked, 0.0) is None
    assert list(newer.made) == list(before.made)


VALUE = re.compile(rb'-?\d+\.?\d*(?:e[+-]?\d+)?|"[^"]*"|null|true|false')
ODD = [b"-1", b"0", b"0.5", b"1e308", b"-1e308", b"9" * 30, b"null", b"true", b'""', b'"zz"', b"[]", b"{}"]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files with something of everything that is kept."""
    folder = tmp_path_factory.mktemp("state")
    service = kept_in(folder)
    for number in range(5):
        hits = [Hit("host", 900)]
        instance = f"i{number}"
        service.desk.decide(
            DecideRequest(
                1000, hits=hits, request_id=instance, instance=instance, reserve=True, prefix_id="p"
            )
        )
    service.intake.observe([PrefillObservation(f"a{number}", 0, 1000, 0.1) for number in range(9)])
    assert service.store is not None
    snapshot, parts = service.snapshot()
    service.store.prepare()
    service.store.save(snapshot, parts)
    service.intake.observe([PrefillObservation(f"b{number}", 0, 1000, 0.1) for number in range(9)])
    service.store.write(service.store.take())
    service.store.close()
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.stat().st_size}


def kept_in(folder: Path) -> Service:
    one = {"name": "chat", "model": "llama-3.1-8b", "machine": "h100-sxm"}
    return Service(from_fields({"deployments": [one], "state_dir": str(folder)}))


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.sampled_from(ODD)), max_size=4
    )
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_kept_under_right_checksums_stops_no_start_and_no_decision(
    state: dict[str, bytes], changes: list[tuple[int, int, bytes]]
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in state.items():
            lines = [line[9:] for line in content.splitlines() if line]
            for which, where, odd in changes:
                line = lines[which % len(lines)]
                values = list(VALUE.finditer(line))
                if values:
                    found = values[where % len(values)]
                    lines[which % len(lines)] = line[: found.start()] + odd + line[found.end() :]
            (folder / file).write_bytes(b"".join(b"%08x %b\n" % (zlib.crc32(line), line) for line in lines))
        service = kept_in(folder)
        assert service.store is not None
        try:
            service.desk.decide(DecideRequest(1000, hits=[Hit("host", 900)], instance="i1", reserve=True))
            for decision_id in list(service.desk.made):
                service.desk.release(decision_id)
            list(service.gauges())
            service.store.save(*service.snapshot())
        finally:
            service.store.close()
        if not changes:
            assert service.intake.learners["chat"].accepted == 18


def test_a_promise_whose_digest_is_none_is_torn() -> None:
    part = {"promised": [["r", "zz", 1.0, {}]], "asked": ""}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(part), type=Part)
