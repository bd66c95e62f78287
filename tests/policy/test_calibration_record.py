"""The record file: written and read back, and every way it can be broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import Request
from kvlane.policy.calibration import LinkCalibrator, PrefillCalibrator, PrefillSample, TransferSample
from kvlane.policy.calibration_apply import calibrated
from kvlane.policy.calibration_build import build_record
from kvlane.policy.calibration_record import Fingerprint, Record, decode, encode, read, write
from kvlane.policy.errors import InputError
from kvlane.policy.machine import Tier
from kvlane.policy.planner import Planner

CONFIG = {
    "model_type": "llama",
    "dtype": "float32",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 704,
    "vocab_size": 2048,
}


def record() -> Record:
    prefill = PrefillCalibrator(4, head_s=1e-3, half_life=None)
    for resident, new in [(0, 1)] + [(p, n) for p in (0, 1000, 4000) for n in (16, 500, 1000, 4000)]:
        prefill.add(PrefillSample(resident, new, 1e-3 + 2e-6 * new + 1e-9 * new * (resident + new / 2)))
    link = LinkCalibrator("host link", ceiling_bytes_per_s=50e9, half_life=None)
    for size, copies in [(10**6, 8)] + [(s, c) for s in (10**6, 10**7, 10**8) for c in (8, 800)]:
        link.add(TransferSample(size, copies, 1e-4 + 1e-6 * copies + size / 10e9))
    return build_record(
        Fingerprint("tiny", "a CPU", "transformers", "fp32", "fp32", 1, {"python": "3.12"}),
        1_790_000_000.0,
        prefill=(prefill.estimate(), prefill.cost()),
        links={"host link": link.estimate()},
        tiers={"host": Tier("host", "host link", run_tokens=None, runs_per_layer=2)},
        model_config=CONFIG,
    )


WHOLE = encode(record())


def plan_with(raw: bytes) -> None:
    """Everything between the file's bytes and an answer."""
    found = calibrated(decode(raw))
    planner = Planner(
        found.model,
        found.machine,
        engine=found.engine,
        tp=found.tp,
        kv_dtype=found.kv_dtype,
        calibration=found.calibration,
    )
    tiers = dict.fromkeys(found.machine.tiers, 2000)
    planner.decide(Request(2048, tiers)).to_dict()


def changed(path: tuple[str | int, ...], value: Any) -> bytes:
    fields = json.loads(WHOLE)
    at = fields
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return msgspec.json.encode(fields)


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, part in value.items():
            found += leaves(part, (*path, key))
    elif isinstance(value, list):
        for key, part in enumerate(value):
            found += leaves(part, (*path, key))
    return found


PLACES = leaves(json.loads(WHOLE))


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write(record(), file)
    assert read(file) == record()
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    plan_with(file.read_bytes())


