"""A model of a few thousand weights with its planners, the command run in-process, and one real tiny reproduction."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvlane.bench import reproduce_results, sweep_results
from kvlane.bench.cli import app
from kvlane.bench.lab import Answer, Ids, Lab
from kvlane.bench.reproduce import Reproduction
from kvlane.bench.shape import Shape, build_model, random_prompt, spec_of
from kvlane.bench.sweep import Sweep
from kvlane.bench.timeline import Timeline
from kvlane.bench.tuning import cpu_machine
from kvlane.policy.calibration import LinkFit
from kvlane.policy.cli import run_app
from kvlane.policy.machine import Link
from kvlane.policy.model import ModelSpec
from kvlane.policy.plan import Executor
from kvlane.policy.planner import Calibration, Planner
from kvlane.policy.prefill_cost import PassCost, PrefillCost
from kvlane.streams.timing import CopyTiming, LayerTiming, PartTiming, PassKind, PassTiming
from kvlane.transfer.host import HostStore

KvlaneBench = Callable[..., "subprocess.CompletedProcess[str]"]

SHAPE = Shape(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=160)
TOKENS, UNIT = 134, 16  # not a whole number of units
USABLE = 128


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Gives the process back the settings that a reproduction changes for itself."""
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        sys.setswitchinterval(interval)


@pytest.fixture(autouse=True)
def one_compute_thread() -> Iterator[None]:
    with as_before():
        torch.set_num_threads(1)
        yield


@pytest.fixture(autouse=True)
def no_thread_stays_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("kvlane")]
    assert not left


@dataclass(frozen=True)
class Small:
    """A lab on plain memory with one prompt answered without a store, and a store that holds all of its units."""

    lab: Lab
    spec: ModelSpec
    ids: Ids
    store: HostStore
    reference: Answer

    def planner(self, rate: float, executor: Executor = "layered", kv_dtype: str = "fp32") -> Planner:
        return planner(self.spec, rate, executor, kv_dtype)

    @property
    def bytes_per_token(self) -> int:
        return self.lab.engine.layout.bytes_per_token

    def stored(self) -> Any:
        """The memory of the stored prompt, to be tampered with, and how it is arranged."""
        with self.store.open(self.store.lookup(self.lab.engine.identity, self.ids), 0, USABLE) as run:
            return run.memory, run.region


def planner(spec: ModelSpec, rate: float, executor: Executor = "layered", kv_dtype: str = "fp32") -> Planner:
    """A policy that believes in a millisecond a token and in this link, whatever the machine really does."""
    cost = PassCost(overhead_s=0.0, token_s=1e-3, pair_s=0.0)
    prefill = PrefillCost(layers=len(spec.layers), fresh=cost, extend=cost, head_s=2e-3)
    link = LinkFit(Link("host link", rate, source="calibration", origin="declared by a test"), 0.01)
    return Planner(
        spec,
        cpu_machine(link, latency_s=1e-4),
        executor=executor,
        kv_dtype=kv_dtype,
        calibration=Calibration(prefill, 0.01, "declared by a test"),
    )


class Kit:
    """What tests of this folder share; a fixture, because test folders are not importable."""

    shape = SHAPE
    tokens = TOKENS
    usable = USABLE
    unit = UNIT
    # Rates on which the policy above loads everything, a part, and nothing.
    cheap_link, middling_link, slow_link = 1e12, 4e5, 1e3
    planner = staticmethod(planner)


def timeline(
    mode: str = "layered",
    layers: int = 4,
    copy_s: float = 0.02,
    compute_s: float = 0.02,
    tiers: tuple[str, ...] = ("host",),
    group: int = 1,
) -> Timeline:
    """An answer as it would run on links and a device that are never disturbed; the second tier is half as fast.

    `recompute` loads nothing, and `failed` gives a load up after half of its layers and recomputes.
    """
    now = 0.001
    parts: list[PartTiming] = []
    passes: list[PassTiming] = []
    kind: PassKind = "forward"
    if mode != "recompute":
        begin = 500 if mode == "two_ended" else 0
        arrived = layers // 2 if mode == "failed" else layers
        for at, tier in enumerate(tiers):
            rows = _copies(layers, copy_s * (at + 1), group)[:arrived]
            parts.append(PartTiming(tier, begin, begin + 1000, arrived == layers, rows))
            begin += 1000
    held = parts[-1].end if parts else 0
    if mode == "two_ended":
        now, computed = _pass(now, layers, compute_s / 2)
        passes, kind = [PassTiming("front", 0, 500, computed)], "tail"
    if mode == "failed":
        held, kind = 0, "recompute"
        now, computed = _pass(copy_s * layers, layers, compute_s)
    else:
        arrivals = [max(part.layers[at].arrive_s for part in parts) for at in range(layers)] if parts else []
        if mode == "bulk":
            now, computed = _pass(arrivals[-1], layers, compute_s, before=arrivals[-1] - now)
        else:
            now, computed = _pass(now, layers, compute_s, arrivals, group)
    passes.append(PassTiming(kind, held, held + 200, computed))
    return Timeline(f"a made {mode} answer", tuple(parts), tuple(passes), 0.004, now + 0.004)


