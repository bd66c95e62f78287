// Elements in one call. Text is only ever set as text: names and reasons come from strangers.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; `text` sets its text, `onclick` and the like listen. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element; looks are presentation attributes and classes, which a strict CSP allows. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it differs, so that nothing is announced or laid out again for nothing. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Options of a select as [value, text] pairs; what was chosen stays chosen where it still exists. */
export function options(select, pairs) {
  const chosen = select.value;
  select.replaceChildren(...pairs.map(([value, text]) => el("option", { value, text })));
  if (pairs.some(([value]) => value === chosen)) select.value = chosen;
}