def test_what_it_says_is_what_was_measured() -> None:
    found = calibrated(record())
    assert found.model.kv_bytes_per_token("fp32") == 4 * 2 * 2 * 64 * 4
    link = found.machine.links["host link"]
    assert link.rate_bytes_per_s == pytest.approx(10e9, rel=1e-3)
    assert link.ceiling_bytes_per_s == 50e9
    assert found.calibration is not None
    assert found.calibration.prefill is not None
    assert found.calibration.prefill.pass_s(0, 2000) == pytest.approx(1e-3 + 4e-3 + 2e-3, rel=1e-2)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("format",), "kvlane-calibration/2", "calibration.format"),
        (("date",), "yesterday", "calibration"),
        (("date",), "2026-01-01", "calibration"),
        (("fingerprint", "tp"), 0, "calibration.fingerprint.tp"),
        (("fingerprint", "model"), "", "calibration.fingerprint.model"),
        (("fingerprint", "dtype"), "bf16", "calibration.fingerprint.dtype"),
        (("prefill", "head_s"), -1e-3, "calibration.prefill.head_s"),
        (("prefill", "head_s"), None, "calibration.prefill.head_s"),
        (("prefill", "fresh", "token_s"), 1e9, "calibration.prefill.fresh.token_s"),
        (("prefill", "fresh", "token_s"), "2e-6", "calibration.prefill.fresh.token_s"),
        (("prefill", "layers"), 5, "calibration.prefill.layers"),
        (("prefill", "new_tokens"), {"low": 5, "high": 4}, "calibration.prefill.new_tokens"),
        (("links", "host link", "rate_bytes_per_s"), 0, "calibration.links[...].rate_bytes_per_s"),
        (("links", "host link", "rate_bytes_per_s"), 60e9, "calibration.links[...]"),
        (("links", "host link", "rate_table"), [[5, 1e9], [4, 1e9]], "calibration.links[...]"),
        (("links", "host link", "extra"), 1, "calibration.links[...]"),
        (("tiers", "host", "link"), "other", "calibration"),
        (("tiers", "host", "layout"), "sideways", "calibration.tiers[...].layout"),
        (("model_config", "num_attention_heads"), 0, "calibration.model_config.num_attention_heads"),
        (("model_config",), None, "calibration.fingerprint.model"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str | int, ...], value: object, field: str) -> None:
    with pytest.raises(InputError) as refused:
        plan_with(changed(path, value))
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite(number: str) -> None:
    text = WHOLE.decode()
    at = text.index('"head_s": ') + len('"head_s": ')
    with pytest.raises(InputError, match="calibration"):
        plan_with((text[:at] + number + text[text.index(",", at) :]).encode())


@pytest.mark.parametrize("path", [place for place in PLACES if isinstance(place[-1], str)], ids=str)
def test_a_missing_field_is_refused_or_has_a_default(path: tuple[str | int, ...]) -> None:
    fields = json.loads(WHOLE)
    at = fields
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    required = (
        path[-1] not in ("notes", "refused", "host", "python", "host link") and path[0] != "model_config"
    )
    try:
        plan_with(msgspec.json.encode(fields))
    except InputError:
        return
    assert not required or path == ("tiers", "host")


@given(st.integers(0, len(WHOLE) - 2))
def test_a_truncated_file(length: int) -> None:
    with pytest.raises(InputError, match="calibration: the record is not JSON"):
        decode(WHOLE[:length])


_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=500)
@given(st.sampled_from(PLACES), _ANY)
def test_any_value_at_any_place_gives_a_plan_or_an_input_error(
    path: tuple[str | int, ...], value: object
) -> None:
    fields = json.loads(WHOLE)
    at = fields
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        plan_with(json.dumps(fields).encode())
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017  the type of the error is the test


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=3)), min_size=1, max_size=4))
def test_any_bytes_anywhere_give_a_plan_or_an_input_error(edits: list[tuple[int, bytes]]) -> None:
    raw = bytearray(WHOLE)
    for at, new in edits:
        raw[at : at + len(new)] = new
    try:
        plan_with(bytes(raw))
    except InputError as error:
        assert "\n" not in str(error)  # noqa: PT017


@given(st.binary(max_size=200))
def test_any_file_at_all(raw: bytes) -> None:
    with pytest.raises(InputError):
        decode(raw)


def test_deep_nesting_is_no_crash() -> None:
    with pytest.raises(InputError):
        decode(b"[" * 100_000)


class TestFiles:
    def test_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"calibration: .*No such file"):
            read(tmp_path / "none.json")
        with pytest.raises(InputError, match="calibration"):
            read(tmp_path)

    def test_that_are_too_large(self, tmp_path: Path) -> None:
        file = tmp_path / "large.json"
        file.write_bytes(b" " * (2 << 20))
        with pytest.raises(InputError, match="larger than 1 MiB"):
            read(file)

    def test_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="--out"):
            write(record(), tmp_path / "none" / "record.json")

    def test_what_decoding_would_refuse_is_not_written(self, tmp_path: Path) -> None:
        whole = record()
        assert whole.prefill is not None
        broken = msgspec.structs.replace(
            whole, prefill=msgspec.structs.replace(whole.prefill, head_s=float("nan"))
        )
        with pytest.raises(InputError, match=r"calibration\.prefill\.head_s"):
            write(broken, tmp_path / "record.json")
        assert not list(tmp_path.iterdir())
