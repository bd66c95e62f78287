// Asking the service: the token, refusals as errors with their field, waiting when it is busy, and noticing when it
// is gone and back.

const ANSWER_WITHIN_MS = 10_000;
const TRIES_WHEN_BUSY = 4;
const LONGEST_WAIT_S = 30;
const PROBES_S = [1, 1, 2, 4, 8, 15];
// What a proxy says for a service that does not answer, or the service itself while it starts and stops.
const GONE_STATUSES = new Set([502, 503, 504]);

/** A refusal: `pointer` names the field at fault where there is one. */
export class Problem extends Error {
  constructor(status, fields) {
    super(fields.detail || fields.title || `The service refused with status ${status}.`);
    this.status = status;
    this.code = fields.code ?? "";
    this.pointer = typeof fields.pointer === "string" ? fields.pointer : null;
  }
}

/** The service does not answer. */
export class Gone extends Error {}

/** A token is needed, and was not given. */
export class NoToken extends Error {}

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1e3));

/**
 * Dispatches `gone` and `back`. `askToken(wrong)` resolves to a token, or to null where none is given; what it gave
 * is kept here, in memory, and goes nowhere but into the header of calls to this origin.
 */
export class Api extends EventTarget {
  #token = null;
  #asking = null;

  constructor(askToken) {
    super();
    this.askToken = askToken;
    this.gone = false;
    this.heardAt = performance.now();
    this.tryingAt = null;
  }

  get hasToken() {
    return this.#token !== null;
  }

  get(path) {
    return this.#call("GET", path);
  }

  /** `busy(seconds)` is told how long it waits before it asks a busy service again. */
  post(path, body, busy = () => {}) {
    return this.#call("POST", path, body, busy);
  }

  async #call(method, path, body, busy = () => {}) {
    for (let tries = 1; ; tries += 1) {
      const token = this.#token;
      const answer = await this.#send(method, path, body, token);
      if (answer.ok) return this.#read(answer);
      const problem = new Problem(answer.status, await fieldsOf(answer));
      if (answer.status === 401) {
        await this.#newToken(token);
      } else if (answer.status === 429 && tries < TRIES_WHEN_BUSY) {
        const wait = Math.min(LONGEST_WAIT_S, Math.max(0.5, Number(answer.headers.get("Retry-After")) || 1));
        busy(wait);
        await pause(wait);
      } else {
        throw problem;
      }
    }
  }

  async #send(method, path, body, token) {
    const headers = {};
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (token !== null) headers.Authorization = `Bearer ${token}`;
    let answer;
    try {
      answer = await fetch(path, {
        method,
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: AbortSignal.timeout(ANSWER_WITHIN_MS),
        cache: "no-store",
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      this.#lost();
      throw new Gone("The service does not answer.");
    }
    if (GONE_STATUSES.has(answer.status)) {
      this.#lost();
      throw new Gone("The service does not answer.");
    }
    this.heardAt = performance.now();
    return answer;
  }

  /** The body; one that ends early is the end of the service too. */
  async #read(answer) {
    try {
      return await answer.json();
    } catch {
      this.#lost();
      throw new Gone("The service does not answer.");
    }
  }

  /** One question for all calls that were refused; a call refused with an older token just tries the newer one. */
  async #newToken(refused) {
    if (this.#token !== refused) return;
    this.#asking ??= this.askToken(refused !== null).then((given) => {
      this.#asking = null;
      this.#token = given;
    });
    await this.#asking;
    if (this.#token === null) throw new NoToken("A token is needed.");
  }

  /** Says once that it is gone, and looks for it until it is back: less and less often, not in the background. */
  async #lost() {
    if (this.gone) return;
    this.gone = true;
    this.dispatchEvent(new Event("gone"));
    for (let tries = 0; this.gone; tries += 1) {
      const wait = PROBES_S[Math.min(tries, PROBES_S.length - 1)];
      this.tryingAt = performance.now() + wait * 1e3;
      await pause(wait);
      while (document.hidden) await pause(0.5);
      try {
        const answer = await fetch("/readyz", { signal: AbortSignal.timeout(ANSWER_WITHIN_MS), cache: "no-store" });
        if (answer.ok) this.gone = false;
      } catch {
        // Not yet.
      }
    }
    this.heardAt = performance.now();
    this.dispatchEvent(new Event("back"));
  }
}

async function fieldsOf(answer) {
  try {
    return await answer.json();
  } catch {
    return {};
  }
}

/**
 * Asks for the newest wish only, one at a time: after a pause, so that a slider's way is not asked about step by
 * step, and never two at once, so that an older answer cannot come after a newer one.
 */
export class Newest {
  constructor(ask, show, fail, after_ms = 90) {
    Object.assign(this, { ask, show, fail, after_ms });
    this.wish = null;
    this.running = false;
  }

  want(wish) {
    this.wish = { wish };
    if (!this.running) this.#run();
  }

  async #run() {
    this.running = true;
    while (this.wish !== null) {
      await pause(this.after_ms / 1e3);
      const { wish } = this.wish;
      this.wish = null;
      try {
        const answer = await this.ask(wish);
        this.show(answer, wish);
      } catch (error) {
        // What was wrong with a wish that has been replaced is nobody's business any more.
        if (this.wish === null) this.fail(error, wish);
      }
    }
    this.running = false;
  }
}
