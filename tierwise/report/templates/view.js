// Which stretch of time is on screen. Everything that shows time listens to one of these.
class View {
  constructor(lo, hi) {
    Object.assign(this, { min: lo, max: hi, lo, hi, listeners: [], cursor: null });
  }

  get zoomed() { return this.hi - this.lo < (this.max - this.min) * 0.9999; }

  set(lo, hi) {
    const least = Math.max(20, (this.max - this.min) / 1e6), span = Math.min(Math.max(hi - lo, least), this.max - this.min);
    const from = Math.min(Math.max(lo, this.min), this.max - span);
    this.lo = from;
    this.hi = from + span;
    this.changed();
  }

  zoom(factor, at = (this.lo + this.hi) / 2) {
    const span = (this.hi - this.lo) / factor, share = (at - this.lo) / (this.hi - this.lo);
    this.set(at - span * share, at + span * (1 - share));
  }

  pan(share) {
    const by = (this.hi - this.lo) * share;
    this.set(this.lo + by, this.hi + by);
  }

  fit() { this.set(this.min, this.max); }

  show(start, end) {
    if (start >= this.lo && end <= this.hi) return;
    const span = Math.max(this.hi - this.lo, (end - start) * 1.5), middle = (start + end) / 2;
    this.set(middle - span / 2, middle + span / 2);
  }

  point(time) {
    this.cursor = time;
    this.changed();
  }

  changed() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      for (const listener of this.listeners) listener();
    });
  }
}

// A canvas in CSS pixels, sharp on any screen. Calls draw(context, width, height).
function paint(canvas, draw) {
  const { width, height } = canvas.parentElement.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  draw(context, width, height);
}

let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = new Proxy({}, {
    get(cache, name) {
      if (!(name in cache)) cache[name] = style.getPropertyValue(`--${name}`).trim() || style.getPropertyValue("--other").trim();
      return cache[name];
    },
  });
}
readColours();
const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';

// Drag, wheel, pinch and keys on something that shows a View. `plot()` says where time is drawn: {left, width} on the screen.
function steer(element, view, stage, plot, { onMove, onLeave, onKey }) {
  const pointers = new Map();
  const timeAt = (x) => view.lo + ((x - plot().left) / plot().width) * (view.hi - view.lo);
  element.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      view.zoom(Math.exp(-event.deltaY * 0.006), timeAt(event.clientX));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && view.zoomed) {
      event.preventDefault();
      view.pan(event.deltaX / plot().width);
    }
  }, { passive: false });
  element.addEventListener("dblclick", (event) => view.zoom(event.shiftKey ? 1 / 3 : 3, timeAt(event.clientX)));
  element.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.clientX);
    if (event.pointerType === "touch") onMove(event, timeAt(event.clientX));
  });
  element.addEventListener("pointermove", (event) => {
    if (pointers.has(event.pointerId) && (event.buttons || event.pointerType === "touch")) {
      const before = [...pointers.values()], x = pointers.get(event.pointerId);
      if (pointers.size === 2) {
        pointers.set(event.pointerId, event.clientX);
        const after = [...pointers.values()], gap = (pair) => Math.max(8, Math.abs(pair[0] - pair[1]));
        view.zoom(gap(after) / gap(before), timeAt((after[0] + after[1]) / 2));
      } else if (Math.abs(event.clientX - x) > 2 || stage.classList.contains("dragging")) {
        if (view.zoomed) {
          element.setPointerCapture(event.pointerId);
          stage.classList.add("dragging");
          hideTip();
          view.pan((x - event.clientX) / plot().width);
        }
        pointers.set(event.pointerId, event.clientX);
      }
    } else {
      onMove(event, timeAt(event.clientX));
    }
  });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) {
    element.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      stage.classList.remove("dragging");
    });
  }
  element.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") onLeave(); });
  element.addEventListener("blur", onLeave);
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const middle = view.cursor ?? undefined;
    const does = {
      "+": () => view.zoom(1.6, middle), "=": () => view.zoom(1.6, middle), "-": () => view.zoom(1 / 1.6, middle), "0": () => view.fit(),
      Escape: () => { onLeave(); view.fit(); },
    }[event.key];
    if (does) does();
    else if (!onKey(event.key)) return;
    event.preventDefault();
  });
}
