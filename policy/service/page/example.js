// What to type where there is nothing to see yet: lines for a shell that work with this very service.

import { byId, say } from "./dom.js";

const JSON_TYPE = "-H 'content-type: application/json'";

/** A text as one word of a shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export class Example {
  constructor(api) {
    this.api = api;
    for (const id of ["decide", "observe"]) {
      byId(`copy-${id}`).addEventListener("click", (event) =>
        copy(byId(`curl-${id}`).textContent, event.currentTarget),
      );
    }
  }

  serve(deployments) {
    const [{ name, tiers }] = deployments;
    const [tier] = Object.keys(tiers);
    const asked = { deployment: name, prompt_tokens: 12370, hits: tier === undefined ? [] : [{ tier, tokens: 12368 }] };
    const bearer = (token) => (this.api.hasToken ? ` -H "authorization: Bearer ${token}"` : "");
    const token = bearer("$KVLANE_TOKEN");
    // To observe may take a token of its own.
    const observing = bearer("${KVLANE_OBSERVE_TOKEN:-$KVLANE_TOKEN}");
    const ask = `curl -s ${location.origin}/v1/decide${token} ${JSON_TYPE} -d ${quoted(JSON.stringify(asked))}`;
    say(byId("curl-decide"), ask);
    say(
      byId("curl-observe"),
      [
        `a=$(${ask})`,
        `f() { printf %s "$a" | grep -oE "\\"$1\\":\\"?[^\\",}]+" | head -n 1 | sed -E 's/.*:"?//'; }`,
        `curl -s ${location.origin}/v1/observe${observing} ${JSON_TYPE} -d '[{"type": "request", "ttft_s": 0.06,`,
        `  "observation_id": "'$(f decision_id)'", "decision_id": "'$(f decision_id)'",`,
        `  "path_taken": "'$(f path)'", "loaded_tokens": '$(f load_tokens)'}]'`,
      ].join("\n"),
    );
  }
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    say(button, "Copied");
  } catch {
    // No clipboard outside of a secure context: the text can still be selected.
    say(button, "Select and copy it");
  }
  setTimeout(() => say(button, "Copy"), 2000);
}