def _copies(layers: int, each_s: float, group: int) -> tuple[CopyTiming, ...]:
    """Rows of a stream that copies a layer in so many seconds, a MiB each."""
    rows = []
    for layer in range(layers):
        first = layer // group * group
        last = min(layers, first + group)
        rows.append(CopyTiming(layer, 1 << 20, 2, 1e-5 * first, each_s * first, each_s * last, first))
    return tuple(rows)


def _pass(
    begin: float,
    layers: int,
    compute_s: float,
    arrivals: Sequence[float] = (),
    group: int = 1,
    before: float | None = None,
) -> tuple[float, tuple[LayerTiming, ...]]:
    """When the pass ends, and its rows: a layer needs its KV once a tenth of it is computed, or all of it before."""
    now, rows = begin, []
    for layer in range(layers):
        reached, exposed = None, 0.0
        if arrivals and layer % group == 0:
            reached = now + compute_s / 10
            exposed = max(0.0, arrivals[layer] - reached)
        end = now + compute_s + exposed
        if before is not None and layer == 0:
            reached, exposed = begin - before, before
        rows.append(LayerTiming(layer, 0, 0, None, None, None, reached, now, end, exposed))
        now = end
    return now, tuple(rows)


@pytest.fixture(scope="session")
def made_timeline() -> Callable[..., Timeline]:
    return timeline


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return build_model(SHAPE, TOKENS, seed=1)


@pytest.fixture
def small(model: LlamaForCausalLM) -> Iterator[Small]:
    ids = random_prompt(SHAPE, TOKENS, seed=2)
    with Lab(model, TOKENS, "seed-1") as lab:
        reference = lab.recompute(ids)
        store = HostStore(UNIT)
        lab.keep(store, ids, TOKENS)
        yield Small(lab, spec_of(model), ids, store, reference)


@pytest.fixture
def kvlane_bench(capsys: pytest.CaptureFixture[str]) -> KvlaneBench:
    """Runs the `kvlane-bench` command in this process: exit status, stdout and stderr as of a real one."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        texts = [str(argument) for argument in arguments]
        status = run_app(app, "kvlane-bench", texts)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(texts, status, out, err)

    return run


@dataclass(frozen=True)
class Reproduced:
    """What one run of the command left behind."""

    out: str
    err: str
    folder: Path
    layers: int
    tokens: int
    reps: int
    reproduction: Reproduction

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
        return found

    @property
    def report(self) -> str:
        return (self.folder / "report.txt").read_text(encoding="utf-8")

    def scenario(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(s for s in self.results["scenarios"] if s["name"] == name)
        return found

    def conditions(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Every condition with its scenario."""
        return [(s, c) for s in self.results["scenarios"] for c in s["conditions"]]


def run_for_real(*arguments: str | int | Path) -> tuple[str, str]:
    """Runs the command in this process; returns stdout and stderr, and fails where it does."""
    out, err = io.StringIO(), io.StringIO()
    with as_before(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run_app(app, "kvlane-bench", [str(argument) for argument in arguments])
    assert status == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    """`kvlane-bench reproduce` for real, on four layers and 1,024 tokens; a run that fails fails here."""
    layers, tokens, reps = 4, 1024, 2
    folder = tmp_path_factory.mktemp("reproduced") / "made" / "by the command"
    written: list[Reproduction] = []
    really_write = reproduce_results.write

    def write(reproduction: Reproduction, into: Path) -> str:
        written.append(reproduction)
        return really_write(reproduction, into)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(reproduce_results, "write", write)
        sizes = ("--layers", layers, "--tokens", tokens, "--reps", reps)
        out, err = run_for_real("reproduce", *sizes, "--out", folder)
    return Reproduced(out, err, folder, layers, tokens, reps, written[0])


@dataclass(frozen=True)
class Swept:
    """What one run of `kvlane-bench sweep` left behind."""

    out: str
    err: str
    folder: Path
    tokens: int
    ratios: tuple[float, ...]
    reps: int
    sweep: Sweep

    def file(self, suffix: str) -> Path:
        (found,) = self.folder.glob(f"*-cpu-sweep.{suffix}")
        return found

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file("json").read_text(encoding="utf-8"))
        return found


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """The command for real, on four layers, 256 tokens and two links."""
    tokens, ratios, reps = 256, (0.5, 2.0), 3
    folder = tmp_path_factory.mktemp("swept") / "made"
    written: list[Sweep] = []
    really_write = sweep_results.write

    def write(sweep: Sweep, into: Path) -> str:
        written.append(sweep)
        return really_write(sweep, into)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(sweep_results, "write", write)
        sizes = ("--tokens", tokens, "--ratios", "0.5,2", "--reps", reps, "--quick")
        out, err = run_for_real("sweep", *sizes, "--out", folder)
    return Swept(out, err, folder, tokens, ratios, reps, written[0])
