// The crossover chart: TTFT of the three paths against prefix length, and the break-even rate below it.

import { Newest } from "./api.js";
import { Chart } from "./chart.js";
import { PATHS, keyOf, ratesPlan, shown, timesPlan } from "./curve_plans.js";
import { byId, el, options, say } from "./dom.js";
import { plain } from "./fields.js";
import { bytes, count, rate, seconds, tokens, typed } from "./format.js";

const START_TOKENS = 12_368;

/** A slider from 0 that grows by factors: 0 stands for none, 1 to 100 for `low` to `high`. */
const growing = (low, high) => (position) => (position === 0 ? 0 : low * (high / low) ** ((position - 1) / 99));
const queueOf = growing(1e7, 1e11);
const busyOf = growing(1e-3, 10);

const words = (executor) => executor.replace("_", "-");
const sentence = (text) =>
  text === "" ? "" : `${text[0].toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;

function nearest(values, wanted) {
  return values.reduce(
    (best, value, index) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? index : best),
    0,
  );
}

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
      (body) =>
        api.post("/v1/curves", body, (wait) => this.note(`The service is busy; asking again in ${seconds(wait)}.`)),
      (answer) => this.show(answer),
      (error) => this.fail(error),
    );
    byId("curves-form").addEventListener("input", (event) => this.changed(event.target));
    byId("curves-form").addEventListener("submit", (event) => event.preventDefault());
    byId("c-own").addEventListener("click", () => {
      byId("c-rate").value = "0";
      this.changed(null);
    });
    byId("c-ask").addEventListener("click", () => ask(this.point()));
    byId("c-numbers").addEventListener("toggle", () => this.table());
  }

  /** What is served; the first deployment and its first tier to begin with. */
  serve(deployments) {
    this.deployments = deployments;
    options(
      byId("c-deployment"),
      deployments.map(({ name }) => [name, name]),
    );
    this.place();
    this.want();
  }

  get deployment() {
    return this.deployments.find(({ name }) => name === byId("c-deployment").value);
  }

  place() {
    const { tiers } = this.deployment;
    options(
      byId("c-tier"),
      Object.keys(tiers).map((tier) => [tier, tier]),
    );
    options(byId("c-executor"), [
      ["", "as deployed"],
      ["bulk", "bulk"],
      ["layered", "layered"],
      ["two_ended", "two-ended"],
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
    say(
      byId("c-about"),
      `${model} on ${machine}; ${tier ? `${tier} over ${tiers[tier]}` : "no tier"}; ` +
        `deployed with the ${words(executor)} executor.`,
    );
    byId("c-own").disabled = supposed === null;
    byId("c-charts").setAttribute("aria-busy", "true");
    this.newest.want({
      deployment: byId("c-deployment").value,
      ...(tier ? { tier } : {}),
      ...(byId("c-executor").value ? { executor: byId("c-executor").value } : {}),
      ...(supposed === null ? {} : { link_bytes_per_s: supposed }),
      suffix_tokens: suffix,
      queued_bytes: queued,
      device_busy_s: busy,
      resident_tokens: held,
      longest_tokens: longest,
      points: 65,
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
      deployment: byId("c-deployment").value,
      executor: byId("c-executor").value,
      prompt_tokens: typeof suffix === "number" ? this.cursor + suffix : this.cursor,
      tier: byId("c-tier").value,
      tokens: this.cursor,
      resident_tokens: resident,
      device_busy_s: busy,
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
    const before = this.answer === null ? "" : " The charts show what was asked before.";
    this.note(`${suffix ? `Suffix, tokens: ${plain(error.message)}` : sentence(error.message)}${before}`, true);
    this.settled();
  }

  show(answer) {
    this.answer = answer;
    byId("c-suffix").removeAttribute("aria-invalid");
    const { crossover_tokens: crossover, crossover_note: why, tier, link } = answer;
    say(byId("c-crossover"), crossover === null ? "none" : tokens(crossover));
    const state = this.deployment?.recurrent ? " A state checkpoint is taken to be stored where the prefix ends." : "";
    this.note(`${sentence(why)} Loading from ${tier} over ${link}, ${words(answer.executor)} executor.${state}`);
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
    say(byId("c-ask"), `Ask about ${tokens(this.cursor)}`);
  }

  table() {
    const { answer } = this;
    if (answer === null || !byId("c-numbers").open) return;
    byId("c-rows").replaceChildren(
      ...answer.tokens.map((length, index) =>
        el(
          "tr",
          {},
          el("th", { scope: "row", text: count(length) }),
          ...PATHS.map((path) => el("td", { text: shown(answer[keyOf(path)][index], seconds) })),
          el("td", { text: shown(answer.break_even_bytes_per_s[index], rate) }),
        ),
      ),
    );
  }
}
