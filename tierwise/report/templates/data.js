// The page's integers (see charts.py) as arrays one can search.
const page = JSON.parse(document.getElementById("page-data").textContent);

function decodeLane(flat) {
  const n = flat.length / 4;
  const lane = { n, start: new Float64Array(n), end: new Float64Array(n), label: new Int32Array(n), kind: new Int16Array(n) };
  let at = 0;
  for (let i = 0; i < n; i++) {
    at += flat[4 * i];
    lane.start[i] = at;
    lane.end[i] = at + flat[4 * i + 1];
    lane.label[i] = flat[4 * i + 2];
    lane.kind[i] = flat[4 * i + 3];
  }
  return lane;
}

function decodeMemory({ roles, words, changes }) {
  const when = [], levels = [], totals = [], now = roles.map(() => 0);
  let at = 0, total = 0;
  for (let i = 0; i < changes.length;) {
    at += changes[i++];
    for (let count = changes[i++]; count > 0; count--) {
      const role = changes[i++], change = changes[i++];
      now[role] += change;
      total += change;
    }
    when.push(at);
    totals.push(total);
    levels.push(now.slice());
  }
  return { roles, words, when, levels, totals, peak: Math.max(0, ...totals) };
}

const runs = page.runs.map((run) => ({
  ...run,
  timelines: run.timelines.map((timeline) => ({
    ...timeline,
    lanes: timeline.lanes.map(decodeLane),
    memory: Object.fromEntries(Object.entries(timeline.memory).map(([tier, memory]) => [tier, decodeMemory(memory)])),
  })),
}));

// The last place whose value is at most `x`, or -1.
function lastAtMost(values, x) {
  let lo = 0, hi = values.length;
  while (lo < hi) {
    const mid = (lo + hi) >> 1;
    if (values[mid] <= x) lo = mid + 1; else hi = mid;
  }
  return lo - 1;
}

const kindOf = (lane, i) => page.kinds[lane.kind[i]];
const isCopy = (kind) => kind[0] === "copy";
// The name of the CSS variable with the colour of a kind: copies have the colour of what they carry.
const colourOf = (kind) => (isCopy(kind) ? kind[1] : kind[0] || "plain");
// The same for CSS; names nobody foresaw share a colour.
const colourVar = (name) => (/^[\w-]+$/.test(name) ? `var(--${name}, var(--other))` : "var(--other)");
const STACK = ["param", "buffer", "optimizer_state", "grad", "activation", "input", "workspace", "staging"];
const ROLE_WORDS = { param: "parameters", buffer: "buffers", grad: "gradients", activation: "activations", input: "inputs", aside: "besides the step" };
const roleWords = (role) => ROLE_WORDS[role] || role.replaceAll("_", " ");

function kindWords(kind) {
  if (isCopy(kind)) return `copy of ${roleWords(kind[1])}, ${kind[2]} → ${kind[3]}`;
  return kind[0] === "recompute" ? "recomputed" : kind[0];
}

// What a span is, as pairs of words; the first is its name.
function spanFacts(lane, i) {
  const kind = kindOf(lane, i), bytes = page.sizes[lane.label[i]], length = lane.end[i] - lane.start[i];
  const facts = [["", page.labels[lane.label[i]]], ["", kindWords(kind)], ["from", formatNs(lane.start[i])], ["for", formatNs(length)]];
  if (isCopy(kind) && bytes) {
    facts.push(["bytes", formatBytes(bytes)]);
    if (length > 0) facts.push(["rate", `${(bytes / length).toFixed(digits(bytes / length))} GB/s`]);
  }
  return facts;
}
