// The page's beginning: what is served, the three sections, and a word when the service is gone.

import { Api, NoToken } from "./api.js";
import { Curves } from "./curves.js";
import { byId, el, say } from "./dom.js";
import { age } from "./format.js";
import { Live } from "./live.js";
import { askToken } from "./token.js";
import { WhatIf } from "./whatif.js";

const MOST_NAMES = 12;

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
    byId("serves").replaceChildren(...served(deployments));
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

/** "Serves 2 deployments: chat, large"; names run in their own direction, and turn nothing else around. */
function served(deployments) {
  const some = deployments.length > MOST_NAMES ? deployments.slice(0, MOST_NAMES) : deployments;
  const names = some.flatMap(({ name }, index) => [index === 0 ? " " : ", ", el("bdi", { text: name })]);
  const left = deployments.length - some.length;
  return [
    deployments.length === 1 ? "Serves" : `Serves ${deployments.length} deployments:`,
    ...names,
    left > 0 ? ` and ${left} more` : "",
  ];
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
