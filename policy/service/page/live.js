// What the service does now: asked once a second, and only while somebody can see it.

import { Gone, Problem } from "./api.js";
import { Chart, linePath, symbol } from "./chart.js";
import { byId, el, options, say, svg } from "./dom.js";
import { Example } from "./example.js";
import { age, bytes, clock, count, percent, seconds, tick } from "./format.js";
import { History, PATHS, WINDOW_S } from "./history.js";
import { decades, fromZero, linear, log } from "./scales.js";

const EVERY_MS = 1000;
const AFTER_REFUSAL_MS = 5000;
const MOST_LINKS = 12;
const GAP_S = 3;

export class Live {
  /** `refresh` is called where the service turns out to serve other deployments than the page knows. */
  constructor(api, refresh) {
    this.api = api;
    this.refresh = refresh;
    this.history = new History();
    this.example = new Example(api);
    this.snapshot = null;
    this.onScreen = false;
    this.timer = null;
    this.rates = new Chart(byId("l-rates"), byId("l-rates-readout"));
    this.scores = new Chart(byId("l-scores"), byId("l-scores-readout"));
    new IntersectionObserver(([entry]) => {
      this.onScreen = entry.isIntersecting;
      this.#next(0);
    }, { rootMargin: "100px" }).observe(byId("live"));
    document.addEventListener("visibilitychange", () => this.#next(0));
    api.addEventListener("back", () => this.#next(0));
    byId("l-deployment").addEventListener("change", () => this.#paint());
  }

  serve(deployments) {
    this.known = new Set(deployments.map(({ name }) => name));
    options(byId("l-deployment"), [["", "all deployments"], ...deployments.map(({ name }) => [name, name])]);
    this.example.serve(deployments);
    this.#next(0);
  }

  get #wanted() {
    return this.known !== undefined && this.onScreen && !document.hidden && !this.api.gone;
  }

  #next(after_ms) {
    clearTimeout(this.timer);
    if (!this.#wanted || this.asking) return;
    this.timer = setTimeout(() => this.#ask(), after_ms);
  }

  async #ask() {
    this.asking = true;
    const began = performance.now();
    let live = null;
    try {
      live = await this.api.get("/v1/live");
    } catch (error) {
      // That it is gone is said by the page's own word about it.
      say(byId("l-note"), error instanceof Gone ? "" : error.message);
      // Without a token nothing is asked until one is given; when it is gone, `back` takes it up again.
      if (!(error instanceof Problem)) return;
    } finally {
      this.asking = false;
    }
    if (live !== null) this.#take(live);
    this.#next(Math.max(0, (live === null ? AFTER_REFUSAL_MS : EVERY_MS) - (performance.now() - began)));
  }

  #take(live) {
    this.snapshot = live;
    this.history.add(live);
    say(byId("l-note"), "");
    const names = live.deployments.map(({ name }) => name);
    if (names.length !== this.known.size || names.some((name) => !this.known.has(name))) this.refresh();
    this.#paint();
  }

  #paint() {
    const live = this.snapshot;
    if (live === null) return;
    const name = byId("l-deployment").value;
    const mine = (each) => name === "" || each.deployment === name;
    const made = live.deployments.filter((each) => name === "" || each.name === name);
    const total = (path) => made.reduce((sum, { decisions }) => sum + decisions[path], 0);
    const rates = this.history.rates(name);
    const now = rates.slice(-5);
    for (const path of PATHS) {
      const long = now.reduce((sum, each) => sum + each.at_s - each.from_s, 0);
      const mean = long === 0 ? 0 : now.reduce((sum, each) => sum + each[path] * (each.at_s - each.from_s), 0) / long;
      say(byId(`l-now-${path}`), mean === 0 ? "0" : mean < 9.95 ? mean.toFixed(1) : count(mean));
      say(byId(`l-total-${path}`), `${count(total(path))} in all`);
    }
    const quiet = PATHS.every((path) => total(path) === 0);
    byId("l-rates-empty").hidden = !quiet;
    this.rates.draw((box) => ratesPlan(rates, live.at_s, quiet, box));
    const scored = live.requests.filter(mine);
    byId("l-scores-empty").hidden = scored.length > 0;
    this.scores.draw((box) => scoresPlan(scored, box));
    this.#links(live.links);
    this.#calibrations(made, live.reservations);
    this.#refused(live.refused.filter((each) => mine(each) || each.deployment === null), live.at_s);
  }

