"""Other people's CSVs: what can be predicted is, the rest is listed with a reason, only no CSV at all is refused."""

import csv
import json
import time

import pytest

from kvlane.bench.cli import app
from kvlane.bench.validate import fitted, validate
from kvlane.bench.validate_fit import exchange_kind
from kvlane.bench.validate_report import in_words, plain
from kvlane.bench.validate_rows import packaged, read
from kvlane.bench.validate_setup import compute_setup, transfer_setup
from kvlane.policy.catalog import load_machine
from kvlane.policy.cli import run_app
from kvlane.policy.plan import MOST_TOKENS

LINK_RATE = "link_bandwidth_gbps_stated(GB/s)"
LOAD = {"kind": "A", "method": "load", "cached_tokens": "19000", "tier": "host DRAM"}
COPY = {"kind": "C", "method": "load", "tier": "host DRAM", "rate_gb_per_s": "50", "ttft_ms": ""}


def columns():
    with packaged().open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def write(path, rows, names=None):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def a_row(**changes):
    return {
        **dict.fromkeys(columns(), ""),
        "id": "mine-1",
        "kind": "B",
        "source_url": "https://example.org/mine",
        "model": "Llama-3.1-8B-Instruct",
        "gpu": "NVIDIA H100 80GB HBM3",
        "n_gpus_tp": "1",
        "weight_dtype": "BF16",
        "engine": "vLLM 0.11.0",
        "prompt_tokens": "20000",
        "cached_tokens": "0",
        "batch_or_concurrency": "1",
        "method": "recompute",
        "ttft_ms": "640",
        "notes": "U1; mine",
        **changes,
    }


@pytest.fixture
def beside(tmp_path):
    """Validates a good row with an odd one after it; the good one must come out as ever."""

    def of(**changes):
        path = write(tmp_path / "odd.csv", [a_row(id="good"), a_row(id="odd", **changes)])
        found = validate(path, within=True, leave_out=True)
        fitted(path)
        json.dumps(plain(found), allow_nan=False)
        assert in_words(found)
        assert found.scored[0].task.row.id == "good"
        return found

    return of


@pytest.fixture
def only(tmp_path):
    return lambda **changes: read(write(tmp_path / "mine.csv", [a_row(**changes)]))[0]


class TestOtherCsvs:
    def test_another_origin_with_the_same_columns(self, tmp_path):
        rows = [a_row(id=f"mine-{at}", prompt_tokens=str(tokens)) for at, tokens in enumerate((1000, 20000))]
        rows.append(a_row(id="mine-9", gpu="NVIDIA L40S", engine="SGLang 0.5", weight_dtype="FP8"))
        rows.append(a_row(id="mine-x", gpu="Abacus 9000"))
        found = validate(write(tmp_path / "other.csv", rows), within=True, leave_out=True)
        assert [row.task.row.id for row in found.scored] == ["mine-0", "mine-1", "mine-9"]
        assert [(row.id, why) for row, why in found.left_out] == [
            ("mine-x", "the device is not described: Abacus 9000")
        ]
        assert "mine-9" in json.dumps(plain(found))

    def test_columns_in_another_order_with_more_beside_them_and_a_byte_order_mark(self, tmp_path):
        row = {**a_row(), "colour": "red"}
        path = write(tmp_path / "a.csv", [row], list(reversed(row)))
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert len(validate(path).scored) == 1

    def test_nothing_usable_is_no_error(self, tmp_path):
        found = validate(write(tmp_path / "a.csv", [a_row(notes="U3; loaded")]), within=True, leave_out=True)
        assert found.scored == ()
        assert found.left_out == ()
        assert plain(found)["coverage"]["share"] is None
        assert in_words(found)


