// One chart: axes with titles and ticks, lines or points, marks, and a cursor that pointer and arrow keys move.
//
// It is drawn in its own pixels and again when its width changes; its height is the style sheet's, so that nothing
// around it moves.

import { say, svg } from "./dom.js";

const SYMBOLS = {
  load: (x, y) => svg("circle", { class: "dot load", cx: x, cy: y, r: 3.5 }),
  recompute: (x, y) => svg("rect", { class: "dot recompute", x: x - 3.2, y: y - 3.2, width: 6.4, height: 6.4 }),
  split: (x, y) => svg("path", { class: "dot split", d: `M${x} ${y - 4.4}l4.2 7.4h-8.4z` }),
};

/** The point of a path: a circle for load, a square for recompute, a triangle for split. */
export const symbol = (path, x, y) => SYMBOLS[path](x, y);

/** A line through [x, y] pixels, broken where there is null. */
export function linePath(points) {
  let drawn = "";
  let broken = true;
  for (const point of points) {
    if (point !== null) drawn += `${broken ? "M" : "L"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    broken = point === null;
  }
  return drawn;
}

/**
 * `host` is the element it fills, `readout` the one that says what is under the cursor.
 *
 * `draw` is given a function from the plot's size to what is to be seen:
 *   label: the text alternative; hint: the readout where nothing is under the cursor
 *   x, y: { scale, ticks, text, title }; a tick's text is `text(value)`
 *   paint(add, box): adds whatever stands between the axes
 *   stops: pixels that the cursor can stand at, from left to right; read(index): its text
 *   points(index): [path, x, y] of what is marked there; labels: { x, y, text, end } of words in the plot
 */
export class Chart {
  constructor(host, readout, { left = 58, right = 14, top = 26, bottom = 44 } = {}) {
    this.readout = readout;
    this.margin = { left, right, top, bottom };
    this.index = null;
    this.onmove = null;
    this.plan = null;
    this.shown = svg("g");
    this.cursor = svg("g", { class: "cursor" });
    this.svg = svg(
      "svg",
      { role: "img", tabindex: "0", class: "chart", "aria-label": host.dataset.name },
      this.shown,
      this.cursor,
    );
    host.replaceChildren(this.svg);
    this.host = host;
    new ResizeObserver(() => this.redraw()).observe(host);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    // What is under the cursor is announced to whoever moves it, not whenever the numbers change.
    readout.setAttribute("aria-live", "off");
    this.svg.addEventListener("focus", () => readout.setAttribute("aria-live", "polite"));
    this.svg.addEventListener("blur", () => readout.setAttribute("aria-live", "off"));
  }

  draw(plan) {
    this.plan = plan;
    this.redraw();
  }

  redraw() {
    const width = this.host.clientWidth;
    const height = this.host.clientHeight;
    if (this.plan === null || width === 0 || height === 0) return;
    const { left, right, top, bottom } = this.margin;
    const box = { left, top, right: width - right, bottom: height - bottom, width, height };
    const seen = this.plan(box);
    this.seen = seen;
    this.box = box;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("aria-label", seen.label);
    const nodes = [];
    const add = (...more) => nodes.push(...more);
    this.axes(add, box, seen);
    seen.paint(add, box);
    for (const label of seen.labels ?? []) this.words(add, label);
    this.shown.replaceChildren(...nodes);
    if (this.index !== null && this.index >= seen.stops.length) this.index = seen.stops.length - 1;
    this.move(seen.stops.length === 0 ? null : this.index);
  }

  axes(add, box, { x, y }) {
    for (const value of y.ticks) {
      const at = y.scale.at(value);
      add(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
      add(svg("text", { class: "tick", x: box.left - 8, y: at + 4, "text-anchor": "end", text: y.text(value) }));
    }
    for (const value of x.ticks) {
      const at = x.scale.at(value);
      add(svg("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 5 }));
      const anchor = at > box.right - 12 ? "end" : at < box.left + 6 ? "start" : "middle";
      const shift = anchor === "end" ? box.right + 8 : anchor === "start" ? at - 4 : at;
      add(svg("text", { class: "tick", x: shift, y: box.bottom + 19, "text-anchor": anchor, text: x.text(value) }));
    }
    add(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    add(svg("text", { class: "title", x: 2, y: 13, text: y.title }));
    add(svg("text", { class: "title", x: box.right, y: box.height - 6, "text-anchor": "end", text: x.title }));
  }

  words(add, { x, y, text, end = false, kind = "" }) {
    add(svg("text", { class: `words ${kind}`, x, y, "text-anchor": end ? "end" : "start", text }));
  }

  point(event) {
    if (!this.seen || this.seen.stops.length === 0) return;
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    let nearest = 0;
    this.seen.stops.forEach((stop, index) => {
      if (Math.abs(stop - at) < Math.abs(this.seen.stops[nearest] - at)) nearest = index;
    });
    this.move(nearest);
  }

  key(event) {
    const last = (this.seen?.stops.length ?? 0) - 1;
    if (last < 0) return;
    const here = this.index ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const steps = {
      ArrowRight: here + 1,
      ArrowLeft: here - 1,
      PageDown: here + 10,
      PageUp: here - 10,
      Home: 0,
      End: last,
    };
    if (event.key === "Escape") this.move(null);
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.move(Math.min(last, Math.max(0, steps[event.key])));
  }

  move(index) {
    const changed = index !== this.index;
    this.index = index;
    if (index === null) {
      this.cursor.replaceChildren();
      say(this.readout, this.seen.hint);
    } else {
      const at = this.seen.stops[index];
      const points = this.seen.points?.(index) ?? [];
      this.cursor.replaceChildren(
        svg("line", { x1: at, x2: at, y1: this.box.top, y2: this.box.bottom }),
        ...points.map(([path, x, y]) => symbol(path, x, y)),
      );
      say(this.readout, this.seen.read(index));
    }
    if (changed) this.onmove?.(index);
  }
}