  #links(links) {
    const sorted = [...links].sort((one, other) => other.longest_s - one.longest_s || other.queued_bytes - one.queued_bytes || one.link.localeCompare(other.link));
    const longest = Math.max(1e-3, ...links.map((each) => each.longest_s));
    byId("l-links").replaceChildren(...sorted.slice(0, MOST_LINKS).map((each) => el("tr", {},
      el("th", { scope: "row" }, el("span", { text: each.link }), el("span", { class: "hint", text: ` ${each.scope}` }),
        each.left_alone ? el("span", { class: "alone", text: "left alone: loads keep failing" }) : null),
      el("td", { class: "number", text: bytes(each.queued_bytes) }),
      el("td", { class: "number", text: seconds(each.queued_s) }),
      el("td", { class: "number", text: seconds(each.longest_s) }),
      el("td", { class: "bar" }, svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
        svg("rect", { class: "range load", width: (100 * each.longest_s) / longest, height: 8 }))))));
    const left = links.length - MOST_LINKS;
    say(byId("l-links-more"), left > 0 ? `and ${count(left)} more, with shorter queues` : "");
  }

  #calibrations(made, reservations) {
    say(byId("l-reservations"), `${count(reservations)} ${reservations === 1 ? "reservation" : "reservations"} held`);
    byId("l-profile").hidden = made.every(({ calibration }) => calibration.source !== "profile");
    byId("l-calibrations").replaceChildren(...made.map(({ name, calibration }) => el("tr", {},
      el("th", { scope: "row", text: name }),
      el("td", { text: calibration.source }),
      el("td", { class: "number", text: calibration.age_s === null ? "–" : age(calibration.age_s) }),
      el("td", { class: "number", text: count(calibration.observations) }))));
  }

  #refused(refused, now) {
    byId("l-refused-empty").hidden = refused.length > 0;
    byId("l-refused").replaceChildren(...[...refused].reverse().map((each) => el("li", {},
      el("p", {}, el("time", { datetime: new Date(each.at_s * 1e3).toISOString(), title: clock(each.at_s), text: `${age(now - each.at_s)} ago` }),
        el("span", { class: "where", text: `${each.deployment ?? "no deployment"}, record ${each.index}, ${each.field}` })),
      el("p", { class: "why", text: each.reason }))));
  }
}

function ratesPlan(rates, now, quiet, box) {
  const x = linear(-WINDOW_S, 0, box.left, box.right);
  const highest = Math.max(...rates.flatMap((each) => PATHS.map((path) => each[path])), 1);
  const { ticks, end } = fromZero(highest, 4);
  const y = linear(0, end, box.bottom, box.top);
  const at = (each) => Math.max(box.left, x.at(each.at_s - now));
  // Over a time in which nothing was asked only the mean is known: a level line, apart from the others.
  const points = (each, path) => each.at_s - each.from_s < GAP_S ? [[at(each), y.at(each[path])]] :
    [null, [Math.max(box.left, x.at(each.from_s - now)), y.at(each[path])], [at(each), y.at(each[path])]];
  const latest = rates.at(-1);
  const told = (each) => PATHS.map((path) => `${path} ${each[path] < 9.95 ? each[path].toFixed(1) : count(each[path])}`).join(" · ");
  return {
    label: `Decisions per second by path over the last two minutes. ${latest ? `Now: ${told(latest)}.` : "No difference seen yet."}`,
    hint: quiet ? "" : rates.length === 0 ? "The first difference comes with the second answer." : "Point at a second to read it.",
    x: { scale: x, ticks: [-120, -90, -60, -30, 0], text: (value) => value === 0 ? "now" : String(-value), title: "seconds ago" },
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

function scoresPlan(scored, box) {
  const all = scored.flatMap((each) => [each.predicted_ttft_s, each.ttft_s]).map((value) => Math.max(value, 1e-7) * 1e3);
  const { ticks, low, high } = decades(...(all.length ? [0.95 * Math.min(...all), 1.05 * Math.max(...all)] : [10, 1000]));
  const x = log(low / 1e3, high / 1e3, box.left, box.right);
  const y = log(low / 1e3, high / 1e3, box.bottom, box.top);
  const spare = box.width < 500 && ticks.length > 5 ? ticks.filter((value) => Number.isInteger(Math.log10(value))) : ticks;
  const axis = (scale, title, shown) => ({ scale, ticks: shown.map((value) => value / 1e3), text: (value) => tick(Number((value * 1e3).toPrecision(3))), title });
  const sorted = [...scored].sort((one, other) => one.predicted_ttft_s - other.predicted_ttft_s);
  const error = scored.length ? median(scored.map((each) => Math.abs(each.predicted_ttft_s - each.ttft_s) / each.ttft_s)) : null;
  const told = error === null ? "" : `Median error ${percent(error)} over the last ${count(scored.length)} followed decisions.`;
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
      return `${each.deployment}, ${each.path}: predicted ${seconds(each.predicted_ttft_s)}, was ${seconds(each.ttft_s)} ` +
        `(${percent(each.predicted_ttft_s / each.ttft_s - 1)})`;
    },
    points: (index) => [[sorted[index].path, x.at(sorted[index].predicted_ttft_s), y.at(sorted[index].ttft_s)]],
  };
}
