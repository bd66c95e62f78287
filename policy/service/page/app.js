// The page's beginning: what is served, the three sections, and a word when the service is gone.

import { Api, NoToken } from "./api.js";
import { Curves } from "./curves.js";
import { byId, say } from "./dom.js";
import { age } from "./format.js";
import { Live } from "./live.js";
import { askToken } from "./token.js";
import { WhatIf } from "./whatif.js";

const api = new Api(askToken);
const whatIf = new WhatIf(api);
const curves = new Curves(api, (point) => whatIf.take(point));
const live = new Live(api, () => start());

let starting = false;

/** Reads what is served and gives it to the sections; again when it is back, or serves something else. */
async function start() {
  if (starting) return;
  starting = true;
  try {
    const { deployments } = await api.get("/v1/deployments");
    const names = deployments.map(({ name }) => name).join(", ");
    say(
      byId("serves"),
      `${deployments.length === 1 ? "Serves" : `Serves ${deployments.length} deployments:`} ${names}`,
    );
    byId("start-error").hidden = true;
    for (const section of [curves, whatIf, live]) section.serve(deployments);
  } catch (error) {
    const needed = error instanceof NoToken;
    say(byId("start-words"), needed ? "This service answers only those who have its token." : error.message);
    say(byId("start-again"), needed ? "Enter the token" : "Try again");
    byId("start-error").hidden = false;
  } finally {
    starting = false;
  }
}

byId("start-again").addEventListener("click", start);

/** The seconds in the word about a service that is gone; they are not announced, the sentence before them is. */
function tellGone() {
  if (!api.gone) return;
  const heard = age((performance.now() - api.heardAt) / 1e3);
  const left = api.tryingAt === null ? 0 : (api.tryingAt - performance.now()) / 1e3;
  say(
    byId("gone-since"),
    `last heard ${heard} ago; ${left > 0.5 ? `trying again in ${age(left + 0.5)}` : "trying again"}`,
  );
  setTimeout(tellGone, 500);
}

api.addEventListener("gone", () => {
  say(byId("gone-words"), "The service does not answer;");
  byId("gone").hidden = false;
  tellGone();
});
api.addEventListener("back", () => {
  byId("gone").hidden = true;
  say(byId("gone-words"), "");
  start();
});

start();
