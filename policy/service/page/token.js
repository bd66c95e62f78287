// The question for the token. It stays in this page's memory: no storage, no address, no form is submitted.

import { byId, say } from "./dom.js";

/** Asks in a dialog; resolves to what was given, or to null where the dialog was left. */
export function askToken(wrong) {
  const dialog = byId("token-dialog");
  const field = byId("token");
  const error = byId("token-error");
  say(error, wrong ? "That token was refused. Is it the one of this service (KVLANE_TOKEN)?" : "");
  field.setAttribute("aria-invalid", String(wrong));
  field.value = "";
  return new Promise((resolve) => {
    let given = null;
    const submit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      // A header cannot hold anything else, and the service takes no such token either.
      if (!/^[\x21-\x7e]+$/.test(text)) {
        say(error, text === "" ? "Enter the token first." : "A token has no spaces or special letters.");
        field.setAttribute("aria-invalid", "true");
        field.focus();
        return;
      }
      given = text;
      dialog.close();
    };
    const form = byId("token-form");
    const leave = () => dialog.close();
    form.addEventListener("submit", submit);
    byId("token-cancel").addEventListener("click", leave);
    dialog.addEventListener(
      "close",
      () => {
        form.removeEventListener("submit", submit);
        byId("token-cancel").removeEventListener("click", leave);
        field.value = "";
        resolve(given);
      },
      { once: true },
    );
    dialog.showModal();
    field.focus();
  });
}
