// Memory of one tier over time, stacked by role, with the budget and the other timeline's total as lines.
class MemoryChart {
  constructor(element, legend, run, view, gutter) {
    Object.assign(this, { element, legend, run, view, gutter, canvas: element.querySelector("canvas"), tier: run.device_tier });
    // The one that tells most roles apart; an allocator knows only that bytes are taken. Of equals, the measured one.
    const told = run.timelines.map((t) => (t.memory[this.tier] ? t.memory[this.tier].roles.length : 0));
    this.stacked = told.lastIndexOf(Math.max(...told));
    view.listeners.push(() => this.draw());
  }

  get memory() { return this.run.timelines[this.stacked].memory[this.tier]; }

  get lines() {  // the other timelines, as totals
    return this.run.timelines.filter((_, i) => i !== this.stacked).map((t) => ({ measured: t.measured, memory: t.memory[this.tier] })).filter((l) => l.memory);
  }

  get capacity() { return this.tier === this.run.device_tier && this.run.budget ? this.run.budget : this.run.capacity[this.tier]; }

  // Biggest value on the axis: the content, and the limit if it is near enough to matter.
  get top() {
    const peak = Math.max(1, this.memory ? this.memory.peak : 0, ...this.lines.map((l) => l.memory.peak));
    return (this.capacity && this.capacity <= peak * 3 ? Math.max(peak, this.capacity) : peak) * 1.06;
  }

  order() {
    const roles = this.memory.roles, place = (i) => (STACK.indexOf(roles[i]) + 1 || 99);
    return roles.map((_, i) => i).sort((a, b) => place(a) - place(b));
  }

  plot() {
    const box = this.element.getBoundingClientRect();
    return { left: box.left + this.gutter(), width: box.width - this.gutter() };
  }

  draw() {
    paint(this.canvas, (c, width, height) => {
      const left = this.gutter(), bottom = height - 1, topPad = 18, view = this.view, top = this.top;
      const x = (t) => left + ((t - view.lo) / (view.hi - view.lo)) * (width - left), y = (b) => bottom - (b / top) * (bottom - topPad);
      this.y = y;
      c.font = FONT;
      c.lineWidth = 1;
      c.save();
      c.beginPath();
      c.rect(left, 0, width - left, height);
      c.clip();
      this.period(c, x, height);
      if (this.memory) this.stack(c, x, y, width);
      for (const line of this.lines) this.total(c, line.memory, x, y, line.measured);
      this.marks(c, x, topPad);
      c.restore();
      this.grid(c, y, left, width, top);
      this.limit(c, y, left, width, top);
      if (view.cursor !== null && view.cursor >= view.lo && view.cursor <= view.hi) {
        c.strokeStyle = colours.ink;
        c.globalAlpha = 0.55;
        c.beginPath();
        c.moveTo(Math.round(x(view.cursor)) + 0.5, topPad - 4);
        c.lineTo(Math.round(x(view.cursor)) + 0.5, bottom);
        c.stroke();
        c.globalAlpha = 1;
      }
    });
    this.writeLegend();
  }

  period(c, x, height) {  // what lies outside the step belongs to its neighbours
    const end = this.run.timelines[this.stacked].ns;
    c.fillStyle = colours.shade;
    if (this.view.lo < 0) c.fillRect(x(this.view.lo), 0, x(0) - x(this.view.lo), height);
    if (this.view.hi > end) c.fillRect(x(end), 0, x(this.view.hi) - x(end), height);
  }

  stack(c, x, y, width) {
    const { when, levels, roles } = this.memory, view = this.view, end = this.run.timelines[this.stacked].ns;
    const first = Math.max(0, lastAtMost(when, view.lo)), last = Math.max(first, lastAtMost(when, view.hi));
    const floor = new Float64Array(last - first + 1);
    for (const role of this.order()) {
      if (!levels.some((l) => l[role])) continue;
      const edge = floor.slice();
      for (let i = 0; i < edge.length; i++) edge[i] += levels[first + i][role];
      c.beginPath();
      const close = x(Math.min(end, view.hi + (view.hi - view.lo) * 0.01));
      for (let i = 0; i < edge.length; i++) {
        const right = i + 1 < edge.length ? x(when[first + i + 1]) : close;
        c.lineTo(x(when[first + i]), y(edge[i]));
        c.lineTo(right, y(edge[i]));
      }
      for (let i = edge.length - 1; i >= 0; i--) {
        const right = i + 1 < edge.length ? x(when[first + i + 1]) : close;
        c.lineTo(right, y(floor[i]));
        c.lineTo(x(when[first + i]), y(floor[i]));
      }
      c.closePath();
      c.fillStyle = colours[roles[role]];
      c.fill();
      floor.set(edge);
    }
  }

  total(c, memory, x, y, measured) {
    c.beginPath();
    memory.when.forEach((t, i) => {
      if (i) c.lineTo(x(t), y(memory.totals[i - 1]));
      c.lineTo(x(t), y(memory.totals[i]));
    });
    const own = this.run.timelines.find((t) => t.measured === measured);
    c.lineTo(x(own.ns), y(memory.totals[memory.totals.length - 1]));
    c.strokeStyle = colours.card;
    c.lineWidth = 3.5;
    c.stroke();
    c.strokeStyle = colours.ink;
    c.lineWidth = 1.5;
    c.setLineDash(measured ? [] : [5, 3]);
    c.stroke();
    c.setLineDash([]);
    c.lineWidth = 1;
  }

