// What the service does now: asked once a second, and only while somebody can see it.

import { Gone, Problem } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el, options, say, svg } from "./dom.js";
import { Example } from "./example.js";
import { age, bytes, clock, count, seconds } from "./format.js";
import { History, PATHS } from "./history.js";
import { perSecond, ratesPlan, scoresPlan } from "./live_plans.js";

const EVERY_MS = 1000;
const AFTER_REFUSAL_MS = 5000;
const MOST_LINKS = 12;

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
    new IntersectionObserver(
      ([entry]) => {
        this.onScreen = entry.isIntersecting;
        this.#next(0);
      },
      { rootMargin: "100px" },
    ).observe(byId("live"));
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
      say(byId(`l-now-${path}`), perSecond(mean));
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
    this.#refused(
      live.refused.filter((each) => mine(each) || each.deployment === null),
      live.at_s,
    );
  }

  #links(links) {
    // Those with the longest queues where there are many, but always in one order: rows do not change places.
    const name = (each) => `${each.link} ${each.scope}`;
    const told = [...links]
      .sort((one, other) => other.longest_s - one.longest_s || name(one).localeCompare(name(other)))
      .slice(0, MOST_LINKS)
      .sort((one, other) => name(one).localeCompare(name(other)));
    const longest = Math.max(1e-3, ...links.map((each) => each.longest_s));
    byId("l-links").replaceChildren(
      ...told.map((each) =>
        el(
          "tr",
          {},
          el(
            "th",
            { scope: "row" },
            el("span", { text: each.link }),
            el("span", { class: "hint", text: ` ${each.scope}` }),
            each.left_alone ? el("span", { class: "alone", text: "left alone: loads keep failing" }) : null,
          ),
          el("td", { class: "number", text: bytes(each.queued_bytes) }),
          el("td", { class: "number", text: seconds(each.queued_s) }),
          el("td", { class: "number", text: seconds(each.longest_s) }),
          el(
            "td",
            { class: "bar" },
            svg(
              "svg",
              { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
              svg("rect", { class: "range load", width: (100 * each.longest_s) / longest, height: 8 }),
            ),
          ),
        ),
      ),
    );
    const left = links.length - MOST_LINKS;
    say(byId("l-links-more"), left > 0 ? `and ${count(left)} more, with shorter queues` : "");
  }

  #calibrations(made, reservations) {
    say(
      byId("l-reservations"),
      `${count(reservations)} ${reservations === 1 ? "reservation" : "reservations"} held. A queue holds what is booked and what was reported.`,
    );
    byId("l-profile").hidden = made.every(({ calibration }) => calibration.source !== "profile");
    byId("l-calibrations").replaceChildren(
      ...made.map(({ name, calibration }) =>
        el(
          "tr",
          {},
          el("th", { scope: "row", text: name }),
          el("td", { text: calibration.source }),
          el("td", { class: "number", text: calibration.age_s === null ? "–" : age(calibration.age_s) }),
          el("td", { class: "number", text: count(calibration.observations) }),
        ),
      ),
    );
  }

  #refused(refused, now) {
    byId("l-refused-empty").hidden = refused.length > 0;
    const newestFirst = [...refused].reverse();
    // Built anew only where it changed, so that a reason can be selected; ages go on.
    const told = JSON.stringify(newestFirst);
    if (told === this.toldRefused) {
      const times = byId("l-refused").querySelectorAll("time");
      newestFirst.forEach((each, place) => say(times[place], `${age(now - each.at_s)} ago`));
      return;
    }
    this.toldRefused = told;
    byId("l-refused").replaceChildren(
      ...newestFirst.map((each) =>
        el(
          "li",
          {},
          el(
            "p",
            {},
            el("time", {
              datetime: new Date(each.at_s * 1e3).toISOString(),
              title: clock(each.at_s),
              text: `${age(now - each.at_s)} ago`,
            }),
            el(
              "span",
              { class: "where" },
              each.deployment === null ? "unknown deployment" : el("bdi", { text: each.deployment }),
              `, record ${each.index}, `,
              el("bdi", { text: each.field }),
            ),
          ),
          el("p", { class: "why", text: each.reason }),
        ),
      ),
    );
  }
}
