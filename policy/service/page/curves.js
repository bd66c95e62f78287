// The crossover chart: TTFT of the three paths against prefix length, and the break-even rate below it.

import { Newest } from "./api.js";
import { Chart, linePath } from "./chart.js";
import { byId, el, options, say, svg } from "./dom.js";
import { bytes, rate, seconds, tick, timeUnit, tokens, count, typed } from "./format.js";
import { decades, fromZero, linear, log, tokenTicks } from "./scales.js";

const PATHS = ["recompute", "load", "split"];
const START_TOKENS = 12_368;
const MOST_TIMES = 20;

/** A slider from 0 that grows by factors: 0 stands for none, 1 to 100 for `low` to `high`. */
const growing = (low, high) => (position) => position === 0 ? 0 : low * (high / low) ** ((position - 1) / 99);
const queueOf = growing(1e7, 1e11);
const busyOf = growing(1e-3, 10);

const words = (executor) => executor.replace("_", "-");
const keyOf = (path) => `${path}_ttft_s`;

export class Curves {
  constructor(api, ask) {
    this.api = api;
    this.answer = null;
    this.cursor = START_TOKENS;
    this.times = new Chart(byId("c-times"), byId("c-readout"));
    this.rates = new Chart(byId("c-rates"), byId("c-rates-readout"));
    this.times.onmove = (index) => this.moved(index, this.rates);
    this.rates.onmove = (index) => this.moved(index, this.times);
    this.newest = new Newest(
      (body) => api.post("/v1/curves", body, (wait) => this.note(`The service is busy; asking again in ${seconds(wait)}.`)),
      (answer) => this.show(answer),
      (error) => this.fail(error),
    );
    byId("curves-form").addEventListener("input", (event) => this.changed(event.target));
    byId("curves-form").addEventListener("submit", (event) => event.preventDefault());
    byId("c-own").addEventListener("click", () => { byId("c-rate").value = "0"; this.changed(null); });
    byId("c-ask").addEventListener("click", () => ask(this.point()));
    byId("c-numbers").addEventListener("toggle", () => this.table());
  }

  /** What is served; the first deployment and its first tier to begin with. */
  serve(deployments) {
    this.deployments = deployments;
    options(byId("c-deployment"), deployments.map(({ name }) => [name, name]));
    this.place();
    this.want();
  }

  get deployment() {
    return this.deployments.find(({ name }) => name === byId("c-deployment").value);
  }

  place() {
    const { tiers } = this.deployment;
    options(byId("c-tier"), Object.keys(tiers).map((tier) => [tier, tier]));
    options(byId("c-executor"), [
      ["", "as deployed"], ["bulk", "bulk"], ["layered", "layered"], ["two_ended", "two-ended"],
    ]);
  }

  /** The link's rate as the service decides by it. */
  get ownRate() {
    const { tiers, links } = this.deployment;
    return links[tiers[byId("c-tier").value]]?.rate_bytes_per_s ?? null;
  }

  get settings() {
    const position = (id) => Number(byId(id).value);
    const own = this.ownRate;
    return {
      longest: Number(byId("c-longest").value),
      suffix: typed(byId("c-suffix").value),
      // In the middle nothing is supposed: the machine's own price of copies holds, number and size of them included.
      rate: position("c-rate") === 0 || own === null ? null : own * 10 ** (position("c-rate") / 100),
      queued: queueOf(position("c-queue")),
      busy: busyOf(position("c-busy")),
      resident: position("c-resident"),
    };
  }

  changed(target) {
    if (!this.deployments) return;
    if (target?.id === "c-deployment") this.place();
    if (target?.id === "c-deployment" || target?.id === "c-tier") byId("c-rate").value = "0";
    this.want();
  }

  want() {
    const resident = byId("c-resident");
    resident.max = String(Number(byId("c-longest").value) / 2);
    resident.step = String(Number(byId("c-longest").value) / 128);
    const { longest, suffix, rate: supposed, queued, busy, resident: held } = this.settings;
    const own = this.ownRate;
    this.read("c-rate", supposed === null ? `${own === null ? "none" : rate(own)}, the machine's` : rate(supposed));
    this.read("c-queue", queued === 0 ? "nothing" : bytes(queued));
    this.read("c-busy", busy === 0 ? "idle" : seconds(busy));
    this.read("c-resident", tokens(held));
    const { model, machine, tiers, executor } = this.deployment;
    const tier = byId("c-tier").value;
    say(byId("c-about"), `${model} on ${machine}; ${tier ? `${tier} over ${tiers[tier]}` : "no tier"}; deployed with the ${words(executor)} executor.`);
    byId("c-own").disabled = supposed === null;
    byId("c-charts").setAttribute("aria-busy", "true");
    this.newest.want({
      deployment: byId("c-deployment").value,
      ...(tier ? { tier } : {}),
      ...(byId("c-executor").value ? { executor: byId("c-executor").value } : {}),
      ...(supposed === null ? {} : { link_bytes_per_s: supposed }),
      suffix_tokens: suffix, queued_bytes: queued, device_busy_s: busy, resident_tokens: held,
      longest_tokens: longest, points: 65,
    });
  }

