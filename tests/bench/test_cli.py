"""`kvlane-bench reproduce` from the outside: bad input is one line and status 2, before anything is measured."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from kvlane.bench import reproduce as module
from kvlane.bench.lab import Lab
from kvlane.bench.progress import Steps
from kvlane.bench.reproduce import Options
from kvlane.streams.cpu import CpuBackend

TINY = ("--layers", 1, "--hidden", 8, "--ffn", 8, "--vocab", 32, "--reps", 1)


class MeasuringError(Exception):
    """The command went on to measure."""


@pytest.fixture
def measures_nothing(monkeypatch):
    """Ends a run with `MeasuringError` where the first measurement would begin."""

    def begin(*arguments):
        raise MeasuringError

    monkeypatch.setattr(module, "_Bench", begin)


def refused(done, *words):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert re.fullmatch(r"kvlane-bench: [^\n]+\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.usefixtures("measures_nothing")
class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--tokens", 511), ("tokens", "511", "512")),
            (("--tokens", 0), ("tokens", "512")),
            (("--tokens", -12_370), ("tokens", "512")),
            (("--tokens", "many"), ("--tokens",)),
            (("--tokens", 12.5), ("--tokens",)),
            (("--reps", 0), ("reps", "1 or more")),
            (("--reps", -1), ("reps", "1 or more")),
            (("--layers", 0), ("layers", "1 or more")),
            (("--heads", 0), ("heads", "1 or more")),
            (("--heads", 3), ("heads", "256")),
            (("--kv-heads", 3), ("kv_heads", "4 heads")),
            (("--kv-heads", 0), ("kv_heads", "1 or more")),
            (("--vocab", 0), ("vocab", "2 or more")),
            (("--link", "5"), ("--link", "'5'", "unit")),
            (("--link", "5 GB"), ("--link", "5 GB")),
            (("--link", "0 GB/s"), ("--link", "0 GB/s")),
            (("--link", "-5 GB/s"), ("--link", "-5 GB/s")),
            (("--link", ""), ("--link",)),
            (("--nonsense",), ("--nonsense",)),
            (("12370",), ("12370",)),
        ],
        ids=lambda value: " ".join(map(str, value)),
    )
    def test_is_refused_in_one_line_that_names_it(self, kvlane_bench, tmp_path, arguments, words):
        folder = tmp_path / "results"
        refused(kvlane_bench("reproduce", "--out", folder, *arguments), *words)
        assert not folder.exists()

    @pytest.mark.parametrize("tokens", [10**8, 10**23])
    def test_a_prompt_that_memory_cannot_hold_is_refused(self, kvlane_bench, tmp_path, tokens):
        refused(kvlane_bench("reproduce", "--tokens", tokens, "--out", tmp_path), "tokens", str(tokens), "GB")

    @pytest.mark.parametrize(
        "sizes",
        [("--vocab", 10**10), ("--hidden", 2**20), ("--ffn", 10**10), ("--layers", 10**6)],
        ids=lambda sizes: sizes[0],
    )
    def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_built(
        self, kvlane_bench, tmp_path, monkeypatch, sizes
    ):
        def build(*arguments):
            raise MeasuringError

        # Not left to torch: where memory is overcommitted it would fill the machine's before it fails.
        monkeypatch.setattr(module, "build_model", build)
        refused(kvlane_bench("reproduce", *sizes, "--out", tmp_path), "GB")

    @pytest.mark.parametrize("link", ["1 B/s", "10 kB/s", "1 MB/s"])
    def test_a_link_on_which_no_load_ends_before_its_deadline_is_refused(self, kvlane_bench, tmp_path, link):
        # 12,370 tokens of the default model are 203 MB: over three minutes at 1 MB/s, and a load has one.
        refused(kvlane_bench("reproduce", "--link", link, "--out", tmp_path), "link")

    def test_a_vocabulary_without_a_runner_up_is_refused(self, kvlane_bench, tmp_path):
        refused(kvlane_bench("reproduce", "--vocab", 1, "--out", tmp_path), "vocab")

    def test_an_unknown_command_is_refused(self, kvlane_bench):
        refused(kvlane_bench("reprodcue"), "reprodcue")


@pytest.mark.usefixtures("measures_nothing")
class TestOut:
    def test_a_file_is_refused(self, kvlane_bench, tmp_path):
        file = tmp_path / "file"
        file.write_text("kept")
        refused(kvlane_bench("reproduce", "--out", file), "--out", str(file))
        refused(kvlane_bench("reproduce", "--out", file / "below"), "--out", str(file / "below"))
        assert file.read_text() == "kept"

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
    def test_a_folder_that_cannot_be_written_is_refused(self, kvlane_bench, tmp_path):
        tmp_path.chmod(0o555)
        refused(kvlane_bench("reproduce", "--out", tmp_path), "--out", "denied")

    @pytest.mark.parametrize("name", ["results.json", "report.txt"])
    def test_a_folder_in_which_a_result_cannot_be_written_is_refused(self, kvlane_bench, tmp_path, name):
        (tmp_path / name).mkdir()
        refused(kvlane_bench("reproduce", "--out", tmp_path), "--out", name)

    def test_results_of_before_stay_until_there_are_new_ones(self, kvlane_bench, tmp_path):
        (tmp_path / "results.json").write_text("before")
        with pytest.raises(MeasuringError):
            kvlane_bench("reproduce", *TINY, "--out", tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
        assert (tmp_path / "results.json").read_text() == "before"


@pytest.mark.usefixtures("measures_nothing")
class TestGoodInput:
    """The refusals above are not of everything."""

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--tokens", 512),
            ("--quick",),
            ("--reps", 1),
            ("--heads", 8, "--kv-heads", 8),
            ("--link", "2 GB/s"),
            ("--link", "memcpy"),
            # 512 tokens of one layer of eight: an eighth of a second on this link.
            ("--tokens", 512, *TINY, "--link", "128 kB/s"),
        ],
        ids=lambda arguments: " ".join(map(str, arguments)),
    )
    def test_is_not_refused(self, kvlane_bench, tmp_path, arguments):
        with pytest.raises(MeasuringError):
            kvlane_bench("reproduce", "--out", tmp_path, *arguments)

    @pytest.mark.skipif(
        not Path("/proc/meminfo").exists(), reason="needs a system that says what is available"
    )
    @pytest.mark.parametrize(("free", "available", "fits"), [(64, 30_000, True), (30_000, 64, False)])
    def test_memory_in_which_the_system_keeps_files_counts_as_free(
        self, kvlane_bench, tmp_path, monkeypatch, free, available, fits
    ):
        """Right after an install most of a machine's memory is page cache."""
        really_read = Path.read_text

        def read(path, *arguments, **options):
            if path != Path("/proc/meminfo"):
                return really_read(path, *arguments, **options)
            return f"MemTotal: 32000000 kB\nMemFree: {free}000 kB\nMemAvailable: {available}000 kB\n"

        monkeypatch.setattr(Path, "read_text", read)
        if fits:
            with pytest.raises(MeasuringError):
                kvlane_bench("reproduce", *TINY, "--out", tmp_path)
        else:
            refused(kvlane_bench("reproduce", *TINY, "--out", tmp_path), "65.5 MB are free", "tokens")

    def test_quick_is_a_small_model_and_a_short_prompt(self, kvlane_bench, tmp_path, monkeypatch):
        asked: list[Options] = []

        def reproduce(options):
            asked.append(options)
            raise MeasuringError

        monkeypatch.setattr(module, "reproduce", reproduce)
        for arguments in ((), ("--quick",), ("--quick", "--tokens", 900, "--layers", 7)):
            with pytest.raises(MeasuringError):
                kvlane_bench("reproduce", *arguments, "--out", tmp_path)
        assert [(o.tokens, o.shape.layers) for o in asked] == [(12_370, 16), (2048, 4), (900, 7)]
        for options in asked:
            shape = options.shape
            assert (shape.hidden, shape.heads, shape.kv_heads, shape.ffn, shape.vocab) == (
                256,
                4,
                2,
                704,
                2048,
            )
            assert (options.reps, options.link_bytes_per_s) == (3, None)


