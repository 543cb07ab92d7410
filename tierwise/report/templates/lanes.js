// One lane: its spans as bars; with a prediction and a measurement, the predicted bars above the measured ones.
class LaneRow {
  constructor(element, run, index, view) {
    Object.assign(this, { element, run, view, strip: element.querySelector(".strip"), canvas: element.querySelector("canvas"), chosen: null });
    this.bars = run.timelines.map((t) => t.lanes[index]);
    element.classList.toggle("two", this.bars.length > 1);
    view.listeners.push(() => this.draw());
  }

  plot() {
    const box = this.strip.getBoundingClientRect();
    return { left: box.left, width: box.width };
  }

  rows(height) {  // top and height of each timeline's bars
    const gap = 2, each = (height - gap * (this.bars.length - 1)) / this.bars.length;
    return this.bars.map((_, i) => [i * (each + gap), each]);
  }

  draw() {
    paint(this.canvas, (c, width, height) => {
      const { lo, hi } = this.view, x = (t) => ((t - lo) / (hi - lo)) * width;
      c.font = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
      this.rows(height).forEach(([top, tall], i) => {
        c.fillStyle = colours.track;
        c.fillRect(0, top, width, tall);
        const end = this.run.timelines[i].ns;
        c.fillStyle = colours.shade;
        if (lo < 0) c.fillRect(0, top, x(0), tall);
        if (hi > end) c.fillRect(x(end), top, width - x(end), tall);
        this.spans(c, this.bars[i], x, top, tall, width);
      });
      if (this.chosen) this.outline(c, x, height);
      if (this.view.cursor !== null && this.view.cursor >= lo && this.view.cursor <= hi) {
        c.fillStyle = colours.ink;
        c.globalAlpha = 0.55;
        c.fillRect(Math.round(x(this.view.cursor)), 0, 1, height);
        c.globalAlpha = 1;
      }
    });
  }

  spans(c, lane, x, top, tall, width) {
    const { lo, hi } = this.view;
    let pixel = -1, longest = 0, kind = 0;
    const flush = () => {
      if (pixel >= 0) {
        c.fillStyle = colours[colourOf(page.kinds[kind])];
        c.fillRect(pixel, top, 1, tall);
        if (page.kinds[kind][0] === "recompute") hatch(c, pixel, top, 1, tall);
      }
      pixel = -1;
    };
    for (let i = Math.max(0, lastAtMost(lane.start, lo)); i < lane.n && lane.start[i] < hi; i++) {
      if (lane.end[i] < lo) continue;
      const from = x(lane.start[i]), to = x(lane.end[i]), length = to - from;
      if (length < 1) {  // of the spans within one pixel, the longest gives it its colour
        const at = Math.floor(from);
        if (at !== pixel) {
          flush();
          pixel = at;
          longest = -1;
        }
        if (length > longest) {
          longest = length;
          kind = lane.kind[i];
        }
        continue;
      }
      flush();
      const name = page.kinds[lane.kind[i]], edge = length > 3 ? 0.5 : 0, left = Math.max(-1, from), right = Math.min(width + 1, to);
      c.fillStyle = colours[colourOf(name)];
      c.fillRect(left, top, right - left - edge, tall);
      if (name[0] === "recompute") hatch(c, left, top, right - left - edge, tall);
      if (right - left > 36 && tall > 12) this.write(c, withoutPhase(page.labels[lane.label[i]], name[0]), left, right, top + tall / 2, colours[colourOf(name)]);
    }
    flush();
  }

  write(c, words, left, right, middle, colour) {
    const room = Math.min(right, this.canvas.clientWidth) - Math.max(0, left) - 8;
    const fitting = fit(c, words, room);
    if (!fitting) return;
    c.textAlign = "left";
    c.textBaseline = "middle";
    c.fillStyle = isLight(colour) ? "#14171a" : "#ffffff";
    c.fillText(fitting, Math.max(0, left) + 4, middle + 0.5);
  }

  outline(c, x, height) {
    const [row, i] = this.chosen, lane = this.bars[row], [top, tall] = this.rows(height)[row];
    c.strokeStyle = colours.ink;
    c.lineWidth = 2;
    c.strokeRect(x(lane.start[i]), top + 1, Math.max(2, x(lane.end[i]) - x(lane.start[i])), tall - 2);
    c.lineWidth = 1;
  }

  // The span under the pointer, or the nearest within three pixels.
  find(time, y) {
    const rows = this.rows(this.strip.clientHeight), row = Math.max(0, rows.findIndex(([top, tall]) => y < top + tall + 1)), lane = this.bars[row];
    const slack = ((this.view.hi - this.view.lo) / this.strip.clientWidth) * 3, i = lastAtMost(lane.start, time);
    let best = null, near = slack;
    for (const k of [i, i + 1, i - 1]) {
      if (k < 0 || k >= lane.n) continue;
      const away = Math.max(lane.start[k] - time, time - lane.end[k], 0);
      if (away < near || (away === 0 && best === null)) { best = k; near = away; }
      if (away === 0) break;
    }
    return best === null ? null : [row, best];
  }

  facts([row, i]) {
    const facts = spanFacts(this.bars[row], i);
    if (this.bars.length > 1) facts[1][1] += this.run.timelines[row].measured ? "; measured" : "; predicted";
    return facts;
  }

  step(by) {  // to the next span, by keyboard
    const row = this.chosen ? this.chosen[0] : this.bars.length - 1, lane = this.bars[row];
    if (!lane.n) return;
    const from = this.chosen ? this.chosen[1] + by : Math.max(0, lastAtMost(lane.start, this.view.lo) + 1);
    const i = Math.min(lane.n - 1, Math.max(0, from));
    this.chosen = [row, i];
    this.view.show(lane.start[i], lane.end[i]);
    this.view.point((lane.start[i] + lane.end[i]) / 2);
    say(factsText(this.facts(this.chosen)));
  }

  other() {  // from the predicted span to the measured one of the same place in the step, and back
    if (this.bars.length < 2 || !this.chosen) return;
    const [row, i] = this.chosen, to = this.bars[1 - row];
    const k = lastAtMost(to.start, (this.bars[row].start[i] + this.bars[row].end[i]) / 2);
    if (k >= 0) {
      this.chosen = [1 - row, k];
      this.step(0);
    }
  }
}

function hatch(c, x, y, width, height) {  // work done twice is also told by its pattern
  c.save();
  c.beginPath();
  c.rect(x, y, width, height);
  c.clip();
  c.strokeStyle = "#ffffff73";
  c.lineWidth = 1.5;
  c.beginPath();
  const first = Math.floor((x - height) / 5) * 5;
  for (let at = first; at < x + width; at += 5) {
    c.moveTo(at, y + height);
    c.lineTo(at + height, y);
  }
  c.stroke();
  c.restore();
}

// 'blocks.11.backward' -> 'blocks.11': its colour says the rest.
const withoutPhase = (words, phase) => (words.endsWith(`.${phase}`) ? words.slice(0, -phase.length - 1) : words);

// The words, or their end, which tells most of 'blocks.11.attention.query.mm', or nothing.
function fit(c, words, room) {
  if (c.measureText(words).width <= room) return words;
  const parts = words.split(".");
  for (let i = 1; i < parts.length; i++) {
    const short = parts.slice(i).join(".");
    if (c.measureText(short).width <= room) return short;
  }
  return "";
}

function isLight(colour) {
  const value = parseInt(colour.slice(1, 7), 16), [r, g, b] = [value >> 16, (value >> 8) & 255, value & 255];
  return 0.299 * r + 0.587 * g + 0.114 * b > 118;  // where dark letters have more contrast than white ones
}