  marks(c, x, topPad) {  // where each phase begins on the device
    const lane = this.run.timelines[this.stacked].lanes[0];
    if (!lane || !this.run.lanes[0].computes) return;
    const begins = {};
    for (let i = 0; i < lane.n; i++) {
      const phase = kindOf(lane, i)[0];
      if (phase && phase !== "recompute" && !(phase in begins)) begins[phase] = lane.start[i];
    }
    let free = -Infinity;
    c.textAlign = "left";
    c.textBaseline = "alphabetic";
    const sorted = Object.entries(begins).sort((a, b) => a[1] - b[1]), running = sorted.filter(([, start]) => start <= this.view.lo).length;
    for (const [phase, start] of sorted.slice(Math.max(0, running - 1))) {
      const at = Math.max(x(start), x(this.view.lo)), wide = c.measureText(phase).width + 4;
      if (x(start) > x(this.view.hi) || at < free) continue;
      const left = at + wide > x(this.view.hi) ? at - wide - 4 : at;  // near the right end, the word stands before its mark
      if (left < free) continue;
      c.fillStyle = colours.muted;
      c.fillText(phase, left + 4, topPad - 6);
      if (x(start) >= x(this.view.lo)) c.fillRect(Math.round(x(start)), topPad - 15, 1, 14);
      free = left + wide + 8;
    }
  }

  grid(c, y, left, width, top) {
    c.textBaseline = "middle";
    for (const bytes of byteTicks(top, 6)) {
      const at = Math.round(y(bytes)) + 0.5;
      c.strokeStyle = colours.ink;
      c.globalAlpha = bytes ? 0.09 : 0.35;
      c.beginPath();
      c.moveTo(left, at);
      c.lineTo(width, at);
      c.stroke();
      c.globalAlpha = 1;
      if (!bytes && !left) continue;
      this.text(c, axisBytes(bytes, top), left ? left - 10 : 4, left ? Math.min(at, this.element.clientHeight - 7) : at - 8, left ? "right" : "left", colours.muted, !left);
    }
  }

  limit(c, y, left, width, top) {
    if (!this.capacity) return;
    const words = this.tier === this.run.device_tier ? `budget ${formatBytes(this.capacity)}` : `${this.tier} has ${formatBytes(this.capacity)}`;
    if (this.capacity > top) {
      this.text(c, `${words}, far above`, width - 4, 26, "right", colours.muted, true);
      return;
    }
    const at = Math.round(y(this.capacity)) + 0.5;
    c.strokeStyle = colours.recompute;
    c.lineWidth = 1.5;
    c.setLineDash([7, 4]);
    c.beginPath();
    c.moveTo(left, at);
    c.lineTo(width, at);
    c.stroke();
    c.setLineDash([]);
    c.lineWidth = 1;
    this.text(c, words, width - 4, at - 9, "right", colours.warning, true);
  }

  text(c, words, x, y, align, colour, halo) {
    c.textAlign = align;
    c.textBaseline = "middle";
    if (halo) {
      c.strokeStyle = colours.card;
      c.lineWidth = 3;
      c.lineJoin = "round";
      c.strokeText(words, x, y);
      c.lineWidth = 1;
    }
    c.fillStyle = colour;
    c.fillText(words, x, y);
  }

  at(time) {  // what is held then, the top of the stack first
    const memory = this.memory, i = memory ? lastAtMost(memory.when, time) : -1;
    if (i < 0 || time > this.run.timelines[this.stacked].ns) return null;
    const held = this.order().reverse().map((role) => ({ role: memory.roles[role], words: memory.words[role], bytes: memory.levels[i][role] }));
    return { held: held.filter((h) => h.bytes), total: memory.totals[i], since: memory.when[i] };
  }

  others(time) {
    return this.lines.map(({ measured, memory }) => [measured ? "measured" : "predicted", memory.totals[Math.max(0, lastAtMost(memory.when, time))]]);
  }

  html(time) {
    const now = this.at(time);
    if (!now) return "";
    const rows = now.held.map((h) => `<dt><span class="swatch" style="background:${colourVar(h.role)}"></span>${escape(h.words)}</dt><dd>${formatBytes(h.bytes)}</dd>`);
    rows.push(`<dt class="total">together</dt><dd class="total">${formatBytes(now.total)}</dd>`);
    for (const [words, bytes] of this.others(time)) rows.push(`<dt>${words}</dt><dd>${formatBytes(bytes)}</dd>`);
    return `<b>${escape(this.tier)}</b> at ${formatNs(time)}<dl>${rows.join("")}</dl>`;
  }

  writeLegend() {
    const memory = this.memory, now = this.view.cursor === null ? null : this.at(this.view.cursor);
    const held = now && Object.fromEntries(now.held.map((h) => [h.role, h.bytes]));
    const roles = memory ? this.order().filter((role) => memory.levels.some((l) => l[role])) : [];
    const items = roles.map((role) => {
      const name = memory.roles[role], most = memory.levels.reduce((top, l) => Math.max(top, l[role]), 0);
      return `<li><span class="swatch" style="background:${colourVar(name)}"></span>${escape(memory.words[role])} <b>${held ? formatBytes(held[name] || 0) : formatBytes(most)}</b></li>`;
    });
    const first = now ? `<li>at ${formatNs(this.view.cursor)} <b>${formatBytes(now.total)}</b></li>` : memory ? "<li>at most</li>" : `<li>no record of ${escape(this.tier)}</li>`;
    const lines = this.lines.map((l) => `<li><span class="swatch line${l.measured ? "" : " dashed"}"></span>${l.measured ? "measured" : "predicted"}, together</li>`);
    const html = first + items.join("") + lines.join("");
    if (html !== this.written) this.legend.innerHTML = this.written = html;
  }
}
