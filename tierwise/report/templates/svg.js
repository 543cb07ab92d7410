// The small charts: policies, losses, and the memory of all runs. Drawn again when their width changes, so that text keeps its size.
const svgOf = (width, height, inside) => `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" xmlns="http://www.w3.org/2000/svg">${inside}</svg>`;

function drawn(element, draw) {
  let width = 0;
  const again = () => {
    const now = Math.floor(element.clientWidth);
    if (now && now !== width) draw((width = now));
  };
  new ResizeObserver(again).observe(element);
  again();
}

function frame({ width, height, left, right = 10, top = 12, bottom = 38, x, y, xTicks, yTicks, xText, yText, xName, yName }) {
  const parts = [];
  for (const value of yTicks) parts.push(`<line class="grid" x1="${left}" x2="${width - right}" y1="${y(value)}" y2="${y(value)}"/><text x="${left - 8}" y="${y(value) + 4}" text-anchor="end">${yText(value)}</text>`);
  for (const value of xTicks) {
    const at = x(value), anchor = at > width - 30 ? "end" : "middle";
    parts.push(`<line class="grid" x1="${at}" x2="${at}" y1="${height - bottom}" y2="${height - bottom + 5}"/><text x="${at}" y="${height - bottom + 18}" text-anchor="${anchor}">${xText(value)}</text>`);
  }
  parts.push(`<text x="${width - right}" y="${height - 4}" text-anchor="end">${xName}</text><text x="0" y="${top - 2}">${yName}</text>`);
  return parts.join("");
}

function drawPareto(element) {
  const group = page.groups[+element.dataset.pareto];
  const points = group.curves.flatMap((curve) => curve.points.map((p) => ({ ...p, policy: curve.policy })));
  if (!points.length) {
    element.remove();
    return;
  }
  drawn(element, (width) => {
    const height = width < 500 ? 340 : 440, left = 62, right = 16, top = 44, bottom = 40;
    const peaks = points.map((p) => p.peak_bytes), times = points.map((p) => p.seconds), yLo = Math.min(...times);
    const xLo = Math.min(...peaks) * 0.85, xHi = Math.max(...peaks) * 1.04, yHi = Math.min(Math.max(...times) * 1.06, yLo * FAR), low = yLo - (yHi - yLo) * 0.12;
    const x = (b) => left + ((b - xLo) / (xHi - xLo)) * (width - left - right);
    const y = (s) => height - bottom - ((Math.min(s, yHi) - low) / (yHi - low)) * (height - top - bottom);  // what is far slower stands at the top
    const yTicks = ticks(low, yHi, 6), step = yTicks[1] - yTicks[0], taken = points.map((p) => boxOf(x(p.peak_bytes), y(p.seconds), 6, 6));
    const parts = [frame({ width, height, left, right, top: 14, bottom, x, y, xTicks: byteTicks(xHi, Math.max(3, width / 130), xLo), yTicks, xText: (b) => axisBytes(b, xHi), yText: (s) => axisTime(s * 1e9, step * 1e9), xName: "peak memory", yName: "step time" })];
    let free = 0;
    for (const { budget_bytes: budget } of group.tables) {
      if (budget > xHi || budget < xLo) continue;
      const words = formatBytes(budget), half = words.length * 3.4;
      parts.push(`<line class="budget" x1="${x(budget)}" x2="${x(budget)}" y1="${top - 16}" y2="${height - bottom}"/>`);
      if (x(budget) - half > free) {  // those too near their neighbour go without a name
        parts.push(`<text x="${x(budget)}" y="${top - 21}" text-anchor="middle">${words}</text>`);
        free = x(budget) + half + 4;
      }
    }
    const best = points.filter((p) => p.on_frontier).sort((a, b) => a.peak_bytes - b.peak_bytes || b.seconds - a.seconds);
    let path = "";
    best.forEach((p, i) => { path += i ? `H${x(p.peak_bytes)}V${y(p.seconds)}` : `M${x(p.peak_bytes)} ${y(p.seconds)}`; });
    parts.push(`<path class="frontier" d="${path}H${width - right}"/>`);
    for (const curve of group.curves) {
      const near = curve.points.filter((p) => p.seconds <= yHi), line = near.map((p, i) => `${i ? "L" : "M"}${x(p.peak_bytes)} ${y(p.seconds)}`).join("");
      parts.push(`<g class="policy" data-policy="${escape(curve.policy)}"><path d="${line}"/>${curve.points.map((p) => mark(curve.policy, p, x(p.peak_bytes), y(p.seconds), p.seconds > yHi)).join("")}</g>`);
    }
    parts.push(...pointLabels(points, x, y, width, taken, yHi));
    element.innerHTML = svgOf(width, height, parts.join(""));
    for (const circle of element.querySelectorAll("[role=img]")) {
      const chosen = circle.parentElement, enter = () => {
        for (const other of element.querySelectorAll(".chosen")) other.classList.remove("chosen");
        chosen.classList.add("chosen");
        const box = circle.getBoundingClientRect(), [name, ...rest] = circle.getAttribute("aria-label").split(": ");
        showTip(`<b>${escape(name)}</b><br>${escape(rest.join(": "))}`, box.right, box.bottom);
      }, leave = () => { chosen.classList.remove("chosen"); hideTip(); };
      circle.addEventListener("pointerenter", enter);
      circle.addEventListener("pointerleave", leave);
      circle.addEventListener("focus", enter);
      circle.addEventListener("blur", leave);
    }
  });
}

