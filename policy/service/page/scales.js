// From values to pixels and back, and where ticks stand.

/** A scale over [low, high]; equal ends are pulled apart. */
export function linear(low, high, from, to) {
  const span = high - low || 1;
  return {
    low,
    high,
    at: (value) => from + ((value - low) / span) * (to - from),
    value: (pixel) => low + ((pixel - from) / (to - from)) * span,
  };
}

/** A logarithmic scale over [low, high], both above zero; what lies below is drawn at the edge. */
export function log(low, high, from, to) {
  const least = Math.log10(low);
  const span = Math.log10(high) - least || 1;
  return {
    low,
    high,
    at: (value) => from + ((Math.log10(Math.max(value, low)) - least) / span) * (to - from),
    value: (pixel) => 10 ** (least + ((pixel - from) / (to - from)) * span),
  };
}

/** A round step (1, 2 or 5 times a power of ten) that divides `span` into at most `most` parts. */
export function niceStep(span, most) {
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const times = rough / power;
  return (times <= 1 ? 1 : times <= 2 ? 2 : times <= 5 ? 5 : 10) * power;
}

/** Ticks from 0, and the round number at or above `highest` that the axis ends with. */
export function fromZero(highest, most) {
  const step = niceStep(highest || 1, most);
  const parts = Math.max(1, Math.ceil((highest || 1) / step - 1e-9));
  return { ticks: Array.from({ length: parts + 1 }, (_, part) => part * step), end: parts * step };
}

/** Ticks of an axis that ends where the data ends. */
export function within(highest, most) {
  const { ticks } = fromZero(highest, most);
  return ticks.filter((value) => value <= highest * (1 + 1e-9));
}

/** Ticks for lengths in tokens: steps are powers of two, as prompts and blocks are. */
export function tokenTicks(highest, most) {
  let step = 16;
  while (highest / step > most) step *= 2;
  const found = [];
  for (let value = 0; value <= highest; value += step) found.push(value);
  return found;
}

/** Round bounds (1, 2 or 5 times a power of ten) around [low, high], ticks between: decades where there are many. */
export function decades(low, high) {
  const steps = [];
  for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)) + 1; power += 1) {
    for (const times of [1, 2, 5]) steps.push(Number((times * 10 ** power).toPrecision(1)));
  }
  const first = steps.findLastIndex((step) => step <= low * (1 + 1e-9));
  const last = Math.max(
    first + 3,
    steps.findIndex((step) => step >= high * (1 - 1e-9)),
  );
  const between = steps.slice(first, last + 1);
  const tens = between.filter((step) => Math.abs(Math.log10(step) - Math.round(Math.log10(step))) < 1e-9);
  return { ticks: between.length > 9 ? tens : between, low: between[0], high: between.at(-1) };
}
