// Bytes and seconds as tierwise/units.py writes them, and round numbers for axes.
const digits = (size) => (size >= 100 ? 0 : size >= 10 ? 1 : 2);
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function formatBytes(bytes) {
  let size = bytes, unit = 0;
  while (Math.abs(size) >= 1024 && unit < 4) { size /= 1024; unit++; }
  return unit ? `${size.toFixed(digits(Math.abs(size)))} ${BYTE_UNITS[unit]}` : `${Math.round(size)} B`;
}

function formatNs(ns) {
  const seconds = Math.abs(ns) / 1e9;
  const [scale, unit] = seconds >= 1 ? [1e-9, "s"] : seconds >= 1e-3 ? [1e-6, "ms"] : [1e-3, "µs"];
  return `${(ns * scale).toFixed(digits(Math.abs(ns) * scale))} ${unit}`;
}

function roundStep(span, count) {
  const raw = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= raw * 0.999);
}

function ticks(lo, hi, count, unit = 1) {
  if (!(hi > lo)) return [lo];
  const step = roundStep((hi - lo) / unit, count) * unit, found = [];
  for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi * (1 + 1e-12) + 1e-12; k++) found.push(k * step);
  return found;
}

function byteTicks(hi, count, lo = 0) {
  let unit = 1;
  while (hi / unit >= 1024 && unit < 2 ** 40) unit *= 1024;
  return ticks(lo, hi, count, unit);
}

// One unit for a whole axis, with just the decimals its steps need.
function axisTime(ns, step) {
  const [scale, unit] = step >= 2e8 ? [1e-9, "s"] : step >= 2e5 ? [1e-6, "ms"] : step >= 2e2 ? [1e-3, "µs"] : [1, "ns"];
  const decimals = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  return `${(ns * scale).toFixed(decimals)} ${unit}`;
}

function axisBytes(bytes, hi) {
  let unit = 0, scale = 1;
  while (hi / scale >= 1024 && unit < 4) { scale *= 1024; unit++; }
  return bytes ? `${+(bytes / scale).toFixed(2)} ${BYTE_UNITS[unit]}` : "0";
}
