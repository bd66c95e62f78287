// The form: every field of a request, and what would become of it. Nothing is judged here; the service judges, and
// what it refuses is said at the field.

import { Answer } from "./answer.js";
import { Gone } from "./api.js";
import { byId, el, options, say } from "./dom.js";
import { clearErrors, escaped, field, showError } from "./fields.js";
import { count, rate, seconds, typed } from "./format.js";

const GB = 1e9;
const MS = 1e-3;
const HITS = [
  ["hit", "hit"],
  ["pending", "pending (being written)"],
  ["miss", "miss"],
];
const OBJECTIVES = [
  ["ttft", "TTFT"],
  ["device_time", "device time"],
  ["blend", "blend of both"],
];
const START = { prompt_tokens: 12_370, tokens: 12_368 };

const BEFORE = "The answer shown is of the request before.";

const number = { inputmode: "decimal" };
const whole = { inputmode: "numeric" };

/** A number typed in another unit than the request's; what is no number goes as it is, to be refused. */
function scaled(text, by) {
  const value = typed(text);
  return typeof value === "number" ? value * by : value;
}

/** "12,368" is one number; "12,368; 12,352" a list of them, one a rank. */
function several(text) {
  return text.includes(";") ? text.split(";").map((part) => typed(part)) : typed(text);
}

