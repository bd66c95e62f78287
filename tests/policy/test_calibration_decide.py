"""Records in force: what goes before what, what does not fit, and what the plan says of where it was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlane.policy import Machine, ModelSpec, Plan, Request, load_machine, load_model
from kvlane.policy.calibration import LinkCalibrator, PrefillCalibrator, PrefillSample, TransferSample
from kvlane.policy.calibration_apply import calibrated
from kvlane.policy.calibration_build import build_record
from kvlane.policy.calibration_record import Fingerprint, Record, write
from kvlane.policy.cli import app, run_app
from kvlane.policy.errors import InputError
from kvlane.policy.planner import BAND, Planner

MODEL, MACHINE, LINK = "llama-3.1-8b", "h100-sxm", "pcie5-x16"
LOADED = Request(8192, {"host": 8192})


def record(
    *, prefill: bool = True, links: bool = True, lengths: tuple[int, int] = (1000, 20_000), **marks: Any
) -> Record:
    """Passes of 20 us a token on llama-3.1-8b, and a link of 30 GB/s, measured without noise but with an offset."""
    machine = load_machine(MACHINE)
    passes = PrefillCalibrator(32, head_s=2e-3, half_life=None)
    low, high = lengths
    for resident, new in [(0, low)] + [(p, n) for p in (0, low, high) for n in (low, 2 * low, 3 * low, high)]:
        passes.add(PrefillSample(resident, new, 0.01 + 2e-5 * new + 4e-10 * new * (resident + new / 2)))
    link = LinkCalibrator(LINK, half_life=None)
    for size, copies in [(10**8, 64)] + [(s, c) for s in (10**8, 10**9, 2 * 10**9) for c in (64, 6400)]:
        link.add(TransferSample(size, copies, 1e-4 + 2e-6 * copies + size / 30e9))
    fields: dict[str, Any] = {
        "model": MODEL,
        "device": machine.device.name,
        "engine": "vllm",
        "dtype": "bf16",
        "kv_dtype": "bf16",
    }
    return build_record(
        Fingerprint(**{**fields, "tp": 1, **marks}),
        1_790_000_000.0,
        prefill=(passes.estimate(), passes.cost()) if prefill else None,
        links={LINK: link.estimate()} if links else {},
    )


def plan(made: Record | None, request: Request = LOADED, link: float | None = None) -> Plan:
    model: ModelSpec = load_model(MODEL)
    machine: Machine = load_machine(MACHINE)
    calibration = None
    if made is not None:
        found = calibrated(made, model=model, machine=machine, engine="vllm", tp=1)
        machine, calibration = found.machine, found.calibration
    if link is not None:
        machine = machine.with_link_rate(link)
    return Planner(model, machine, calibration=calibration).decide(request)


def sources(made: Plan) -> dict[str, str]:
    return {name: parameter.source for name, parameter in made.parameters_from.items()}


class TestPrecedence:
    def test_a_matching_calibration_goes_before_the_profile(self) -> None:
        before, after = plan(None), plan(record())
        assert sources(before)["prefill"] in ("profile", "assumption")
        assert sources(after) == {"prefill": "calibration", f"link.{LINK}": "calibration"}
        assert after.calibrated
        assert not before.calibrated
        recompute = after.estimates["recompute"]
        assert recompute is not None
        assert recompute.ttft_s == pytest.approx(0.012 + 2e-5 * 8192 + 2e-10 * 8192**2, rel=0.01)

    def test_what_is_explicit_goes_before_the_calibration(self) -> None:
        made = plan(record(), link=5e9)
        assert sources(made) == {"prefill": "calibration", f"link.{LINK}": "explicit"}
        assert made.link_bytes_per_s == 5e9

    def test_what_was_not_calibrated_stays_the_profiles(self) -> None:
        links = plan(record(prefill=False))
        assert sources(links)[f"link.{LINK}"] == "calibration"
        assert sources(links)["prefill"] in ("profile", "assumption")
        assert not links.calibrated
        passes = plan(record(links=False))
        assert sources(passes)["prefill"] == "calibration"
        assert sources(passes)[f"link.{LINK}"] != "calibration"

    def test_a_link_keeps_its_measured_first_use_and_the_profiles_price_of_an_event(self) -> None:
        made = record()
        cold = msgspec.structs.replace(made.links[LINK], first_use_s=0.7)
        machine = load_machine(MACHINE)
        priced = replace(
            machine, links={**machine.links, LINK: replace(machine.links[LINK], per_event_s=3e-6)}
        )
        for link, first_use_s in ((cold, 0.7), (made.links[LINK], 0.0)):
            found = calibrated(msgspec.structs.replace(made, links={LINK: link}), machine=priced)
            assert found.machine.links[LINK].first_use_s == first_use_s
            assert found.machine.links[LINK].per_event_s == 3e-6

    def test_the_band_is_the_fits_own_and_wider_without_one(self) -> None:
        made = record()
        assert made.prefill is not None
        calibrated_one, uncalibrated = plan(made).estimates["recompute"], plan(None).estimates["recompute"]
        assert calibrated_one is not None
        assert uncalibrated is not None
        assert calibrated_one.band == max(
            made.prefill.fresh.relative_error, made.prefill.extend.relative_error
        )
        assert uncalibrated.band >= BAND["profile"] > calibrated_one.band

    def test_a_links_own_error_widens_what_is_loaded_over_it(self) -> None:
        made = record()
        unsure = msgspec.structs.replace(made.links[LINK], relative_error=0.6)
        loud = plan(msgspec.structs.replace(made, links={LINK: unsure}))
        assert loud.estimates["load"] is not None
        assert loud.estimates["load"].band == 0.6
        # An explicit rate does not inherit the error of the one it replaced.
        quiet = plan(msgspec.structs.replace(made, links={LINK: unsure}), link=30e9)
        assert quiet.estimates["load"] is not None
        assert quiet.estimates["load"].band < BAND["profile"]

    def test_nothing_uncalibrated_is_rejected_for_it(self) -> None:
        """The same numbers win whether they were measured or assumed."""
        made = plan(record())
        assert made.path == "load"
        assert plan(record(links=False)).path == "load"
        assert plan(None).path == "load"


class TestForeignRecords:
    @pytest.mark.parametrize(
        ("mark", "value"),
        [
            ("device", "NVIDIA L4"),
            ("engine", "sglang"),
            ("tp", 2),
        ],
    )
    def test_are_refused_by_the_field(self, mark: str, value: Any) -> None:
        with pytest.raises(InputError) as refused:
            plan(record(**{mark: value}))
        assert refused.value.field == f"calibration.fingerprint.{mark}"

    def test_of_another_model(self) -> None:
        with pytest.raises(InputError, match=r"calibration\.fingerprint\.model: is 'llama-3.1-8b'"):
            calibrated(record(), model=load_model("qwen3-8b"))

    def test_of_another_kv_dtype(self) -> None:
        with pytest.raises(InputError, match=r"calibration\.fingerprint\.kv_dtype: is 'bf16'"):
            calibrated(record(), kv_dtype="fp8")

    def test_of_other_links(self) -> None:
        machine = load_machine(MACHINE)
        made = record()
        renamed = msgspec.structs.replace(made, links={"other": made.links[LINK]})
        with pytest.raises(InputError, match=r"calibration\.links\.other: h100-sxm has no such link"):
            calibrated(renamed, machine=machine)


class TestRange:
    def test_inside_it_nothing_is_said(self) -> None:
        made = plan(record(), Request(17_000, {"host": 12_000}, load_unit_tokens=6000))
        assert made.notes == ()

    def test_a_plan_above_it_says_so(self) -> None:
        made = plan(record(), Request(60_000, {"host": 60_000}))
        assert "recompute: 60,000 new tokens in a pass is above the calibrated range of 1,000 to 20,000" in (
            made.notes
        )
        assert any("is above the calibrated range of 100 MB to 2 GB" in note for note in made.notes)

    def test_a_plan_below_it_says_so(self) -> None:
        made = plan(record(), Request(200, {"host": 0}))
        assert made.notes == (
            "recompute: 200 new tokens in a pass is below the calibrated range of 1,000 to 20,000",
        )

    def test_without_a_calibration_there_is_no_range_to_leave(self) -> None:
        made = plan(None, Request(60_000, {"host": 60_000}))
        assert made.notes == ()
        assert "calibrated range" not in made.crossover_note

    def test_a_crossover_below_it_says_so(self) -> None:
        made = plan(record(lengths=(8000, 60_000)), LOADED)
        assert made.crossover_tokens is None or made.crossover_tokens < 8000
        assert "calibrated range of 7,984 to 15,259 tokens" in made.crossover_note

    def test_a_crossover_inside_it_does_not(self) -> None:
        # A slow explicit link moves the crossover; its own range is then nobody's.
        made = plan(record(), Request(16_000, {"host": 15_984}, load_unit_tokens=1), link=6e9)
        assert made.crossover_tokens is not None
        assert 1000 < made.crossover_tokens < 20_000
        assert "calibrated range" not in made.crossover_note


class TestCommand:
    def test_alone_the_record_brings_model_and_machine(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "record.json"
        write(record(links=False), file)
        assert run_app(app, "kvlane", ["decide", "--calibration", str(file), "--prompt-tokens", "5000"]) == 0
        out = capsys.readouterr().out
        assert "model           llama-3.1-8b" in out
        assert "parameters      calibrated" in out
        assert "calibration: 12 prefills measured on" in out

    def test_on_a_machine_it_takes_the_place_of_the_profile(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "record.json"
        write(record(), file)
        words = ["decide", "--calibration", str(file), "--machine", MACHINE, "--prompt-tokens", "8192"]
        assert run_app(app, "kvlane", [*words, "--hit", "host=8192", "--json"]) == 0
        answer = msgspec.json.decode(capsys.readouterr().out)
        assert answer["calibrated"] is True
        assert answer["parameters_from"]["prefill"]["source"] == "calibration"
        assert run_app(app, "kvlane", [*words, "--hit", "host=8192", "--link", "9 GB/s", "--json"]) == 0
        answer = msgspec.json.decode(capsys.readouterr().out)
        assert answer["parameters_from"][f"link.{LINK}"]["source"] == "explicit"

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--model", "qwen3-8b"], "calibration.fingerprint.model"),
            (["--machine", "a100-sxm-80gb"], "calibration.fingerprint.device"),
            (["--tp", "2"], "calibration.fingerprint.tp"),
            (["--engine", "sglang"], "calibration.fingerprint.engine"),
            (["--kv-dtype", "fp8"], "calibration.fingerprint.kv_dtype"),
        ],
    )
    def test_what_does_not_match_is_one_line_and_status_2(
        self, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "record.json"
        write(record(), file)
        assert (
            run_app(app, "kvlane", ["decide", "--calibration", str(file), "--prompt-tokens", "9", *words])
            == 2
        )
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error

    @pytest.mark.parametrize("missing", ["--model", "--machine"])
    def test_without_a_record_both_are_needed(self, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
        given = {"--model": MODEL, "--machine": MACHINE}
        del given[missing]
        words = [word for pair in given.items() for word in pair]
        assert run_app(app, "kvlane", ["decide", "--prompt-tokens", "9", *words]) == 2
        assert f"{missing}: is missing" in capsys.readouterr().err
