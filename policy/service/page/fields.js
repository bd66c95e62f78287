// Fields that know where they stand in a request, and refusals shown at the field they are about.

import { el } from "./dom.js";

let made = 0;

/**
 * A label, its control and a place for what is wrong with it. `pointer` is the JSON pointer of its value in the
 * request; `kind` is the control's own attributes, `choices` makes it a select.
 */
export function field({ pointer, label, hint, choices, ...kind }) {
  const id = `f${(made += 1)}`;
  const control =
    choices === undefined
      ? el("input", { type: "text", autocomplete: "off", spellcheck: "false", ...kind, id })
      : el("select", { ...kind, id }, ...choices.map(([value, text]) => el("option", { value, text })));
  control.dataset.pointer = pointer;
  const described = [];
  const parts = [el("label", { for: id, text: label }), control];
  if (hint) {
    described.push(`${id}-hint`);
    parts.push(el("p", { class: "hint", id: `${id}-hint`, text: hint }));
  }
  control.dataset.described = described.join(" ");
  if (described.length) control.setAttribute("aria-describedby", control.dataset.described);
  return el("div", { class: "field" }, ...parts);
}

const controls = (form) => [...form.querySelectorAll("[data-pointer]")];

/** The control of that pointer, the one whose value it lies in, or the first of what it encloses. */
export function controlAt(form, pointer) {
  const all = controls(form);
  return (
    all.find((each) => each.dataset.pointer === pointer) ??
    all.find((each) => pointer.startsWith(`${each.dataset.pointer}/`)) ??
    (pointer === "" ? undefined : all.find((each) => each.dataset.pointer.startsWith(`${pointer}/`)))
  );
}

const KINDS = { int: "a whole number", float: "a number", str: "text" };
const BOUNDS = { ">=": "of at least", "<=": "of at most", ">": "above", "<": "below" };
const bound = new Intl.NumberFormat("en-US", { maximumFractionDigits: 6 });

/** A refusal of a type in words for people; bounds in the field's unit, which is `by` of the request's. */
export function plain(text, by = 1) {
  const kind = /^Expected `(int|float|str)(?: \| null)?`(?:, got `[^`]+`| (of length )?([<>]=?) ([\d.e+-]+))?$/.exec(text);
  if (kind === null) return text;
  const [, type, length, sign, limit] = kind;
  if (sign === undefined) return `Expected ${KINDS[type]}.`;
  if (length) return `Expected text ${BOUNDS[sign]} ${bound.format(limit)} characters.`;
  const value = Number(limit) / by;
  // Nobody types a billionth.
  const near = sign === ">=" && value > 0 && value < 1e-6;
  return `Expected ${KINDS[type]} ${near ? "above 0" : `${BOUNDS[sign]} ${bound.format(value)}`}.`;
}

/** Takes away what was said to be wrong before. */
export function clearErrors(form) {
  for (const control of controls(form)) {
    if (!control.hasAttribute("aria-invalid")) continue;
    control.removeAttribute("aria-invalid");
    const described = control.dataset.described;
    if (described) control.setAttribute("aria-describedby", described);
    else control.removeAttribute("aria-describedby");
    document.getElementById(`${control.id}-error`)?.remove();
  }
}

/** Says at a field what is wrong with it and goes there; false where no field is meant. */
export function showError(form, pointer, text) {
  const control = pointer === null ? undefined : controlAt(form, pointer);
  if (control === undefined) return false;
  const id = `${control.id}-error`;
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", `${id} ${control.dataset.described}`.trim());
  const told = plain(text, Number(control.dataset.by ?? 1));
  control.closest(".field").append(el("p", { class: "error", id, text: told }));
  // A field in a part that is folded away cannot be gone to.
  for (let part = control.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
  control.focus();
  return true;
}

/** One name in a JSON pointer. */
export const escaped = (name) => name.replaceAll("~", "~0").replaceAll("/", "~1");
