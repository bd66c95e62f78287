"""What is counted, and how it is told to Prometheus.

Counting happens on every decision, so that it is a few additions on cells found once: no lock (one thread counts) and
no look-up of labels. Labels are names of the configuration, never text of a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_TTFT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
_LATENCY_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5)
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """Counts by upper bound, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Counts at or below each bound, as Prometheus has them."""
        so_far, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            so_far += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(so_far)))
        return rows


class PathCells:
    """The cells of one path of one deployment."""

    __slots__ = ("actual_s", "by_tier", "error", "predicted_s", "rejected_s", "scored_predicted_s")

    def __init__(self) -> None:
        self.by_tier: dict[str, int] = {}
        self.predicted_s = Histogram(_TTFT_S)
        self.rejected_s = Histogram(_TTFT_S)
        self.actual_s = Histogram(_TTFT_S)
        self.error = Histogram(_ERROR)
        self.scored_predicted_s = 0.0


class DeploymentCells:
    """The cells of one deployment."""

    __slots__ = ("accepted", "fallbacks", "paths", "refused")

    def __init__(self) -> None:
        self.paths = {path: PathCells() for path in ("load", "recompute", "split")}
        self.accepted: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.fallbacks: dict[str, int] = {}


def count(cells: dict[str, int], name: str) -> None:
    """One more of that name."""
    cells[name] = cells.get(name, 0) + 1


class Cells:
    """All that is counted. `gauges` are asked for at each scrape."""

    def __init__(self) -> None:
        self.deployments: dict[str, DeploymentCells] = {}
        self.latency_s = Histogram(_LATENCY_S)
        self.problems: dict[str, int] = {}
        self.unplaced: dict[str, int] = {}
        self.cut_off: dict[str, int] = {}
        self.journal_failures = 0

    def deployment(self, name: str) -> DeploymentCells:
        """The cells of that deployment, kept over reloads."""
        found = self.deployments.get(name)
        if found is None:
            found = self.deployments[name] = DeploymentCells()
        return found


Gauges = Callable[[], Iterator[Metric]]


class Exporter(Collector):
    """The cells as Prometheus reads them."""

    def __init__(self, cells: Cells, gauges: Gauges) -> None:
        self._cells, self._gauges = cells, gauges

    def collect(self) -> Iterator[Metric]:
        cells = self._cells
        decisions = CounterMetricFamily(
            "kvlane_decisions",
            "Decisions made; two tiers at once are one, host+remote.",
            labels=("deployment", "path", "tier"),
        )
        predicted = _histogram("kvlane_predicted_ttft_seconds", "TTFT predicted for the chosen path.")
        rejected = _histogram(
            "kvlane_rejected_ttft_seconds", "TTFT predicted for the best path not chosen, by that path."
        )
        actual = _histogram("kvlane_actual_ttft_seconds", "TTFT observed of decisions that were followed.")
        error = _histogram(
            "kvlane_prediction_error_ratio",
            "Predicted TTFT against the observed one, difference over observed.",
        )
        scored = CounterMetricFamily(
            "kvlane_scored_predicted_ttft_seconds",
            "TTFT predicted for the decisions in kvlane_actual_ttft_seconds, summed: their ratio is the bias.",
            labels=("deployment", "path"),
        )
        accepted = CounterMetricFamily(
            "kvlane_observations", "Observations taken.", labels=("deployment", "type")
        )
        refused = CounterMetricFamily(
            "kvlane_observations_refused", "Observations refused.", labels=("deployment", "reason")
        )
        fallbacks = CounterMetricFamily(
            "kvlane_fallbacks",
            "Times something else was done than the costs say: a link left alone, a load that failed, a decision"
            " not followed.",
            labels=("deployment", "reason"),
        )
        for name, deployment in cells.deployments.items():
            for path, found in deployment.paths.items():
                for tier, number in found.by_tier.items():
                    decisions.add_metric((name, path, tier), number)
                for histograms, histogram in (
                    (predicted, found.predicted_s),
                    (rejected, found.rejected_s),
                    (actual, found.actual_s),
                    (error, found.error),
                ):
                    histograms.add_metric((name, path), histogram.cumulative(), histogram.total)
                scored.add_metric((name, path), found.scored_predicted_s)
            for family, numbers in (
                (accepted, deployment.accepted),
                (refused, deployment.refused),
                (fallbacks, deployment.fallbacks),
            ):
                for label, number in numbers.items():
                    family.add_metric((name, label), number)
        for reason, number in cells.unplaced.items():
            refused.add_metric(("", reason), number)
        yield from (decisions, predicted, rejected, actual, error, scored, accepted, refused, fallbacks)
        yield from self._service()
        yield from self._gauges()

    def _service(self) -> Iterator[Metric]:
        cells = self._cells
        latency = HistogramMetricFamily("kvlane_decision_duration_seconds", "Time to answer /v1/decide.")
        latency.add_metric((), cells.latency_s.cumulative(), cells.latency_s.total)
        problems = CounterMetricFamily("kvlane_problems", "Requests refused, by code.", labels=("code",))
        for code, number in cells.problems.items():
            problems.add_metric((code,), number)
        cut_off = CounterMetricFamily("kvlane_connections_cut_off", "Connections closed.", labels=("reason",))
        for reason, number in cells.cut_off.items():
            cut_off.add_metric((reason,), number)
        failures = CounterMetricFamily(
            "kvlane_journal_failures",
            "Times acknowledged observations could not be written.",
            value=cells.journal_failures,
        )
        yield from (latency, problems, cut_off, failures)


def _histogram(name: str, text: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, text, labels=("deployment", "path"))


def gauge(name: str, text: str, rows: dict[tuple[str, ...], float], labels: tuple[str, ...]) -> Metric:
    """A gauge with one row for each value of its labels."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows.items():
        family.add_metric(values, value)
    return family


def registry(cells: Cells, gauges: Gauges) -> CollectorRegistry:
    """A registry of its own, with the process's memory, CPU time and open files."""
    found = CollectorRegistry(auto_describe=False)
    found.register(Exporter(cells, gauges))
    ProcessCollector(registry=found)
    return found
