// Numbers as people read them, the same way as the reason sentence writes them: 1 GB = 1e9 bytes.

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function threeDigits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return grouped.format(value);
  const text = value.toFixed(size >= 9.995 ? 1 : 2);
  return text.replace(/\.?0+$/, "");
}

function scaled(value, steps) {
  for (const [scale, unit] of steps) {
    if (Math.abs(value) >= 0.9995 * scale) return `${threeDigits(value / scale)} ${unit}`;
  }
  const [scale, unit] = steps.at(-1);
  return `${threeDigits(value / scale)} ${unit}`;
}

/** "47.9 ms", "1.25 s". */
export function seconds(value) {
  const size = Math.abs(value);
  if (size === 0) return "0 ms";
  if (size >= 9.995) return `${grouped.format(Math.trunc(value))}${(size % 1).toFixed(1).slice(1)} s`;
  if (size >= 0.99995) return `${value.toFixed(2)} s`;
  if (size >= 0.009995) return `${(value * 1e3).toFixed(1)} ms`;
  if (size >= 1e-4) return `${(value * 1e3).toFixed(2)} ms`;
  return scaled(value, [
    [1e-6, "µs"],
    [1e-9, "ns"],
  ]);
}

/** "51.2 GB/s". */
export const rate = (value) => `${bytes(value)}/s`;

/** "1.62 GB". */
export const bytes = (value) =>
  scaled(value, [
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
    [1, "B"],
  ]);

/** "12,368". */
export const count = (value) => grouped.format(value);

/** "12,368 tokens", "1 token". */
export const tokens = (value) => `${count(value)} ${value === 1 ? "token" : "tokens"}`;

/** "12.3%". */
export const percent = (value) => `${(value * 100).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)}%`;

/** How long ago, in the largest whole unit: "12 s", "3 min", "2 h", "5 d". */
export function age(value) {
  const size = Math.max(0, value);
  if (size < 120) return `${Math.floor(size)} s`;
  if (size < 7200) return `${Math.floor(size / 60)} min`;
  if (size < 172800) return `${Math.floor(size / 3600)} h`;
  return `${Math.floor(size / 86400)} d`;
}

/** A clock time of today, from seconds since 1970. */
export const clock = (unix) => new Date(unix * 1e3).toLocaleTimeString("en-GB");

/** The unit a whole axis of times is written in: its name, and how many of it are a second. */
export function timeUnit(longest) {
  if (longest >= 2) return { name: "s", per: 1 };
  if (longest >= 2e-3) return { name: "ms", per: 1e3 };
  return { name: "µs", per: 1e6 };
}

/** A tick's number, without a unit: as many digits as its step needs. */
export function tick(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || Number.isInteger(value)) return grouped.format(value);
  return String(Number(value.toPrecision(3)));
}

/** The number in a field, thousands apart or not; the text as it is where it is none, for the service to judge. */
export function typed(text) {
  const plain = text.trim().replace(/(\d)[,_\s](?=\d{3}(\D|$))/g, "$1");
  const value = Number(plain);
  return plain === "" || !Number.isFinite(value) ? text.trim() : value;
}
