// What the live charts draw: rates of the last two minutes, and predictions against what became of them.

import { linePath, symbol } from "./chart.js";
import { svg } from "./dom.js";
import { count, percent, seconds, tick } from "./format.js";
import { PATHS, WINDOW_S } from "./history.js";
import { decades, fromZero, linear, log } from "./scales.js";

const GAP_S = 3;

/** "8.2", "1,204": a rate without its unit. */
export const perSecond = (value) => (value === 0 ? "0" : value < 9.95 ? value.toFixed(1) : count(value));

/** Decisions per second; `quiet` where none was made yet. */
export function ratesPlan(rates, now, quiet, box) {
  const x = linear(-WINDOW_S, 0, box.left, box.right);
  const highest = Math.max(...rates.flatMap((each) => PATHS.map((path) => each[path])), 1);
  const { ticks, end } = fromZero(highest, 4);
  const y = linear(0, end, box.bottom, box.top);
  const at = (each) => Math.max(box.left, x.at(each.at_s - now));
  // Over a time in which nothing was asked only the mean is known: a level line, apart from the others.
  const points = (each, path) =>
    each.at_s - each.from_s < GAP_S
      ? [[at(each), y.at(each[path])]]
      : [null, [Math.max(box.left, x.at(each.from_s - now)), y.at(each[path])], [at(each), y.at(each[path])]];
  const latest = rates.at(-1);
  const told = (each) => PATHS.map((path) => `${path} ${perSecond(each[path])}`).join(" · ");
  return {
    label:
      "Decisions per second by path over the last two minutes. " +
      (latest ? `Now: ${told(latest)}.` : "No difference seen yet."),
    hint: quiet
      ? ""
      : rates.length === 0
        ? "The first difference comes with the second answer."
        : "Point at a second to read it.",
    x: {
      scale: x,
      ticks: [-120, -90, -60, -30, 0],
      text: (value) => (value === 0 ? "now" : String(-value)),
      title: "seconds ago",
    },
    y: { scale: y, ticks, text: tick, title: "decisions per second" },
    paint: (add) => {
      for (const path of PATHS) {
        add(svg("path", { class: `line ${path}`, d: linePath(rates.flatMap((each) => points(each, path))) }));
      }
    },
    stops: rates.map(at),
    read: (index) => `${Math.round(now - rates[index].at_s)} s ago, per second: ${told(rates[index])}`,
    points: (index) => PATHS.map((path) => [path, at(rates[index]), y.at(rates[index][path])]),
  };
}

function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** Predicted against actual TTFT, one point a decision that was followed. */
export function scoresPlan(scored, box) {
  const all = scored
    .flatMap((each) => [each.predicted_ttft_s, each.ttft_s])
    .map((value) => Math.max(value, 1e-7) * 1e3);
  const { ticks, low, high } = decades(
    ...(all.length ? [0.95 * Math.min(...all), 1.05 * Math.max(...all)] : [10, 1000]),
  );
  const x = log(low / 1e3, high / 1e3, box.left, box.right);
  const y = log(low / 1e3, high / 1e3, box.bottom, box.top);
  const spare =
    box.width < 500 && ticks.length > 5 ? ticks.filter((value) => Number.isInteger(Math.log10(value))) : ticks;
  const axis = (scale, title, shown) => ({
    scale,
    ticks: shown.map((value) => value / 1e3),
    text: (value) => tick(Number((value * 1e3).toPrecision(3))),
    title,
  });
  const sorted = [...scored].sort((one, other) => one.predicted_ttft_s - other.predicted_ttft_s);
  const error = scored.length
    ? median(scored.map((each) => Math.abs(each.predicted_ttft_s - each.ttft_s) / each.ttft_s))
    : null;
  const told =
    error === null ? "" : `Median error ${percent(error)} over the last ${count(scored.length)} followed decisions.`;
  return {
    label: `Predicted against actual TTFT, both logarithmic. ${told}`,
    hint: told,
    x: axis(x, "predicted TTFT, ms", spare),
    y: axis(y, "actual TTFT, ms", ticks),
    paint: (add) => {
      add(svg("line", { class: "diagonal", x1: box.left, y1: box.bottom, x2: box.right, y2: box.top }));
      for (const each of sorted) add(symbol(each.path, x.at(each.predicted_ttft_s), y.at(each.ttft_s)));
    },
    stops: sorted.map((each) => x.at(each.predicted_ttft_s)),
    read: (index) => {
      const each = sorted[index];
      return (
        `${each.deployment}, ${each.path}: predicted ${seconds(each.predicted_ttft_s)}, was ${seconds(each.ttft_s)} ` +
        `(${percent(each.predicted_ttft_s / each.ttft_s - 1)})`
      );
    },
    points: (index) => [[sorted[index].path, x.at(sorted[index].predicted_ttft_s), y.at(sorted[index].ttft_s)]],
  };
}
