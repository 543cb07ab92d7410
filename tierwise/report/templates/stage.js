// Memory, lanes, axis and overview of one run, on one stretch of time.
class Stage {
  constructor(element) {
    this.element = element;
    this.run = runs[+element.dataset.stage];
    element.hidden = false;
    const { timelines } = this.run;
    let lo = 0, hi = Math.max(...timelines.map((t) => t.ns), 1);
    for (const timeline of timelines) {
      for (const lane of timeline.lanes) {
        if (!lane.n) continue;
        lo = Math.min(lo, lane.start[0]);
        hi = Math.max(hi, lane.end.reduce((a, b) => Math.max(a, b), 0));
      }
    }
    this.view = new View(lo, hi);
    const gutter = () => parseFloat(getComputedStyle(element).getPropertyValue("--gutter")) || 0;
    this.memory = new MemoryChart(element.querySelector("[data-memory]"), element.querySelector("[data-legend]"), this.run, this.view, gutter);
    this.lanes = [...element.querySelectorAll("[data-lane]")].map(
      (row) => new LaneRow(row, this.run, this.run.lanes.findIndex((lane) => lane.name === row.dataset.lane), this.view));
    this.axis = element.querySelector(".axis canvas");
    this.overview = element.querySelector(".overview");
    this.view.listeners.push(() => this.drawAxis(), () => this.drawOverview());
    this.steerMemory();
    this.lanes.forEach((lane) => this.steerLane(lane));
    this.steerOverview();
    this.tools();
    this.writeKinds();
    new ResizeObserver(() => this.view.changed()).observe(element);
    this.view.changed();
  }

  leave() {
    hideTip();
    for (const lane of this.lanes) lane.chosen = null;
    this.view.point(null);
  }

  steerMemory() {
    const chart = this.memory, { view } = this;
    steer(chart.element, view, this.element, () => chart.plot(), {
      onMove: (event, time) => {
        const html = chart.html(time);
        if (!html) return this.leave();
        view.point(time);
        showTip(html, event.clientX, event.clientY);
      },
      onLeave: () => this.leave(),
      onKey: (key) => {
        if (key !== "ArrowLeft" && key !== "ArrowRight") return false;
        if (!chart.memory) return true;
        const when = chart.memory.when, i = view.cursor === null ? lastAtMost(when, view.lo) : lastAtMost(when, view.cursor) + (key === "ArrowLeft" ? -1 : 1);
        const time = when[Math.min(when.length - 1, Math.max(0, i))];
        view.show(time, time);
        view.point(time);
        const now = chart.at(time);
        say(`${chart.tier} at ${formatNs(time)}: ${formatBytes(now.total)}; ${now.held.map((h) => `${h.words} ${formatBytes(h.bytes)}`).join(", ")}`);
        return true;
      },
    });
  }

  steerLane(lane) {
    const { view } = this;
    steer(lane.strip, view, this.element, () => lane.plot(), {
      onMove: (event, time) => {
        for (const other of this.lanes) other.chosen = null;
        lane.chosen = lane.find(time, event.clientY - lane.strip.getBoundingClientRect().top);
        view.point(time);
        if (lane.chosen) showTip(factsHtml(lane.facts(lane.chosen)), event.clientX, event.clientY);
        else hideTip();
      },
      onLeave: () => this.leave(),
      onKey: (key) => {
        const does = { ArrowLeft: () => lane.step(-1), ArrowRight: () => lane.step(1), ArrowUp: () => lane.other(), ArrowDown: () => lane.other(), Home: () => { lane.chosen = [lane.chosen ? lane.chosen[0] : 0, 0]; lane.step(0); }, End: () => { lane.chosen = [lane.chosen ? lane.chosen[0] : 0, 1e9]; lane.step(0); } }[key];
        if (!does) return false;
        does();
        if (lane.chosen) {
          const [row, i] = lane.chosen, box = lane.plot(), middle = (lane.bars[row].start[i] + lane.bars[row].end[i]) / 2;
          const x = box.left + ((middle - view.lo) / (view.hi - view.lo)) * box.width;
          showTip(factsHtml(lane.facts(lane.chosen)), x, lane.strip.getBoundingClientRect().bottom - 10);
        }
        return true;
      },
    });
  }