  read(id, text) {
    byId(id).setAttribute("aria-valuetext", text);
    say(byId(`${id}-readout`), text);
  }

  /** The request at the cursor, in the form's own terms. */
  point() {
    const { suffix, rate: supposed, queued, busy, resident } = this.settings;
    const link = this.answer?.link;
    return {
      deployment: byId("c-deployment").value, executor: byId("c-executor").value,
      prompt_tokens: typeof suffix === "number" ? this.cursor + suffix : this.cursor,
      tier: byId("c-tier").value, tokens: this.cursor, resident_tokens: resident, device_busy_s: busy,
      queued: link === undefined ? {} : { [link]: queued },
      rates: link === undefined || supposed === null ? {} : { [link]: supposed },
    };
  }

  /** Nothing is on its way any more, unless something else was wished for meanwhile. */
  settled() {
    if (this.newest.wish === null) byId("c-charts").setAttribute("aria-busy", "false");
  }

  note(text, wrong = false) {
    say(byId("c-note"), text);
    byId("c-note").classList.toggle("wrong", wrong);
  }

  fail(error) {
    const suffix = error.pointer === "/suffix_tokens";
    byId("c-suffix").setAttribute("aria-invalid", String(suffix));
    this.note(suffix ? `Suffix, tokens: ${error.message}` : error.message, true);
    this.settled();
  }

  show(answer) {
    this.answer = answer;
    byId("c-suffix").removeAttribute("aria-invalid");
    const { crossover_tokens: crossover, crossover_note: why, tier, link } = answer;
    say(byId("c-crossover"), crossover === null ? "none" : tokens(crossover));
    this.note(`${sentence(why)} Loading from ${tier} over ${link}, ${words(answer.executor)} executor.`);
    const index = nearest(answer.tokens, this.cursor);
    this.times.index = index;
    this.rates.index = index;
    this.times.draw((box) => timesPlan(answer, box));
    this.rates.draw((box) => ratesPlan(answer, box));
    byId("c-ask").disabled = false;
    this.name(index);
    this.table();
    this.settled();
  }

  moved(index, other) {
    if (index === null) return;
    this.cursor = this.answer.tokens[index];
    this.name(index);
    other.move(index);
  }

  name(index) {
    this.cursor = this.answer.tokens[index];
    say(byId("c-ask"), `Ask about a prefix of ${tokens(this.cursor)}`);
  }

  table() {
    const { answer } = this;
    if (answer === null || !byId("c-numbers").open) return;
    byId("c-rows").replaceChildren(...answer.tokens.map((length, index) => el("tr", {},
      el("th", { scope: "row", text: count(length) }),
      ...PATHS.map((path) => el("td", { text: shown(answer[keyOf(path)][index], seconds) })),
      el("td", { text: shown(answer.break_even_bytes_per_s[index], rate) }))));
  }
}

