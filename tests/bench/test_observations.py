"""Observations: what an answer shows, on disk and back, and that a calibration gets out of them what was put in."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.bench.observations import (
    Observations,
    Prefill,
    Transfer,
    calibrate,
    decode,
    encode,
    observed,
    prefill,
    read,
    transfer,
)
from kvlane.bench.timeline import timeline_of
from kvlane.policy.calibration import PrefillSample, TransferSample
from kvlane.policy.calibration_apply import calibrated
from kvlane.policy.calibration_record import Fingerprint, TierRecord
from kvlane.policy.calibration_record import decode as decode_record
from kvlane.policy.errors import InputError
from kvlane.policy.plan import Request
from kvlane.policy.planner import Planner

FINGERPRINT = Fingerprint(
    model="llama-3.1-8b", device="a device", engine="transformers", dtype="bf16", kv_dtype="bf16", tp=1
)


def made(observations, **changes):
    fields = {
        "format": "kvlane-observations/1",
        "date": "2026-11-29T12:00:00+00:00",
        "fingerprint": FINGERPRINT,
        "model_config": None,
        "layers": 32,
        "head_s": 0.002,
        "rectangle": True,
        "tiers": {"host": TierRecord("a link", "layer_major", None, 2)},
        "observations": list(observations),
    }
    return Observations(**{**fields, **changes})


# Seconds a token, a pair and a pass take, and what the link costs.
TOKEN_S, PAIR_S, PASS_S = 1e-4, 2e-8, 3e-3
RATE, COPY_S, LATENCY_S = 2e9, 2e-5, 1e-3


def truth():
    """Observations of a machine whose law is known; the first of each kind is cold and slow."""
    yield Prefill(0, 64, 9.0)
    for new in (128, 512, 1024, 2048, 4096):
        yield Prefill(0, new, PASS_S + TOKEN_S * new + PAIR_S * new * (new + 1) / 2)
    for resident in (512, 2048, 4096):
        for new in (1, 64, 512):
            yield Prefill(resident, new, PASS_S + TOKEN_S * new + PAIR_S * new * (resident + new))
    yield Transfer("a link", 1 << 20, 64, 9.0, cold=True)
    for nbytes, copies in ((1 << 22, 64), (1 << 24, 64), (1 << 26, 64), (1 << 26, 640), (1 << 28, 1280)):
        yield Transfer("a link", nbytes, copies, LATENCY_S + copies * COPY_S + nbytes / RATE)


def seen(timeline, links=None):
    """What is observed of a timeline, as plain values with the kind of each."""
    found = observed(timeline, links or {"host": "a link"})
    return [msgspec.to_builtins(each) for each in found]


def transferred(link, nbytes, copies, seconds):
    return {
        "kind": "transfer",
        "link": link,
        "bytes": nbytes,
        "copies": copies,
        "seconds": pytest.approx(seconds),
        "cold": False,
    }


def prefilled(resident, new, seconds):
    return {
        "kind": "prefill",
        "resident_tokens": resident,
        "new_tokens": new,
        "seconds": pytest.approx(seconds),
    }


class TestObserved:
    def test_a_load_is_a_transfer_and_a_pass(self, made_timeline):
        timeline = made_timeline("layered", layers=5, copy_s=0.05, compute_s=0.02)
        assert seen(timeline) == [transferred("a link", 5 << 20, 10, 0.25), prefilled(1000, 200, 5 * 0.02)]

    @pytest.mark.parametrize("copy_s", [0.001, 0.02, 0.2])
    @pytest.mark.parametrize("mode", ["bulk", "layered", "two_ended"])
    def test_waiting_is_no_part_of_a_pass(self, made_timeline, mode, copy_s):
        timeline = made_timeline(mode, layers=4, copy_s=copy_s, compute_s=0.03)
        assert seen(timeline)[-1]["seconds"] == pytest.approx(4 * 0.03)

    def test_both_passes_of_a_two_ended_answer_are_observed(self, made_timeline):
        _, front, tail = seen(made_timeline("two_ended", layers=4, compute_s=0.03))
        assert (front, tail) == (prefilled(0, 500, 4 * 0.015), prefilled(1500, 200, 4 * 0.03))

    def test_each_tier_is_observed_on_its_own_link(self, made_timeline):
        timeline = made_timeline("layered", layers=4, tiers=("host", "disk"))
        first, second, _ = seen(timeline, {"host": "one", "disk": "two"})
        assert first == transferred("one", 4 << 20, 8, 0.08)
        assert second == transferred("two", 4 << 20, 8, 0.16)

    def test_a_recompute_is_a_pass_from_the_submission_on(self, made_timeline):
        timeline = made_timeline("recompute", layers=4, compute_s=0.03)
        assert seen(timeline) == [prefilled(0, 200, 0.001 + 4 * 0.03)]

    def test_a_load_that_did_not_come_whole_shows_nothing_of_the_link(self, made_timeline):
        timeline = made_timeline("failed", layers=4, compute_s=0.03)
        assert seen(timeline) == [prefilled(0, 200, 4 * 0.03)]

    def test_of_a_real_load(self, kit, small):
        result = small.lab.load(small.store, small.ids, kit.usable, "layered").result
        load, passed = seen(timeline_of("mine", result))
        assert (load["bytes"], load["copies"]) == (result.loaded_bytes, 2 * kit.shape.layers)
        assert 0 < load["seconds"] < result.total_s
        assert passed["resident_tokens"] == kit.usable
        assert passed["new_tokens"] == kit.tokens - kit.usable
        assert 0 < passed["seconds"] < result.total_s - result.head_s


class TestCalibrate:
    def test_gives_back_the_law_the_observations_follow(self):
        record = calibrate(made(truth()))
        assert record.prefill is not None
        fresh, extend, link = record.prefill.fresh, record.prefill.extend, record.links["a link"]
        for cost in (fresh, extend):
            assert cost.token_s == pytest.approx(TOKEN_S, rel=1e-3)
            assert cost.pair_s == pytest.approx(PAIR_S, rel=1e-3)
            assert cost.overhead_s == pytest.approx(PASS_S, rel=1e-3)
        assert not fresh.rectangle
        assert extend.rectangle
        assert link.rate_bytes_per_s == pytest.approx(RATE, rel=1e-3)
        assert link.per_copy_s == pytest.approx(COPY_S, rel=1e-3)
        assert link.latency_s == pytest.approx(LATENCY_S, rel=1e-3)
        assert (record.prefill.layers, record.prefill.head_s) == (32, 0.002)

    def test_the_record_decides(self):
        found = calibrated(calibrate(made(truth())))
        planner = Planner(
            found.model,
            found.machine,
            executor="bulk",
            kv_dtype=found.kv_dtype,
            calibration=found.calibration,
        )
        plan = planner.decide(Request(2048, {"host": 1024}))
        recompute, load = plan.estimates["recompute"], plan.estimates["load"]
        assert recompute is not None
        assert load is not None
        expected = PASS_S + TOKEN_S * 2048 + PAIR_S * 2048 * 2049 / 2 + 0.002
        assert recompute.ttft_s == pytest.approx(expected, rel=1e-3)
        moved, copies = 1024 * 131_072, 64
        expected = LATENCY_S + copies * COPY_S + moved / RATE
        expected += PASS_S + TOKEN_S * 1024 + PAIR_S * 1024 * 2048 + 0.002
        assert load.ttft_s == pytest.approx(expected, rel=1e-3)

    def test_a_link_whose_loads_are_all_alike_is_left_out(self):
        alike = [Transfer("another", 1 << 20, 64, 0.1)] * 5
        assert set(calibrate(made([*truth(), *alike])).links) == {"a link"}

    def test_but_not_the_one_a_tier_lies_behind(self):
        passes = [each for each in truth() if isinstance(each, Prefill)]
        with pytest.raises(InputError, match="samples"):
            calibrate(made([*passes, *[Transfer("a link", 1 << 20, 64, 0.1)] * 5]))

    def test_passes_that_cannot_be_told_apart_are_refused(self):
        transfers = [each for each in truth() if isinstance(each, Transfer)]
        with pytest.raises(InputError, match="samples"):
            calibrate(made([*transfers, *[Prefill(0, 64, 0.1)] * 5]))


counts = st.integers(1, 1 << 53)
seconds = st.floats(0, 1e6)
observations = st.lists(
    st.builds(Transfer, st.text(min_size=1, max_size=9), counts, counts, seconds, st.booleans())
    | st.builds(Prefill, st.integers(0, 1 << 53), counts, seconds),
    max_size=9,
)


class TestFile:
    @settings(max_examples=50, deadline=None)
    @given(observations=observations)
    def test_what_was_written_is_read_again(self, observations):
        source = made(observations, tiers={})
        assert decode(encode(source), "here") == source

    def test_each_observation_says_what_kind_it_is(self):
        listed = json.loads(encode(made(truth())))["observations"]
        assert {each["kind"] for each in listed} == {"transfer", "prefill"}

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"format": "kvlane-observations/2"}, ("format",)),
            ({"date": "yesterday"}, ("date", "ISO 8601")),
            ({"date": "2026-11-29T12:00:00"}, ("date", "offset")),
            ({"more": 1}, ("more",)),
            ({"observations": [{"kind": "decode"}]}, ("observations", "decode")),
            (
                {"observations": [{"kind": "prefill", "resident_tokens": 0, "new_tokens": 0, "seconds": 1}]},
                (),
            ),
            ({"observations": [{"kind": "prefill", "resident_tokens": 0, "new_tokens": 1}]}, ("seconds",)),
            (
                {"tiers": {"host": {"link": "nowhere", "layout": "layer_major", "run_tokens": None}}},
                ("runs_per_layer",),
            ),
            ({"tiers": {"host": msgspec.to_builtins(TierRecord("x", "layer_major", None, 2))}}, ("'x'",)),
        ],
    )
    def test_anything_else_is_refused_by_name(self, change, words):
        raw = json.dumps({**json.loads(encode(made(truth()))), **change}).encode()
        with pytest.raises(InputError) as refused:
            decode(raw, "here")
        assert all(word in str(refused.value) for word in words)

    @pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
    def test_what_is_no_such_file_is_refused(self, raw, tmp_path):
        path = tmp_path / "observations.json"
        path.write_bytes(raw)
        with pytest.raises(InputError):
            read(path)

    def test_a_missing_file_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="--observations"):
            read(tmp_path / "nowhere.json")


class TestReproduction:
    """`observations.json` beside `results.json`, and what the command makes of it."""

    def test_holds_what_was_calibrated_on_and_every_answer(self, reproduced):
        source = read(reproduced.folder / "observations.json")
        answers = [(s, c, seconds) for s, c in reproduced.conditions() for seconds in c["measured_s"]]
        transfers = [each for each in source.observations if isinstance(each, Transfer)]
        assert [each.bytes for each in transfers][-1] == reproduced.conditions()[-1][1]["loaded_bytes"][-1]
        loads = [c for _, c, _ in answers if c["path"] != "recompute"]
        assert len(transfers) > len(loads)
        prefills = [each for each in source.observations if isinstance(each, Prefill)]
        assert len(prefills) > len(answers)
        assert len({each.link for each in transfers}) == 3
        assert source.tiers["host"].link == "host link"

    def test_becomes_a_record_that_decides(self, reproduced, kvlane_bench, tmp_path):
        source, out = tmp_path / "observations.json", tmp_path / "here.json"
        kept = read(reproduced.folder / "observations.json")
        # Loads of a millisecond are noise on a busy machine: what was loaded stays, and takes what a link takes.
        lawful = [
            msgspec.structs.replace(each, seconds=LATENCY_S + each.copies * COPY_S + each.bytes / RATE)
            if isinstance(each, Transfer)
            else each
            for each in kept.observations
        ]
        source.write_bytes(encode(msgspec.structs.replace(kept, observations=lawful)))
        done = kvlane_bench("calibrate", "--observations", source, "--out", out)
        assert done.returncode == 0, done.stderr
        assert "demo-llama-4x256" in done.stdout
        found = calibrated(decode_record(out.read_bytes()))
        rate = found.machine.links["host link"].rate_bytes_per_s
        assert rate == pytest.approx(RATE, rel=1e-3)
        assert (
            Planner(found.model, found.machine, kv_dtype="fp32", calibration=found.calibration)
            .decide(Request(512, {"host": 496}))
            .calibrated
        )

    def test_nothing_is_written_where_there_is_nothing_to_fit(self, kvlane_bench, tmp_path):
        source, out = tmp_path / "observations.json", tmp_path / "here.json"
        source.write_bytes(encode(made([Prefill(0, 64, 0.1)] * 5, tiers={})))
        done = kvlane_bench("calibrate", "--observations", source, "--out", out)
        assert done.returncode == 2
        assert "samples" in done.stderr
        assert not out.exists()


def test_samples_of_a_calibration_are_observations_too():
    assert transfer("a link", TransferSample(9, 3, 0.5, cold=True)) == Transfer("a link", 9, 3, 0.5, True)
    assert prefill(PrefillSample(4, 5, 0.25, at_s=9.0)) == Prefill(4, 5, 0.25)
