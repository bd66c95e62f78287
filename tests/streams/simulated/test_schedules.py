"""Thousands of random schedules by the real executor, and that one of them can be run again by its seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest

from kvlane.streams.load import LayerLoad
from kvlane.streams.simulated.draw import draw
from kvlane.streams.simulated.order import OrderError
from kvlane.streams.simulated.schedules import ScheduleRun
from kvlane.streams.simulated.soak import SoakFailure, main, replay_command, run_seeds, soak
from kvlane.streams.simulated.tier import FAULTS

SCHEDULES = 10_000

# KVLANE_SEED draws others.
FIRST_SEED = int(os.environ.get("KVLANE_SEED", "0"))


@pytest.mark.slow
def test_ten_thousand_schedules_hold():
    print(f"{SCHEDULES} schedules from seed {FIRST_SEED} on")
    seen, failure = soak(FIRST_SEED, SCHEDULES, os.cpu_count() or 1)
    assert failure is None, str(failure)
    assert seen["schedules"] == SCHEDULES
    # What they are for has happened, and often.
    for what in (
        "loaded",
        "fell_back",
        "refused",
        "cancelled",
        "raised",
        "quarantined",
        "two_ended",
        "parts 2",
        "evictions",
    ):
        assert seen[what] > 100, what
    for kind in FAULTS:
        assert seen[f"fault {kind}"] > 10, kind


def test_what_is_drawn_covers_what_there_is():
    drawn = [draw(seed) for seed in range(1000)]
    layers = [schedule.layout.layers for schedule in drawn]
    assert min(layers) == 1
    assert max(layers) > 100
    requests = [request for schedule in drawn for row in schedule.requests for request in row]
    assert {request.plan for request in requests} == {
        "recompute",
        "load",
        "two_tiers",
        "two_ended",
        "two_ended_tiers",
    }
    assert {request.fault.kind for request in requests if request.fault} == set(FAULTS)
    assert {schedule.compute for schedule in drawn} == {"thread", "stream"}
    assert {schedule.timed for schedule in drawn} == {True, False}
    assert {schedule.ring_sets for schedule in drawn} == {1, 2, 3}
    for several in (
        [schedule.paged for schedule in drawn],
        [schedule.evictions for schedule in drawn],
        [len(schedule.requests) > 1 for schedule in drawn],
        [schedule.layout.has_states for schedule in drawn],
        [any(shape.window for shape in schedule.layout.shapes) for schedule in drawn],
        [
            any(not schedule.layout.holds(layer) for layer in range(schedule.layout.layers))
            for schedule in drawn
        ],
        [any(link.sharing == "fair" for link in schedule.links.values()) for schedule in drawn],
        [request.cancel_after is not None for request in requests],
        [request.deadline_s < 1 for request in requests],
        [request.group_layers > 1 for request in requests],
    ):
        assert 20 < sum(map(bool, several)) < len(several)


class Breaking:
    """Every schedule with a load of more than one layer fails."""

    @pytest.fixture(autouse=True)
    def no_waiting(self, monkeypatch):
        monkeypatch.setattr(LayerLoad, "hold", lambda self, layer: None)


class TestAFailure(Breaking):
    def test_is_told_with_its_seed_and_how_to_run_it_again(self):
        seen, failure = run_seeds(range(100))
        assert failure is not None
        assert seen["schedules"] == failure.seed
        assert replay_command(failure.seed) in str(failure)
        assert f"seed {failure.seed}" in str(failure)

    def test_comes_again_by_its_seed(self):
        _, failure = run_seeds(range(100))
        assert failure is not None
        with pytest.raises(OrderError) as caught:
            main(["--only", str(failure.seed)])
        assert str(caught.value) in failure.error


def test_a_failure_ends_the_command_with_an_error(capsys, monkeypatch):
    failure = SoakFailure(3, "OrderError: stuck")
    monkeypatch.setattr("kvlane.streams.simulated.soak.soak", lambda *given: (Counter(), failure))
    assert main(["--schedules", "10"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("10 schedules from seed ")
    assert "seed 3 FAILED" in said.err
    assert replay_command(3) in said.err


def test_one_command_runs_one_schedule():
    command = replay_command(5).split()
    done = subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("seed 5: ")


def test_the_seed_is_printed_first_and_what_was_seen_last(capsys):
    assert main(["--schedules", "20", "--seed", "3", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "20 schedules from seed 3 on"
    assert lines[1].startswith("20 schedules held")


def test_a_seed_runs_the_same_way_in_another_process(tmp_path):
    """The order of everything, down to which thread came when."""
    code = (
        "from kvlane.streams.simulated.choosers import Seeded\n"
        "from kvlane.streams.simulated.draw import draw\n"
        "from kvlane.streams.simulated.schedules import ScheduleRun\n"
        "from kvlane.streams.simulated.threads import HostThreads\n"
        "turns = []\n"
        "choose = Seeded.choose\n"
        "def noted(self, options, may_stay):\n"
        "    one = choose(self, options, may_stay)\n"
        "    turns.append(options[one].name)\n"
        "    return one\n"
        "Seeded.choose = noted\n"
        "with HostThreads() as threads:\n"
        "    for seed in range(60):\n"
        "        ScheduleRun(draw(seed), threads).run()\n"
        "import zlib\n"
        "print(len(turns), zlib.crc32(' '.join(turns).encode()))\n"
    )
    ran = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert ran[0] == ran[1]
    assert int(ran[0].split()[0]) > 1000


def test_a_run_says_what_it_saw(host_threads):
    assert ScheduleRun(draw(0), host_threads).run()["answers"] > 0


def test_a_load_called_off_takes_no_stream_from_another(sim, host_threads):
    """The tier's stream is given up for a new one while another sequence's load is still on its way there."""
    rows = ((sim.request(cancel_after=0.4 * sim.layer_s), sim.request()), (sim.request(),))
    for seed, compute in product(range(60), ("thread", "stream")):
        schedule = sim.schedule(seed=seed, compute=compute, stall=0.1, quarantine_blocks=3, requests=rows)
        ScheduleRun(schedule, host_threads).run()