export class WhatIf {
  constructor(api) {
    this.api = api;
    this.form = byId("ask-form");
    this.answer = new Answer();
    this.asked = 0;
    this.#build();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.form.addEventListener("input", () => {
      if (this.answer.shown) this.#say("Changed since the answer.");
    });
    this.control("/deployment").addEventListener("change", () => this.#place());
    byId("hit-add").addEventListener("click", () => this.#addHit().querySelector("select").focus());
  }

  #build() {
    byId("f-request").append(
      field({
        pointer: "/prompt_tokens",
        label: "Prompt, tokens",
        value: count(START.prompt_tokens),
        required: true,
        ...whole,
      }),
      field({
        pointer: "/resident_tokens",
        label: "Resident, tokens",
        hint: "Already in the device's KV.",
        placeholder: "0",
        ...whole,
      }),
      field({ pointer: "/deployment", label: "Deployment", choices: [] }),
      field({
        pointer: "/executor",
        label: "Executor",
        choices: [
          ["", "as deployed"],
          ["bulk", "bulk"],
          ["layered", "layered"],
          ["two_ended", "two-ended"],
        ],
      }),
    );
    byId("f-state").append(
      field({
        pointer: "/state/device_busy_s",
        label: "Device busy, ms",
        hint: "Left empty: what the ledger holds.",
        "data-by": MS,
        ...number,
      }),
      field({ pointer: "/state/queued_prefill_tokens", label: "Queued, tokens", ...whole }),
      field({ pointer: "/state/num_requests_waiting", label: "Requests waiting", ...whole }),
      field({ pointer: "/state/num_requests_running", label: "Requests running", ...whole }),
    );
    byId("f-more").append(
      field({ pointer: "/objective", label: "Objective", choices: OBJECTIVES }),
      field({ pointer: "/ttft_slo_s", label: "TTFT objective, ms", "data-by": MS, ...number }),
      field({
        pointer: "/load_unit_tokens",
        label: "Load unit, tokens",
        hint: "Left empty: the deployment's.",
        ...whole,
      }),
      field({ pointer: "/instance", label: "Instance" }),
      field({ pointer: "/node", label: "Node" }),
      field({ pointer: "/prefix_id", label: "Prefix id", hint: "An equal load in flight may be joined." }),
    );
  }

  control(pointer) {
    return this.form.querySelector(`[data-pointer="${CSS.escape(pointer)}"]`);
  }

  /** What is served; what was said before of another service, or of one that did not answer, holds no longer. */
  serve(deployments) {
    const other = this.deployments && JSON.stringify(this.deployments) !== JSON.stringify(deployments);
    if (this.answer.shown && other) this.#say("The service decides by something else since the answer.");
    else if (this.unheard) this.#say("");
    this.unheard = false;
    this.deployments = deployments;
    options(
      this.control("/deployment"),
      deployments.map(({ name }) => [name, name]),
    );
    this.#place();
  }

  /** Tiers and links of the deployment chosen, and one row of hits to begin with. */
  #place() {
    const { tiers, links, recurrent } = this.deployments.find(({ name }) => name === this.control("/deployment").value);
    // What was typed stays where there is nothing else to type it for.
    const placed = JSON.stringify([tiers, links, recurrent]);
    if (placed === this.placed && byId("hits").childElementCount > 0) return;
    this.placed = placed;
    this.tiers = Object.keys(tiers);
    this.recurrent = recurrent;
    const rows = [...byId("hits").children];
    for (const row of rows)
      options(
        row.querySelector("select"),
        this.tiers.map((tier) => [tier, tier]),
      );
    if (rows.length === 0 && this.tiers.length > 0) this.#addHit(count(START.tokens));
    for (const row of rows) this.#checkpoints(row);
    byId("f-links").replaceChildren(
      ...Object.entries(links).map(([name, link]) =>
        el(
          "div",
          { class: "link-row" },
          el("p", { class: "link-name", text: name }),
          field({
            pointer: `/state/links/${escaped(name)}/queued_bytes`,
            label: "Queued, GB",
            "data-by": GB,
            "data-link": name,
            ...number,
          }),
          field({
            pointer: `/link_bytes_per_s/${escaped(name)}`,
            label: "Suppose, GB/s",
            "data-by": GB,
            "data-link": name,
            placeholder: rate(link.rate_bytes_per_s).replace(" GB/s", ""),
            ...number,
          }),
        ),
      ),
    );
  }

  #addHit(tokens = "") {
    const taken = [...byId("hits").querySelectorAll("select[data-part=tier]")].map((select) => select.value);
    const row = el(
      "li",
      { class: "hit" },
      field({ pointer: "tier", label: "Tier", choices: this.tiers.map((tier) => [tier, tier]), "data-part": "tier" }),
      field({ pointer: "tokens", label: "Stored, tokens", value: tokens, "data-part": "tokens", ...whole }),
      field({ pointer: "state", label: "State", choices: HITS, "data-part": "state" }),
      field({
        pointer: "state_checkpoints",
        label: "State checkpoints",
        placeholder: "none",
        "data-part": "state_checkpoints",
        ...whole,
      }),
      el("button", {
        type: "button",
        class: "quiet",
        text: "Remove",
        onclick: () => {
          row.remove();
          this.#number();
          byId("hit-add").focus();
        },
      }),
    );
    byId("hits").append(row);
    const free = this.tiers.find((tier) => !taken.includes(tier));
    if (free !== undefined) row.querySelector("select").value = free;
    this.#number();
    this.#checkpoints(row);
    return row;
  }

  /** Only loads of a recurrent model need a checkpoint: where nothing else is said, there is one at the end. */
  #checkpoints(row) {
    const control = row.querySelector("[data-part=state_checkpoints]");
    control.closest(".field").hidden = !this.recurrent;
    if (this.recurrent && control.value === "") control.value = row.querySelector("[data-part=tokens]").value;
  }

  #number() {
    [...byId("hits").children].forEach((row, index) => {
      for (const control of row.querySelectorAll("[data-part]")) {
        control.dataset.pointer = `/hits/${index}/${control.dataset.part}`;
      }
      row.querySelector("button").setAttribute("aria-label", `Remove hit ${index + 1}`);
    });
  }

  #hits() {
    return [...byId("hits").children].map((row) => {
      const part = (name) => row.querySelector(`[data-part=${name}]`).value.trim();
      const hit = { tier: part("tier"), tokens: several(part("tokens")), state: part("state") };
      const checkpoints = part("state_checkpoints");
      if (this.recurrent && checkpoints !== "") hit.state_checkpoints = checkpoints.split(";").map((each) => typed(each));
      return hit;
    });
  }

  /** What is asked: what was left empty is left out. */
  body() {
    const text = (pointer) => this.control(pointer).value.trim();
    const body = { prompt_tokens: typed(text("/prompt_tokens")), deployment: text("/deployment"), hits: this.#hits() };
    const put = (into, name, value) => {
      if (value !== "") into[name] = value;
    };
    for (const name of ["resident_tokens", "load_unit_tokens"]) put(body, name, typed(text(`/${name}`)));
    for (const name of ["executor", "objective", "instance", "node", "prefix_id"]) put(body, name, text(`/${name}`));
    put(body, "ttft_slo_s", scaled(text("/ttft_slo_s"), MS));
    const state = {};
    put(state, "device_busy_s", scaled(text("/state/device_busy_s"), MS));
    for (const name of ["queued_prefill_tokens", "num_requests_waiting", "num_requests_running"]) {
      put(state, name, typed(text(`/state/${name}`)));
    }
    const links = {};
    const rates = {};
    for (const control of byId("f-links").querySelectorAll("[data-link]")) {
      const value = scaled(control.value, GB);
      if (value === "") continue;
      if (control.dataset.pointer.startsWith("/state/")) links[control.dataset.link] = { queued_bytes: value };
      else rates[control.dataset.link] = value;
    }
    if (Object.keys(links).length) state.links = links;
    if (Object.keys(state).length) body.state = state;
    if (Object.keys(rates).length) body.link_bytes_per_s = rates;
    return body;
  }

  /** Takes over a point of the chart and asks about it. */
  take(point) {
    const set = (pointer, value) => {
      this.control(pointer).value = value;
    };
    set("/deployment", point.deployment);
    byId("hits").replaceChildren();
    this.#place();
    set("/executor", point.executor);
    set("/prompt_tokens", count(point.prompt_tokens));
    set("/resident_tokens", point.resident_tokens ? count(point.resident_tokens) : "");
    set("/hits/0/tier", point.tier);
    set("/hits/0/tokens", count(point.tokens));
    set("/hits/0/state_checkpoints", this.recurrent ? count(point.tokens) : "");
    set("/state/device_busy_s", String(Number((point.device_busy_s * 1e3).toPrecision(6))));
    set("/state/queued_prefill_tokens", "");
    for (const control of byId("f-links").querySelectorAll("[data-link]")) {
      const from = control.dataset.pointer.startsWith("/state/") ? point.queued : point.rates;
      const value = from[control.dataset.link];
      control.value = value === undefined ? "" : String(Number((value / GB).toPrecision(6)));
      if (value) control.closest("details").open = true;
    }
    byId("ask").scrollIntoView();
    byId("ask-button").focus({ preventScroll: true });
    return this.submit();
  }

  async submit() {
    const asked = (this.asked += 1);
    clearErrors(this.form);
    this.#say("Asking …");
    let answer;
    try {
      answer = await this.api.post("/v1/what-if", this.body(), (wait) =>
        this.#say(`The service is busy; asking again in ${seconds(wait)}.`),
      );
    } catch (error) {
      if (asked === this.asked) this.#refused(error);
      return;
    }
    if (asked !== this.asked) return;
    this.#say("");
    this.answer.show(answer);
    // Where it stands below the form it would come unseen.
    const { top } = byId("answer").getBoundingClientRect();
    if (top > innerHeight * 0.8) byId("answer").scrollIntoView();
  }

  #refused(error) {
    this.unheard = error instanceof Gone;
    if (showError(this.form, error.pointer ?? null, error.message))
      this.#say(`Not answered: see the field marked.${this.answer.shown ? ` ${BEFORE}` : ""}`, true);
    else this.#say(`Not answered: ${error.message}${this.answer.shown ? ` ${BEFORE}` : ""}`, true);
  }

  #say(text, wrong = false) {
    const note = byId("ask-note");
    say(note, text);
    note.classList.toggle("wrong", wrong);
  }
}
