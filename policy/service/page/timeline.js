// The layers of the chosen path: copies above, compute below, and the time in between that compute stood still.

import { svg } from "./dom.js";
import { seconds, tick, timeUnit } from "./format.js";
import { linear, within } from "./scales.js";

const ROW = 34;
const GAP = 12;

const span = (item) => `${seconds(item.start_s)} to ${seconds(item.end_s)}`;

/** Copies by the link that carries them, in the order they begin. */
function lanes(copies) {
  const found = new Map();
  for (const copy of copies) {
    const name = `${copy.tier} over ${copy.link}`;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(copy);
  }
  return found;
}

function layersOf({ first_layer: first, layers }) {
  return layers === 1 ? `layer ${first + 1}` : `layers ${first + 1} to ${first + layers}`;
}

/** The text of one computed layer: when it ran, and when what it waited for had come. */
function reading(compute, copies) {
  const words = [`${layersOf(compute)}${compute.part === "front" ? " (front)" : ""} computed ${span(compute)}`];
  const needed =
    compute.part === "front"
      ? []
      : copies.filter(
          (copy) =>
            copy.first_layer < compute.first_layer + compute.layers &&
            copy.first_layer + copy.layers > compute.first_layer,
        );
  for (const copy of needed) words.push(`its KV copied ${span(copy)}`);
  return words.join("; ");
}

/** How high the drawing is: a row for each link and one for compute. */
export const rows = (timeline) => Math.max(1, lanes(timeline.copies).size) + 1;

function label(timeline) {
  const stood = timeline.exposed.reduce((sum, each) => sum + each.end_s - each.start_s, 0);
  const copied =
    timeline.copies.length === 0
      ? "Nothing is copied"
      : `Copies end after ${seconds(Math.max(...timeline.copies.map((copy) => copy.end_s)))}`;
  return (
    `Layer timeline. ${copied}, compute ends after ${seconds(timeline.ttft_s)}; it waits for copies for ` +
    `${seconds(stood)} in all. Arrow keys go from layer to layer.`
  );
}

/** What a `Chart` draws of a timeline. */
export function timelinePlan(timeline) {
  const byLane = lanes(timeline.copies);
  const names = byLane.size ? [...byLane.keys()] : ["no copies"];
  const end = timeline.ttft_s;
  return (box) => {
    const unit = timeUnit(end);
    const x = linear(0, end, box.left, box.right);
    const top = (row) => box.top + 16 + row * (ROW + GAP + 8);
    const bar = (item, row, kind) =>
      svg("rect", {
        class: kind,
        x: x.at(item.start_s),
        y: top(row),
        height: ROW,
        // A layer is never thinner than can be seen; the gap between two shows where there is room for it.
        width: Math.max(
          0.7,
          x.at(item.end_s) - x.at(item.start_s) - (x.at(item.end_s) - x.at(item.start_s) > 4 ? 1 : 0),
        ),
      });
    const busy = (until, row, text) =>
      until <= 0
        ? []
        : [
            svg("rect", {
              class: "busy",
              x: box.left,
              y: top(row),
              height: ROW,
              width: Math.max(1, x.at(Math.min(until, end)) - box.left),
            }),
            ...(x.at(until) - box.left > 70
              ? [svg("text", { class: "words", x: box.left + 6, y: top(row) + 21, text })]
              : []),
          ];
    return {
      label: label(timeline),
      hint: "Point at a layer, or focus the timeline and use the arrow keys.",
      x: {
        scale: x,
        ticks: within(end * unit.per, box.width < 500 ? 4 : 8).map((value) => value / unit.per),
        text: (value) => tick(value * unit.per),
        title: `time since the request arrived, ${unit.name}`,
      },
      y: { scale: x, ticks: [], text: tick, title: "" },
      paint: (add) => {
        for (const each of timeline.exposed) {
          const wide = x.at(each.end_s) - x.at(each.start_s);
          add(
            svg("rect", {
              class: "exposed",
              x: x.at(each.start_s),
              y: box.top,
              width: wide,
              height: box.bottom - box.top,
            }),
          );
        }
        add(
          ...busy(timeline.link_queue_s, 0, "link busy"),
          ...busy(timeline.device_busy_s, names.length, "device busy"),
        );
        names.forEach((name, row) => {
          add(
            svg("text", { class: "row", x: box.left, y: top(row) - 5, text: byLane.size ? `copies: ${name}` : name }),
          );
          for (const [index, copy] of (byLane.get(name) ?? []).entries()) {
            add(bar(copy, row, `copy ${index % 2 ? "odd" : ""}`));
          }
        });
        add(svg("text", { class: "row", x: box.left, y: top(names.length) - 5, text: "compute, layer by layer" }));
        for (const compute of timeline.computes) {
          add(bar(compute, names.length, `compute ${compute.first_layer % 2 ? "odd" : ""} ${compute.part}`));
        }
      },
      stops: timeline.computes.map((each) => (x.at(each.start_s) + x.at(each.end_s)) / 2),
      read: (index) => reading(timeline.computes[index], timeline.copies),
    };
  };
}

/** Pixels for that many rows, axis and title included. */
export const timelineHeight = (count) => 16 + 26 + 44 + count * (ROW + GAP + 8) - GAP + 4;
