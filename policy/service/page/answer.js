// One answer, as the service gave it: what to do, how long it takes, what else there was, and why.

import { Chart, symbol } from "./chart.js";
import { byId, el, say, svg } from "./dom.js";
import { bytes, rate, seconds, tokens } from "./format.js";
import { linear } from "./scales.js";
import { rows, timelineHeight, timelinePlan } from "./timeline.js";

const PATHS = ["load", "recompute", "split"];
const TITLES = { load: "Load", recompute: "Recompute", split: "Split" };

const swatch = (path) =>
  svg("svg", { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" }, symbol(path, 6, 6.5));

/** Where the band of one path lies on a scale that all of them share. */
function band(estimate, longest, path) {
  const x = linear(0, longest, 1, 199);
  return svg(
    "svg",
    { class: "band", viewBox: "0 0 200 14", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { class: "axis", x1: 1, x2: 199, y1: 7, y2: 7 }),
    svg("rect", {
      class: `range ${path}`,
      x: x.at(estimate.low_s),
      y: 3,
      width: Math.max(2, x.at(estimate.high_s) - x.at(estimate.low_s)),
      height: 8,
    }),
    svg("rect", { class: `mean ${path}`, x: x.at(estimate.ttft_s) - 1, y: 0, width: 2, height: 14 }),
  );
}

function card(path, answer, longest) {
  const estimate = answer.estimates[path];
  const chosen = path === answer.path;
  const head = el(
    "h4",
    {},
    swatch(path),
    el("span", { text: TITLES[path] }),
    chosen ? el("span", { class: "chosen", text: "chosen" }) : null,
  );
  if (estimate === null) {
    return el(
      "li",
      { class: `estimate ${path}` },
      head,
      el("p", { class: "hint", text: answer.unavailable[path] ?? "Not available." }),
    );
  }
  return el(
    "li",
    { class: `estimate ${path} ${chosen ? "is-chosen" : ""}` },
    head,
    el("p", { class: "figure", text: seconds(estimate.ttft_s) }),
    el("p", { class: "hint", text: `${seconds(estimate.low_s)} to ${seconds(estimate.high_s)}` }),
    band(estimate, longest, path),
    el("p", {
      class: "detail",
      text:
        estimate.load_tokens === 0
          ? "loads nothing"
          : `loads ${tokens(estimate.load_tokens)}, ${bytes(estimate.load_bytes)}`,
    }),
    el("p", {
      class: "detail",
      text:
        `copy ${seconds(estimate.transfer_s)}, compute ${seconds(estimate.compute_s)}, ` +
        `exposed ${seconds(estimate.exposed_s)}`,
    }),
  );
}

function headline(answer) {
  const from = [...new Set(answer.load.map((segment) => segment.tier))].join(" and ");
  if (answer.path === "recompute") return `Recompute ${tokens(answer.recompute_tokens)}`;
  const joined = answer.joined ? `; ${tokens(answer.joined_tokens)} come with a load in flight` : "";
  const rest = `${tokens(answer.recompute_tokens)} recomputed`;
  return `${TITLES[answer.path]}: ${tokens(answer.load_tokens)} from ${from}, ${rest}${joined}`;
}

const fact = (name, value, note) =>
  el(
    "div",
    {},
    el("dt", { text: name }),
    el("dd", { text: value }),
    note ? el("dd", { class: "hint", text: note }) : null,
  );

function facts(answer) {
  const estimate = answer.estimates[answer.path];
  const { crossover_tokens: crossover, break_even_bytes_per_s: even } = answer;
  return [
    fact("TTFT", seconds(answer.ttft_s), estimate ? `${seconds(estimate.low_s)} to ${seconds(estimate.high_s)}` : null),
    fact("Exposed", seconds(answer.exposed_s), "TTFT beyond what compute alone takes"),
    fact("Crossover", crossover === null ? "none" : tokens(crossover), answer.crossover_note),
    fact("Break-even rate", even === null ? "none" : rate(even), answer.break_even_note),
    ...(answer.device_busy_s > 0 ? [fact("Device busy", seconds(answer.device_busy_s), "before this request")] : []),
    ...(answer.meets_slo === null ? [] : [fact("TTFT objective", answer.meets_slo ? "met" : "missed")]),
  ];
}

export class Answer {
  constructor() {
    this.chart = new Chart(byId("timeline"), byId("timeline-readout"), { left: 8, right: 12, top: 14, bottom: 44 });
  }

  get shown() {
    return !byId("answer").hidden;
  }

  show(answer) {
    byId("answer").hidden = false;
    byId("answer-empty").hidden = true;
    byId("answer-path").replaceChildren(swatch(answer.path), el("span", { text: headline(answer) }));
    say(byId("answer-reason"), answer.reason);
    byId("answer-facts").replaceChildren(...facts(answer));
    const longest = Math.max(...PATHS.map((path) => answer.estimates[path]?.high_s ?? 0));
    byId("answer-estimates").replaceChildren(...PATHS.map((path) => card(path, answer, longest)));
    byId("answer-notes").replaceChildren(...answer.notes.map((text) => el("li", { text })));
    byId("answer-notes").hidden = answer.notes.length === 0;
    say(
      byId("answer-calibrated"),
      answer.calibrated ? "Calibrated on this machine." : "Not calibrated on this machine.",
    );
    byId("answer-parameters").replaceChildren(
      ...Object.entries(answer.parameters_from).map(([name, { source, text }]) =>
        el("li", {}, el("code", { text: name }), el("span", { class: "source", text: source }), el("p", { text })),
      ),
    );
    byId("timeline").style.height = `${timelineHeight(rows(answer.timeline))}px`;
    byId("legend-front").hidden = answer.timeline.computes.every(({ part }) => part !== "front");
    byId("legend-busy").hidden = answer.timeline.link_queue_s <= 0 && answer.timeline.device_busy_s <= 0;
    this.chart.index = null;
    this.chart.draw(timelinePlan(answer.timeline));
    say(byId("answer-said"), `${headline(answer)}. TTFT ${seconds(answer.ttft_s)}. ${answer.reason}`);
  }
}