const pointWords = (policy, p) => `${policy}: ${formatNs(p.seconds * 1e9)} at a peak of ${formatBytes(p.peak_bytes)}, within ${formatBytes(p.budget_bytes)}`;

const FAR = 2;  // times as slow as the fastest: beyond that a point stands at the top edge, with its time in words
const boxOf = (x, y, w, h) => ({ x0: x - w, x1: x + w, y0: y - h, y1: y + h });

function mark(policy, p, x, y, far) {
  const about = `tabindex="0" role="img" aria-label="${escape(pointWords(policy, p))}" class="${far ? "far" : p.on_frontier ? "best" : ""}"`;
  if (far) return `<path ${about} d="M${x - 5} ${y + 4}L${x} ${y - 5}L${x + 5} ${y + 4}Z"/>`;
  return `<circle ${about} cx="${x}" cy="${y}" r="${p.on_frontier ? 5 : 4}"/>`;
}

// A name beside each point where there is room for it: those on the frontier first, every policy at least once if it can be.
function pointLabels(points, x, y, width, taken, yHi) {
  const named = new Set(), parts = [];
  const ordered = [...points].sort((a, b) => b.on_frontier - a.on_frontier || (b.seconds > yHi) - (a.seconds > yHi) || a.peak_bytes - b.peak_bytes);
  for (const p of ordered) {
    const spot = `${p.peak_bytes} ${p.seconds}`, far = p.seconds > yHi, words = far ? `${p.policy} ${formatNs(p.seconds * 1e9)}` : p.policy;
    const length = words.length * (p.on_frontier ? 7.4 : 6.8) + 6;
    if (!far && (named.has(p.policy) || named.has(spot))) continue;
    for (const [dx, dy, anchor] of [[9, -8, "start"], [-9, 16, "end"], [9, 16, "start"], [-9, -8, "end"], [11, 4, "start"], [-11, 4, "end"]]) {
      const at = x(p.peak_bytes) + dx, box = { x0: anchor === "start" ? at : at - length, x1: anchor === "start" ? at + length : at, y0: y(p.seconds) + dy - 12, y1: y(p.seconds) + dy + 4 };
      if (box.x1 > width || box.x0 < 62 || taken.some((t) => t.x0 < box.x1 && box.x0 < t.x1 && t.y0 < box.y1 && box.y0 < t.y1)) continue;
      taken.push(box);
      named.add(p.policy).add(spot);
      parts.push(`<text class="point ${p.on_frontier ? "label" : ""}" x="${at}" y="${y(p.seconds) + dy}" text-anchor="${anchor}">${escape(words)}</text>`);
      break;
    }
  }
  return parts;
}

