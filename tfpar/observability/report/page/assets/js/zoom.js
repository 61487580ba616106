"use strict";
// Moves and scales the content of an SVG element: by wheel, by dragging, by two fingers.

class Zoom {
  // `content` is a group in `frame`; `size` what it takes at scale 1; `flat`: only the x axis
  // scales, and `change` draws it anew.
  constructor(frame, content, size, { flat = false, change = null } = {}) {
    Object.assign(this, { frame, content, size, flat, change });
    Object.assign(this, { x: 0, y: 0, scale: 1, pointers: new Map(), moved: 0 });
    frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    frame.addEventListener("pointerdown", (event) => this.down(event));
    frame.addEventListener("pointermove", (event) => this.drag(event));
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      frame.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
    }
    // The end of a drag is no click.
    frame.addEventListener("click", (event) => this.moved > 5 && event.stopPropagation(), true);
  }

  wheel(event) {
    if (this.flat && !event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const box = this.frame.getBoundingClientRect();
    this.by(
      Math.exp(-(event.deltaY || event.deltaX) * 0.0015),
      event.clientX - box.left,
      event.clientY - box.top,
    );
  }

  down(event) {
    if (event.button > 0) return;
    this.pointers.set(event.pointerId, [event.clientX, event.clientY]);
    this.moved = 0;
  }

  drag(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY];
    this.pointers.set(event.pointerId, now);
    this.moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
    if (this.pointers.size === 1) {
      this.x += now[0] - before[0];
      this.y += this.flat ? 0 : now[1] - before[1];
      return this.apply();
    }
    const [other] = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const apart = ([x, y]) => Math.hypot(x - other[0], y - other[1]);
    const box = this.frame.getBoundingClientRect();
    this.by(apart(now) / Math.max(1, apart(before)), other[0] - box.left, other[1] - box.top);
  }

  // Scale around a point of the frame, its middle if none is given.
  by(factor, x = this.frame.clientWidth / 2, y = this.frame.clientHeight / 2) {
    const scale = Math.min(
      Math.max(this.scale * factor, this.flat ? 1 : 0.05),
      this.flat ? 400 : 4,
    );
    this.x = x - ((x - this.x) * scale) / this.scale;
    this.y = y - ((y - this.y) * scale) / this.scale;
    this.scale = scale;
    this.apply();
  }

  // All of it, or its beginning where all would be too small to read.
  fit(least = 0.05) {
    const [width, height] = [this.frame.clientWidth, this.frame.clientHeight];
    const wanted = Math.min(width / this.size[0], height / this.size[1], 1);
    this.scale = Math.max(wanted, least);
    this.x = (width - this.size[0] * this.scale) / 2;
    this.y = wanted < least ? 12 : (height - this.size[1] * this.scale) / 2;
    this.apply();
  }

  // Bring a point of the content into the middle, unless it is well in view.
  reveal(x, y) {
    const [width, height] = [this.frame.clientWidth, this.frame.clientHeight];
    const at = [this.x + x * this.scale, this.y + y * this.scale];
    const seen = at[0] > 60 && at[0] < width - 60 && at[1] > 40 && at[1] < height - 40;
    if (seen && this.scale > 0.35) return;
    this.scale = Math.max(this.scale, 0.8);
    this.x = width / 2 - x * this.scale;
    this.y = height / 2 - y * this.scale;
    this.apply();
  }

  apply() {
    if (this.flat) {
      this.x = Math.min(0, Math.max(this.x, this.frame.clientWidth * (1 - this.scale)));
      return this.change();
    }
    this.content.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
  }
}

function zoomButtons(zoom) {
  const button = (text, name, key, act) =>
    h(
      "button",
      { class: "icon", "aria-label": name, "data-tip": `${name} (${key})`, onclick: act },
      text,
    );
  return h(
    "div",
    { class: "zoom", role: "group", "aria-label": "Zoom" },
    button("−", "Further", "−", () => zoom.by(1 / 1.4)),
    button("+", "Nearer", zoom.flat ? "+, or Ctrl and the wheel" : "+", () => zoom.by(1.4)),
    button("⤢", "All of it", "0", () => zoom.fit()),
  );
}