class TestOddRows:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"n_gpus_tp": "0"}, "0"),
            ({"n_gpus_tp": "9" * 5000}, "n_gpus_tp: '999"),
            ({**LOAD, LINK_RATE: "9" * 5000}, "too long"),
            ({"notes": "U1; " + "word " * 1000}, "too long"),
            ({"gpu": "H100 0W"}, "0 watts"),
            ({"batch_or_concurrency": "batch 0"}, "batch"),
            ({"prompt_tokens": str(MOST_TOKENS + 1)}, "16,777,216"),
            ({"prompt_tokens": "1e12"}, "16,777,216"),
            ({"prompt_tokens": "~16K"}, "not a number of tokens"),
            ({"prompt_tokens": "-5"}, "not a number of tokens"),
            ({"prompt_tokens": "10.5"}, "not a number of tokens"),
            ({"prompt_tokens": "12,37"}, "not a number of tokens"),
            ({"prompt_tokens": ""}, "states no length"),
            ({"ttft_ms": "0"}, "ttft_ms"),
            ({"ttft_ms": "-3"}, "ttft_ms"),
            ({"ttft_ms": "inf"}, "ttft_ms"),
            ({"ttft_ms": "nan"}, "ttft_ms"),
            ({"ttft_ms": "n/a"}, "ttft_ms"),
            ({"ttft_ms": "1e-300"}, "ttft_ms"),
            ({"method": "guess"}, "the method"),
            ({"gpu": "Abacus\n9000 " + "very " * 100 + "long"}, "Abacus 9000 very"),
            ({"gpu": "M5 Max", "n_gpus_tp": "2"}, "interconnect"),
            ({**LOAD, "cached_tokens": "1e12"}, "cached_tokens"),
            ({**LOAD, "cached_tokens": ""}, "no tokens that are loaded"),
            ({**LOAD, LINK_RATE: "0"}, "stated link"),
            ({**LOAD, "tier": "NVMe, 0 drives"}, "0 drives"),
            ({**LOAD, "tier": "RDMA, 0 Gb/s"}, "network"),
            ({**COPY, "rate_gb_per_s": "inf"}, "rate_gb_per_s"),
            ({**COPY, "copy_bytes": "0"}, "copy_bytes"),
        ],
    )
    def test_is_left_out_with_a_reason_and_still_counts_as_usable(self, beside, changes, reason):
        started = time.monotonic()
        found = beside(**changes)
        assert time.monotonic() - started < 5
        ((row, why),) = found.left_out
        assert row.id == "odd"
        assert reason in why
        assert len(why) <= 200
        assert found.coverage() == ((1, 1) if row.kind == "C" else (1, 2))

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"kind": "D"}, "unknown kind 'D'"),
            ({"notes": "fine"}, "no grade"),
            ({"notes": ""}, "no grade"),
            ({"notes": "U4; odd"}, "no grade"),
        ],
    )
    def test_what_cannot_be_scored_is_listed_and_not_counted(self, beside, changes, reason):
        found = beside(**changes)
        ((_, why),) = found.left_out
        assert reason in why
        assert found.coverage() == (1, 1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"prompt_tokens": "20,000"},
            {"prompt_tokens": "20000.0"},
            {"ttft_ms": "1,640.5"},
            {"kind": "b"},
            {"method": "Recompute"},
            {"notes": "u2; lower case"},
            {
                "rate_gb_per_s": "n/a",
                "copy_bytes": "-1",
                "cached_tokens": "~0",
            },  # which a prefill does not need
        ],
    )
    def test_is_predicted_where_it_can_be_read(self, beside, changes):
        found = beside(**changes)
        assert found.left_out == ()
        assert found.scored[1].predicted == found.scored[0].predicted

    def test_an_error_in_a_prediction_is_that_row_s_reason(self, beside, monkeypatch):
        from kvlane.policy.pass_rates import PassRates

        real = PassRates.seconds

        def seconds(self, work):
            if work.dense_flop > 1e15:
                raise ZeroDivisionError("division by zero")
            return real(self, work)

        monkeypatch.setattr(PassRates, "seconds", seconds)
        found = beside(prompt_tokens="900000")
        assert [why for _, why in found.left_out] == ["division by zero"]

    def test_a_row_without_an_id_is_named_by_its_line_and_one_that_stands_twice_by_a_suffix(self, tmp_path):
        rows = read(write(tmp_path / "a.csv", [a_row(), a_row(), a_row(id=""), a_row()]))
        assert [row.id for row in rows] == ["mine-1", "mine-1#2", "line 4", "mine-1#3"]
        assert len(validate(tmp_path / "a.csv").scored) == 4

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("mine-2,,B", "cut short: 3 cells of 22"),
            (",".join(["mine-2", "", "B", *["x"] * 30]), "more cells than columns: 33 cells of 22"),
            ('mine-2,"' + "y" * 200_000, "field larger than field limit"),
        ],
    )
    def test_a_row_of_another_shape(self, tmp_path, line, reason):
        names = [name for name in columns() if name != "source_locator"]
        path = write(tmp_path / "a.csv", [{name: a_row()[name] for name in names}])
        path.write_text(path.read_text(encoding="utf-8") + line + "\n\n,,,\n", encoding="utf-8")
        found = validate(path)
        assert len(found.scored) == 1
        ((_, why),) = found.left_out
        assert reason in why

    def test_one_byte_of_another_encoding(self, tmp_path):
        path = write(tmp_path / "a.csv", [a_row(notes="U1; caf\u00e9\u0085")])
        path.write_bytes(path.read_text(encoding="utf-8").encode("latin-1"))
        assert [row.task.row.notes for row in validate(path).scored] == ["U1; caf\u00e9"]

    @pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
    def test_line_endings(self, tmp_path, ending):
        path = write(tmp_path / "a.csv", [a_row(), a_row(id="b")])
        path.write_bytes(path.read_bytes().replace(b"\r\n", ending.encode()))
        assert len(validate(path).scored) == 2