class TestRun:
    def test_the_shortest_prompt_runs(self, kvlane_bench, tmp_path):
        done = kvlane_bench("reproduce", "--tokens", 512, "--layers", 6, "--reps", 1, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "A  the published one: a prompt of 512 tokens" in done.stdout

    def test_a_paced_link_for_the_published_one_runs(self, kvlane_bench, tmp_path):
        sizes = ("--tokens", 1024, "--layers", 4, "--reps", 1)
        done = kvlane_bench("reproduce", *sizes, "--link", "100 MB/s", "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        title = next(line for line in done.stdout.splitlines() if line.startswith("A  "))
        assert title.endswith("100 MB/s (a link paced at this rate)")
        # Nothing in this run came from a memcpy, and the comparison must not say so.
        (last,) = [line for line in done.stdout.splitlines() if "not comparable" in line]
        assert "memcpy" not in last

    def test_a_model_whose_loads_are_lost_in_the_machines_pauses_runs(
        self, kvlane_bench, tmp_path, monkeypatch
    ):
        """On a paced link whose rate is known, noise in a load of a few milliseconds is nobody's bad input."""
        sample = Lab.sample_transfer

        def paused(self, store, ids, end):
            taken = sample(self, store, ids, end)
            return taken if self.backend.link_bytes_per_s is None else replace(taken, seconds=0.02)

        monkeypatch.setattr(Lab, "sample_transfer", paused)
        done = kvlane_bench("reproduce", "--tokens", 1024, *TINY, "--out", tmp_path)
        assert done.returncode == 0, done.stderr

    def test_a_copy_that_fails_ends_it_in_one_line(self, kvlane_bench, tmp_path, monkeypatch):
        copy_piece = CpuBackend._copy_piece

        def broken(self, destination, source, piece):
            if piece.layer == 1:
                raise OSError("link down")
            copy_piece(self, destination, source, piece)

        monkeypatch.setattr(CpuBackend, "_copy_piece", broken)
        done = kvlane_bench("reproduce", "--tokens", 1024, *TINY, "--layers", 2, "--out", tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert last.startswith("kvlane-bench: ")
        assert "link down" in last
        assert list(tmp_path.iterdir()) == []


class TestProgress:
    def test_is_shown_on_a_terminal(self, monkeypatch):
        ours, theirs = os.openpty()
        with os.fdopen(ours, "rb", 0) as reader, os.fdopen(theirs, "w", encoding="utf-8") as terminal:
            monkeypatch.setenv("TERM", "xterm")
            monkeypatch.setattr(sys, "stderr", terminal)
            with Steps(4.0) as step:
                step("half of it", 2.0)
            terminal.flush()
            seen = b""
            while select.select([reader], [], [], 0.2)[0]:
                seen += reader.read(65_536)
        assert b"half of it" in seen
        assert b"100%" in seen

    def test_is_a_line_a_step_where_nobody_watches(self, capsys):
        with Steps(4.0) as step:
            step("half of it", 2.0)
            step("the rest of it", 2.0)
        out, err = capsys.readouterr()
        assert (out, err) == ("", "half of it\nthe rest of it\n")


class TestWithoutExtras:
    """In a process of its own, in which the named package cannot be imported."""

    def run(self, missing, *arguments):
        code = f"""
            import sys
            sys.modules[{missing!r}] = None
            from kvlane.bench.cli import main
            main()
            """
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    @pytest.mark.parametrize("missing", ["torch", "transformers"])
    def test_says_which_extra_to_install(self, missing, tmp_path):
        done = self.run(missing, "reproduce", "--out", str(tmp_path))
        refused(done, missing, "pip install 'kvlane[transformers]'")
        assert list(tmp_path.iterdir()) == []

    def test_help_is_there_all_the_same(self):
        done = self.run("torch", "reproduce", "--help")
        assert done.returncode == 0, done.stderr
        for option in ("--tokens", "--layers", "--link", "--reps", "--quick", "--out"):
            assert option in done.stdout