const shown = (value, format) => value === null ? "–" : format(value);
const sentence = (text) => text === "" ? "" : `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
const narrow = (box) => box.width < 500;

function nearest(values, wanted) {
  return values.reduce((best, value, index) =>
    Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? index : best, 0);
}

function lengths(answer, box) {
  const scale = linear(0, answer.tokens.at(-1), box.left, box.right);
  return { scale, ticks: tokenTicks(scale.high, narrow(box) ? 4 : 8), text: count, title: "stored prefix, tokens" };
}

/** Pixels of a series, null where it has no value. */
const pixels = (answer, values, x, y) =>
  values.map((value, index) => value === null ? null : [x.at(answer.tokens[index]), y.at(value)]);

function crossing(answer, add, box, x) {
  if (answer.crossover_tokens === null || answer.crossover_tokens > x.high) return [];
  const at = x.at(answer.crossover_tokens);
  add(svg("line", { class: "mark", x1: at, x2: at, y1: box.top, y2: box.bottom }));
  return [at];
}

function timesPlan(answer, box) {
  const x = lengths(answer, box);
  const highest = Math.max(...PATHS.flatMap((path) => answer[keyOf(path)].filter((value) => value !== null)));
  const unit = timeUnit(highest);
  const { ticks, end } = fromZero(highest * unit.per, 5);
  const y = linear(0, end / unit.per, box.bottom, box.top);
  const labels = [];
  return {
    label: `${describe(answer)} Arrow keys read it point by point.`,
    hint: "Point at the chart, or focus it and use the arrow keys.",
    x, y: { scale: y, ticks: ticks.map((value) => value / unit.per), text: (value) => tick(rounded(value * unit.per)), title: `TTFT, ${unit.name}` },
    labels,
    paint: (add) => {
      for (const at of crossing(answer, add, box, x.scale)) {
        const end = at > (box.left + box.right) / 2;
        labels.push({ x: at + (end ? -7 : 7), y: box.top + 11, end, kind: "strong", text: `crossover ${tokens(answer.crossover_tokens)}` });
      }
      for (const path of PATHS) {
        add(svg("path", { class: `line ${path}`, d: linePath(pixels(answer, answer[keyOf(path)], x.scale, y)) }));
      }
    },
    stops: answer.tokens.map(x.scale.at),
    read: (index) => `${tokens(answer.tokens[index])}: ` + PATHS.map((path) =>
      `${path} ${shown(answer[keyOf(path)][index], seconds)}`).join(" · "),
    points: (index) => PATHS.filter((path) => answer[keyOf(path)][index] !== null).map((path) =>
      [path, x.scale.at(answer.tokens[index]), y.at(answer[keyOf(path)][index])]),
  };
}

function ratesPlan(answer, box) {
  const x = lengths(answer, box);
  const found = answer.break_even_bytes_per_s.filter((value) => value !== null);
  const own = answer.link_bytes_per_s;
  // Where loading hardly saves anything the rate rises without end: what is far from all others would flatten them.
  const most = MOST_TIMES * Math.max(own, ...(found.length ? [Math.min(...found)] : []));
  const shownRates = answer.break_even_bytes_per_s.map((value) => value === null || value > most ? null : value);
  const all = [own, ...shownRates.filter((value) => value !== null)].map((value) => value / 1e9);
  const { ticks, low, high } = decades(0.9 * Math.min(...all), 1.1 * Math.max(...all));
  const y = log(low * 1e9, high * 1e9, box.bottom, box.top);
  const labels = [];
  return {
    label: `Break-even link rate against prefix length. ${found.length ? `It is ${rate(found[0])} for the shortest ` +
      `prefix that has one, ${rate(found.at(-1))} for the longest.` : "There is none."} The link's rate is ` +
      `${rate(own)}.`,
    hint: "Above the break-even rate loading everything is faster than recomputing everything.",
    x, y: { scale: y, ticks: ticks.map((value) => value * 1e9), text: (value) => tick(Number((value / 1e9).toPrecision(2))), title: "link rate, GB/s" },
    labels,
    paint: (add) => {
      crossing(answer, add, box, x.scale);
      const at = y.at(own);
      add(svg("line", { class: "line link", x1: box.left, x2: box.right, y1: at, y2: at }));
      labels.push({ x: box.right, y: at - 6, end: true, text: `the link: ${rate(own)}` });
      add(svg("path", { class: "line break-even", d: linePath(pixels(answer, shownRates, x.scale, y)) }));
    },
    stops: answer.tokens.map(x.scale.at),
    read: (index) => `${tokens(answer.tokens[index])}: breaks even at ${shown(answer.break_even_bytes_per_s[index], rate)}, ` +
      `the link has ${rate(own)}`,
    points: () => [],
  };
}

// Ticks are multiples of a step: what floating point adds to them is not for reading.
const rounded = (value) => Number(value.toPrecision(6));

function describe(answer) {
  const last = answer.tokens.length - 1;
  const ends = PATHS.filter((path) => answer[keyOf(path)][last] !== null)
    .map((path) => `${path} ${seconds(answer[keyOf(path)][last])}`).join(", ");
  const crossover = answer.crossover_tokens === null ? "no crossover" : `the crossover is at ${tokens(answer.crossover_tokens)}`;
  return `TTFT against the length of the stored prefix. At ${tokens(answer.tokens[last])}: ${ends}; ${crossover}.`;
}
