"""`kvlane-bench validate`: what the policy predicts, held against what others measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import shorten

from kvlane.bench.validate_predict import Profiles, Task, predict, task_of
from kvlane.bench.validate_profiles import APART, Fits
from kvlane.bench.validate_rows import Row, read
from kvlane.bench.validate_text import UnpredictableError
from kvlane.bench.validate_within import Calibrated, within_source

# Two paths closer than this have no right one.
_TIE = 0.10
# A reason is one line of at most so many characters, whatever the cell it quotes.
_REASON = 200


@dataclass(frozen=True, slots=True)
class Scored:
    """One row predicted: `error` is (predicted - measured) / measured."""

    task: Task
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.task.measured - 1

    @property
    def method(self) -> str:
        """Recompute, load, hbm_hit or transfer; of engines apart, named so."""
        engine = self.task.engine
        return f"{self.task.method} ({engine})" if engine in APART else self.task.method


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a group of rows: how many, typical, nine of ten within, worst, and the signed bias."""

    n: int
    median_abs_error: float
    p90_abs_error: float
    worst_abs_error: float
    bias: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A load and a recompute of one prompt, and whether the faster one was predicted to be faster."""

    pair_id: str
    load: Scored
    recompute: Scored

    @property
    def close(self) -> bool:
        """Whether the two were measured within 10 % of each other."""
        slow = max(self.load.task.measured, self.recompute.task.measured)
        return abs(self.load.task.measured - self.recompute.task.measured) < _TIE * slow

    @property
    def right(self) -> bool:
        measured = self.load.task.measured < self.recompute.task.measured
        return measured == (self.load.predicted < self.recompute.predicted)


@dataclass(frozen=True, slots=True)
class Validation:
    """All usable rows of a CSV: those predicted, those left out and why, and what else was asked for."""

    path: Path
    scored: tuple[Scored, ...]
    left_out: tuple[tuple[Row, str], ...]
    pairs: tuple[Pair, ...]
    within: tuple[Calibrated, ...] | None = None
    across: tuple[Scored, ...] | None = None

    def groups(self, key: Callable[[Scored], str]) -> dict[str, Errors]:
        """Errors by what `key` says of each row."""
        return grouped((key(row), row.error) for row in self.scored)

    def coverage(self) -> tuple[int, int]:
        """Usable rows of kinds A and B that were predicted, and all of them."""
        predicted = sum(row.task.row.kind != "C" for row in self.scored)
        return predicted, predicted + sum(row.usable and row.kind != "C" for row, _ in self.left_out)


def validate(path: Path, *, within: bool = False, leave_out: bool = False) -> Validation:
    """Predicts every usable row; raises `InputError` for a CSV that is none.

    `within` calibrates each source on some of its own rows; `leave_out` refits the efficiencies without each source
    and predicts it.
    """
    scored, left_out = _scored(read(path))
    tasks = [row.task for row in scored]
    return Validation(
        path=path,
        scored=tuple(scored),
        left_out=tuple(left_out),
        pairs=tuple(_pairs(scored)),
        within=tuple(within_source(tasks, Profiles())) if within else None,
        across=tuple(_across(tasks)) if leave_out else None,
    )


def fitted(path: Path) -> Fits:
    """Efficiencies fitted to the usable rows of a CSV; raises `InputError` as `validate` does."""
    return Fits([row.task for row in _scored(read(path))[0]])


def grouped(pairs: Iterable[tuple[str, float]]) -> dict[str, Errors]:
    """Errors by group, the largest group first."""
    errors: dict[str, list[float]] = defaultdict(list)
    for name, error in pairs:
        errors[name].append(error)
    found = {name: summary(each) for name, each in errors.items()}
    return dict(sorted(found.items(), key=lambda item: (-item[1].n, item[0])))


def summary(errors: Sequence[float]) -> Errors:
    """Median, ninetieth percentile (linear between rows), worst and signed median of relative errors."""
    size = sorted(abs(error) for error in errors)
    at = 0.9 * (len(size) - 1)
    low = int(at)
    high = min(low + 1, len(size) - 1)
    return Errors(
        n=len(size),
        median_abs_error=median(size),
        p90_abs_error=size[low] + (at - low) * (size[high] - size[low]),
        worst_abs_error=size[-1],
        bias=median(errors),
    )


def _scored(rows: Sequence[Row]) -> tuple[list[Scored], list[tuple[Row, str]]]:
    """All rows but those of context: predicted, or left out with the reason."""
    scored, left_out = [], []
    for row in rows:
        if row.context:
            continue
        try:
            task = task_of(row)
            scored.append(Scored(task, predict(task, Profiles())))
        except UnpredictableError as reason:
            left_out.append((row, shorten(str(reason), _REASON, placeholder=" ...")))
    return scored, left_out


def _pairs(scored: Sequence[Scored]) -> Iterable[Pair]:
    by_pair: dict[str, list[Scored]] = defaultdict(list)
    for row in scored:
        if row.task.row.pair_id:
            by_pair[row.task.row.pair_id].append(row)
    for name, members in by_pair.items():
        recomputes = [row for row in members if row.task.method == "recompute"]
        loads = [row for row in members if row.task.method == "load"]
        for recompute in recomputes[:1]:
            yield from (Pair(name, load, recompute) for load in loads)


def _across(tasks: Sequence[Task]) -> Iterable[Scored]:
    computed = [task for task in tasks if task.method == "recompute"]
    for source in dict.fromkeys(task.row.source for task in computed):
        others = Fits([task for task in computed if task.row.source != source])
        for task in computed:
            if task.row.source == source:
                with suppress(UnpredictableError):
                    yield Scored(task, predict(task, others))