class TestWhatIsNoCsv:
    def test_columns_that_are_not_needed_may_be_missing(self, tmp_path):
        keys = ("id", "kind", "model", "gpu", "engine", "method", "prompt_tokens", "ttft_ms", "notes")
        found = validate(
            write(tmp_path / "a.csv", [{name: a_row()[name] for name in keys}]), within=True, leave_out=True
        )
        assert len(found.scored) == 1
        assert in_words(found)

    @pytest.mark.parametrize("name", ["id", "kind", "model", "gpu", "engine", "method", "ttft_ms", "notes"])
    def test_a_missing_key_is_named(self, tmp_path, capsys, name):
        row = a_row()
        del row[name]
        assert run_app(app, "kvlane-bench", ["validate", str(write(tmp_path / "a.csv", [row]))]) == 2
        assert f"no column {name}" in capsys.readouterr().err

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"id,kind\n", b'"' + b"x" * 200_000])
    def test_is_one_line_and_status_2(self, tmp_path, capsys, content):
        path = tmp_path / "a.csv"
        path.write_bytes(content)
        assert run_app(app, "kvlane-bench", ["validate", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_header_alone_has_no_rows(self, tmp_path, capsys):
        path = tmp_path / "a.csv"
        path.write_text(",".join(columns()) + "\n", encoding="utf-8")
        assert run_app(app, "kvlane-bench", ["validate", str(path)]) == 2
        assert "has no rows" in capsys.readouterr().err

    def test_a_file_that_is_not_there(self, tmp_path, capsys):
        assert run_app(app, "kvlane-bench", ["validate", str(tmp_path / "none.csv")]) == 2
        assert "none.csv" in capsys.readouterr().err


class TestPhysics:
    @pytest.mark.parametrize(
        ("engine", "whole"),
        [
            ("vLLM 0.7.3", True),
            ("vllm v0.6.1", True),
            ("vLLM==0.5.4", True),
            ("vLLM 0.8.0", False),
            ("vLLM 0.30.0", False),
            ("vLLM 1.0.7.1", False),
            ("vLLM + LMCache 0.5.4", False),
            ("vllm", False),
        ],
    )
    def test_a_vllm_before_chunks_computes_a_prompt_whole(self, only, engine, whole):
        assert (compute_setup(only(engine=engine)).pass_tokens is None) == whole

    @pytest.mark.parametrize(
        ("device", "kind"),
        [("h100-sxm", "device link"), ("gb10", "network"), ("l4", "pcie"), ("rtx-5090", "pcie")],
    )
    def test_what_ranks_exchange_over(self, device, kind):
        assert exchange_kind(load_machine(device).device) == kind

    @pytest.mark.parametrize(("gpu", "shared"), [("2x GB10", False), ("M5 Max", False), ("H100", True)])
    def test_a_device_that_shares_its_host_s_memory_has_drives_of_its_own(self, only, gpu, shared):
        assert transfer_setup(only(gpu=gpu, tier="NVMe SSD")).shared == shared


class TestWhatTheReportOwnsUpTo:
    def test_links_that_rest_on_one_source(self):
        found = validate(packaged())
        links = {each["link"]: each for each in plain(found)["links_of_one_source"]}
        assert {"cxl", "tcp-loopback", "nfs"} <= set(links)
        assert not {"pcie4-x16", "nvme-1", "network"} & set(links)
        assert links["cxl"]["own"] == links["cxl"]["n"] == links["cxl"]["fitted_rows"] == 11
        shown = in_words(found)
        assert "links whose rate rests on one source" in shown
        assert "hbm_hit apart: 6 rows" in shown

    def test_what_leaving_a_source_out_refits(self, tmp_path):
        path = write(tmp_path / "a.csv", [a_row()])
        assert "refits prefills only" in in_words(validate(path, leave_out=True))
        assert "refits prefills only" not in in_words(validate(path))

    @pytest.mark.parametrize("url", ["", "not an address", "http://[", "https://www.example.org/a"])
    def test_a_source_of_any_address(self, beside, url):
        assert len(beside(source_url=url).scored) == 2
