// What the crossover chart and the break-even chart draw of one answer of `/v1/curves`.

import { linePath } from "./chart.js";
import { svg } from "./dom.js";
import { count, rate, seconds, tick, timeUnit, tokens } from "./format.js";
import { decades, fromZero, linear, log, tokenTicks } from "./scales.js";

export const PATHS = ["recompute", "load", "split"];
// A break-even rate so many times the link's is out of the picture.
const MOST_TIMES = 20;
// About as wide as a letter of a label is.
const LETTER_PX = 7.4;

export const keyOf = (path) => `${path}_ttft_s`;
export const shown = (value, format) => (value === null ? "–" : format(value));
const narrow = (box) => box.width < 500;

function lengths(answer, box) {
  const scale = linear(0, answer.tokens.at(-1), box.left, box.right);
  return { scale, ticks: tokenTicks(scale.high, narrow(box) ? 4 : 8), text: count, title: "stored prefix, tokens" };
}

/** Pixels of a series, null where it has no value. */
const pixels = (answer, values, x, y) =>
  values.map((value, index) => (value === null ? null : [x.at(answer.tokens[index]), y.at(value)]));

function crossing(answer, add, box, x) {
  if (answer.crossover_tokens === null) return [];
  // One that lies beyond is told at the edge, by an arrow.
  if (answer.crossover_tokens > x.high) return [box.right];
  const at = x.at(answer.crossover_tokens);
  add(svg("line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.bottom }));
  return [at];
}

/** TTFT of the three paths, the crossover marked. */
export function timesPlan(answer, box) {
  const x = lengths(answer, box);
  const highest = Math.max(...PATHS.flatMap((path) => answer[keyOf(path)].filter((value) => value !== null)));
  const unit = timeUnit(highest);
  const { ticks, end } = fromZero(highest * unit.per, 5);
  const y = linear(0, end / unit.per, box.bottom, box.top);
  const labels = [];
  return {
    label: `${describe(answer)} Arrow keys read it point by point.`,
    hint: "Point at the chart, or focus it and use the arrow keys.",
    x,
    y: {
      scale: y,
      ticks: ticks.map((value) => value / unit.per),
      text: (value) => tick(rounded(value * unit.per)),
      title: `TTFT, ${unit.name}`,
    },
    labels,
    paint: (add) => {
      for (const at of crossing(answer, add, box, x.scale)) {
        const beyond = answer.crossover_tokens > x.scale.high;
        const text = `crossover ${tokens(answer.crossover_tokens)}${beyond ? " →" : ""}`;
        // Beside the mark, or as near to it as the plot's end allows.
        const left = Math.max(box.left + 4, Math.min(at + 7, box.right - text.length * LETTER_PX));
        labels.push({ x: left, y: box.top + 11, kind: "strong", text });
      }
      for (const path of PATHS) {
        add(svg("path", { class: `line ${path}`, d: linePath(pixels(answer, answer[keyOf(path)], x.scale, y)) }));
      }
    },
    stops: answer.tokens.map(x.scale.at),
    read: (index) =>
      `${tokens(answer.tokens[index])}: ` +
      PATHS.map((path) => `${path} ${shown(answer[keyOf(path)][index], seconds)}`).join(" · "),
    points: (index) =>
      PATHS.filter((path) => answer[keyOf(path)][index] !== null).map((path) => [
        path,
        x.scale.at(answer.tokens[index]),
        y.at(answer[keyOf(path)][index]),
      ]),
  };
}

/** The break-even rate, and the link's own. */
export function ratesPlan(answer, box) {
  const x = lengths(answer, box);
  const found = answer.break_even_bytes_per_s.filter((value) => value !== null);
  const own = answer.link_bytes_per_s;
  // Where loading hardly saves anything the rate rises without end: what is far from all others would flatten them.
  const most = MOST_TIMES * Math.max(own, ...(found.length ? [Math.min(...found)] : []));
  const shownRates = answer.break_even_bytes_per_s.map((value) => (value === null || value > most ? null : value));
  const all = [own, ...shownRates.filter((value) => value !== null)].map((value) => value / 1e9);
  const { ticks, low, high } = decades(0.9 * Math.min(...all), 1.1 * Math.max(...all));
  const y = log(low * 1e9, high * 1e9, box.bottom, box.top);
  const labels = [];
  return {
    label:
      `Break-even link rate against prefix length. ${
        found.length
          ? `It is ${rate(found[0])} for the shortest prefix that has one, ${rate(found.at(-1))} for the longest.`
          : "There is none."
      } The link's rate is ` + `${rate(own)}.`,
    hint: "Above the break-even rate loading everything is faster than recomputing everything.",
    x,
    y: {
      scale: y,
      ticks: ticks.map((value) => value * 1e9),
      text: (value) => tick(Number((value / 1e9).toPrecision(2))),
      title: "link rate, GB/s",
    },
    labels,
    paint: (add) => {
      crossing(answer, add, box, x.scale);
      const at = y.at(own);
      add(svg("line", { class: "line link", x1: box.left, x2: box.right, y1: at, y2: at }));
      labels.push({ x: box.right, y: at - 6, end: true, text: `the link: ${rate(own)}` });
      add(svg("path", { class: "line break-even", d: linePath(pixels(answer, shownRates, x.scale, y)) }));
    },
    stops: answer.tokens.map(x.scale.at),
    read: (index) =>
      `${tokens(answer.tokens[index])}: breaks even at ` +
      `${answer.break_even_bytes_per_s[index] === null ? "no rate" : rate(answer.break_even_bytes_per_s[index])}, ` +
      `the link has ${rate(own)}`,
    points: () => [],
  };
}

// Ticks are multiples of a step: what floating point adds to them is not for reading.
const rounded = (value) => Number(value.toPrecision(6));

function describe(answer) {
  const last = answer.tokens.length - 1;
  const ends = PATHS.filter((path) => answer[keyOf(path)][last] !== null)
    .map((path) => `${path} ${seconds(answer[keyOf(path)][last])}`)
    .join(", ");
  const crossover =
    answer.crossover_tokens === null ? "no crossover" : `the crossover is at ${tokens(answer.crossover_tokens)}`;
  return `TTFT against the length of the stored prefix. At ${tokens(answer.tokens[last])}: ${ends}; ${crossover}.`;
}