  steerOverview() {
    const { view, overview } = this;
    const timeAt = (event) => {
      const box = overview.getBoundingClientRect();
      return view.min + (Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))) * (view.max - view.min);
    };
    let from = null;
    overview.addEventListener("pointerdown", (event) => {
      from = { time: timeAt(event), x: event.clientX };
      overview.setPointerCapture(event.pointerId);
    });
    overview.addEventListener("pointermove", (event) => {
      if (from && Math.abs(event.clientX - from.x) > 4) view.set(Math.min(from.time, timeAt(event)), Math.max(from.time, timeAt(event)));
    });
    overview.addEventListener("pointerup", (event) => {
      if (from && Math.abs(event.clientX - from.x) <= 4) {
        const half = (view.hi - view.lo) / 2;
        view.set(from.time - half, from.time + half);
      }
      from = null;
    });
    overview.addEventListener("dblclick", () => view.fit());
  }

  tools() {
    const zoom = { in: () => this.view.zoom(2), out: () => this.view.zoom(0.5), fit: () => this.view.fit() };
    for (const button of this.element.querySelectorAll("[data-zoom]")) button.addEventListener("click", zoom[button.dataset.zoom]);
    const tiers = [...new Set(this.run.timelines.flatMap((t) => Object.keys(t.memory)))].filter((tier) => this.run.timelines.some((t) => t.memory[tier] && t.memory[tier].peak));
    const group = this.element.querySelector("[data-choose-tier]");
    if (tiers.length > 1) group.innerHTML = tiers.map((tier) => `<button type="button" data-tier="${escape(tier)}" aria-pressed="${tier === this.memory.tier}">${escape(tier)}</button>`).join("");
    choose(group, (button) => { this.memory.tier = button.dataset.tier; this.view.changed(); });
    const which = this.element.querySelector("[data-choose-timeline]");
    for (const button of which ? which.querySelectorAll("button") : []) button.setAttribute("aria-pressed", +button.dataset.timeline === this.memory.stacked);
    if (which) choose(which, (button) => { this.memory.stacked = +button.dataset.timeline; this.view.changed(); });
  }

  writeKinds() {
    const seen = new Set();
    for (const timeline of this.run.timelines) for (const lane of timeline.lanes) for (const kind of lane.kind) seen.add(kind);
    const phases = ["forward", "backward", "recompute", "update"], roles = new Set();
    const used = new Set([...seen].map((kind) => page.kinds[kind][0]));
    for (const kind of seen) if (isCopy(page.kinds[kind])) roles.add(page.kinds[kind][1]);
    const items = phases.filter((phase) => used.has(phase)).map((phase) => [phase, phase]);
    for (const role of STACK.filter((r) => roles.has(r))) items.push([role, `copies of ${roleWords(role)}`]);
    const html = items.map(([colour, words]) => `<li><span class="swatch${colour === "recompute" ? " hatched" : ""}" style="background-color:${colourVar(colour)}"></span>${words}</li>`);
    if (this.run.timelines.length > 1) html.push("<li>above: predicted, below: measured</li>");
    this.element.querySelector("[data-kinds]").innerHTML = html.join("");
  }

  drawAxis() {
    paint(this.axis, (c, width) => {
      const { lo, hi } = this.view, marks = ticks(lo, hi, Math.max(2, width / 110)), step = marks.length > 1 ? marks[1] - marks[0] : hi - lo;
      c.font = FONT;
      c.textBaseline = "top";
      for (const mark of marks) {
        const x = ((mark - lo) / (hi - lo)) * width, words = axisTime(mark, step), half = c.measureText(words).width / 2;
        c.fillStyle = colours.line;
        c.fillRect(Math.min(Math.round(x), width - 1), 0, 1, 5);
        c.fillStyle = colours.muted;
        c.textAlign = x < half ? "left" : x > width - half ? "right" : "center";
        c.fillText(words, Math.min(width, Math.max(0, x)), 8);
      }
    });
  }

  drawOverview() {
    paint(this.overview.querySelector("canvas"), (c, width, height) => {
      const { view } = this, memory = this.memory.memory, x = (t) => ((t - view.min) / (view.max - view.min)) * width;
      if (memory) {
        c.beginPath();
        c.moveTo(x(0), height);
        memory.when.forEach((t, i) => {
          if (i) c.lineTo(x(t), height - (memory.totals[i - 1] / memory.peak) * (height - 5));
          c.lineTo(x(t), height - (memory.totals[i] / memory.peak) * (height - 5));
        });
        const end = x(this.run.timelines[this.memory.stacked].ns);
        c.lineTo(end, height - (memory.totals[memory.totals.length - 1] / memory.peak) * (height - 5));
        c.lineTo(end, height);
        c.fillStyle = colours.muted;
        c.globalAlpha = 0.35;
        c.fill();
        c.globalAlpha = 1;
      }
      if (view.zoomed) {
        c.fillStyle = colours.card;
        c.globalAlpha = 0.7;
        c.fillRect(0, 0, x(view.lo), height);
        c.fillRect(x(view.hi), 0, width - x(view.hi), height);
        c.globalAlpha = 1;
        c.strokeStyle = colours.accent;
        c.lineWidth = 2;
        c.strokeRect(x(view.lo), 1, Math.max(3, x(view.hi) - x(view.lo)), height - 2);
      }
    });
  }
}

// A row of buttons of which one is pressed.
function choose(group, onChoose) {
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
    onChoose(button);
  });
}