function drawLosses(element) {
  const { losses, untouched } = page.losses[+element.dataset.losses];
  drawn(element, (width) => {
    const height = 240, left = 56, right = 12, top = 26, bottom = 40, known = [...losses, ...untouched].filter((v) => v !== null);
    if (!known.length) return;
    const lo = Math.min(...known), hi = Math.max(...known), pad = (hi - lo || Math.abs(hi) || 1) * 0.06;
    const x = (i) => left + (losses.length > 1 ? i / (losses.length - 1) : 0.5) * (width - left - right), y = (v) => height - bottom - ((v - lo + pad) / (hi - lo + 2 * pad)) * (height - top - bottom);
    const line = (values) => values.map((v, i) => (v === null ? "" : `${i && values[i - 1] !== null ? "L" : "M"}${x(i)} ${y(v)}`)).join("");
    const yTicks = ticks(lo - pad, hi + pad, 4), decimals = Math.max(0, -Math.floor(Math.log10((yTicks[1] ?? 1) - yTicks[0] || 1)));
    const xTicks = ticks(1, losses.length, Math.min(losses.length, Math.max(2, width / 90))).filter(Number.isInteger);
    const words = untouched.length ? ", the wide line is the untouched run" : "";
    element.innerHTML = svgOf(width, height, frame({ width, height, left, right, top: 14, bottom, x: (n) => x(n - 1), y, xTicks, yTicks, xText: String, yText: (v) => v.toFixed(decimals), xName: "step", yName: `loss${words}` })
      + `<path class="untouched" d="${line(untouched)}"/><path class="series series-0" d="${line(losses)}"/>`);
  });
}

function drawSilhouettes(element) {
  const lines = runs.map((run) => {
    const timeline = run.timelines[run.timelines.length - 1];
    return { memory: timeline.memory[run.device_tier], ns: timeline.ns };
  });
  const known = lines.filter((l) => l.memory);
  if (!known.length) {
    element.remove();
    return;
  }
  drawn(element, (width) => {
    const height = width < 500 ? 220 : 260, left = 66, right = 14, top = 26, bottom = 40;
    const hiX = Math.max(...known.map((l) => l.ns)), hiY = Math.max(...known.map((l) => l.memory.peak)) * 1.06;
    const x = (t) => left + (t / hiX) * (width - left - right), y = (b) => height - bottom - (b / hiY) * (height - top - bottom);
    const xTicks = ticks(0, hiX, Math.max(2, width / 130)), step = xTicks[1] - xTicks[0] || hiX;
    const paths = lines.map(({ memory, ns }, i) => {
      if (!memory) return "";
      let path = "", column = -1, first = 0, low = 0, high = 0, last = 0;
      const flush = () => {  // one stroke through the fullest and the emptiest moment of each pixel
        if (column >= 0) path += [first, high, low, last].map((b, k) => `${path || k ? "L" : "M"}${column} ${y(b).toFixed(1)}`).join("");
      };
      memory.when.forEach((t, k) => {
        const at = Math.round(x(t)), total = memory.totals[k];
        if (at !== column) {
          flush();
          first = low = high = column < 0 ? total : last;  // it arrives with what was held before
          column = at;
        }
        low = Math.min(low, total);
        high = Math.max(high, total);
        last = total;
      });
      flush();
      path += `L${x(ns)} ${y(memory.totals[memory.totals.length - 1])}V${y(0)}`;
      return `<path class="series series-${i % 6}" d="${path}"><title>${escape(runs[i].title)}</title></path>`;
    });
    element.innerHTML = svgOf(width, height, frame({ width, height, left, right, top: 14, bottom, x, y, xTicks, yTicks: byteTicks(hiY, 6), xText: (t) => axisTime(t, step), yText: (b) => axisBytes(b, hiY), xName: "time in the step", yName: "device memory" }) + paths.join(""));
  });
}
