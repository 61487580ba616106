"use strict";
// Which candidate is the fastest if links, devices, the batch or the memory of a device were others:
// computed from the seconds of each by what they grow with, as the report stores them.

const SLIDERS = {
  links: { name: "Links", as: "as fast" },
  devices: { name: "Devices", as: "as fast" },
  batch: { name: "Batch", as: "as large" },
  memory: { name: "Memory of a device", as: "as large" },
};

// Positions are quarters of a power of two, from an eighth to eight times.
const SLIDER = { steps: 4, most: 12 };

class Sliders {
  constructor(model, state) {
    Object.assign(this, { model, state });
    const { candidates, machines } = model.report;
    this.candidates = candidates.filter((each) => each.causes && each.memory_bytes !== null);
    this.others = candidates.filter((each) => !each.causes && each.seconds !== null).length;
    this.limit = machines && machines.memory_limit;
    this.names = Object.keys(SLIDERS).filter((name) => name !== "memory" || this.limit);
  }

  draw() {
    this.inputs = {};
    this.texts = {};
    this.rows = h("tbody", {});
    const slider = (name) => {
      this.texts[name] = h("output", {});
      this.inputs[name] = h("input", {
        type: "range",
        min: -SLIDER.most,
        max: SLIDER.most,
        step: 1,
        "data-slider": name,
        "aria-label": SLIDERS[name].name,
        oninput: (event) => this.state.set({ [name]: this.written(event.target.value) }),
      });
      return h("label", {}, h("span", {}, SLIDERS[name].name), this.inputs[name], this.texts[name]);
    };
    const titles = ["Plan", "A step", "Than now", "Memory of a rank", ""];
    return h(
      "section",
      { class: "card wide sliders" },
      h(
        "h2",
        {},
        "If it were otherwise",
        h(
          "small",
          {},
          "estimated from the parts of each step; a plan that is made anew may be another",
        ),
      ),
      h("div", { class: "sliders-inputs" }, this.names.map(slider)),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "rows still" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              titles.map((title, i) => h("th", { class: i % 4 ? "number" : "" }, title)),
            ),
          ),
          this.rows,
        ),
      ),
      this.others > 0 &&
        h(
          "p",
          { class: "note" },
          `${format.plural(this.others, "candidate")} of which only the whole time is known ${this.others === 1 ? "is" : "are"} left out. A larger batch is cut into more microbatches of the same size, so that memory stays as it is.`,
        ),
    );
  }

  // What the address says of a position: nothing of the middle.
  written(position) {
    return Number(position) === 0 ? null : String(position);
  }

  position(name) {
    const found = Number(this.state.get(name) || 0);
    return Math.max(-SLIDER.most, Math.min(SLIDER.most, Math.round(found) || 0));
  }

  factor(name) {
    return 2 ** (this.position(name) / SLIDER.steps);
  }

  seconds({ causes }) {
    const [links, devices, batch] = ["links", "devices", "batch"].map((name) => this.factor(name));
    const passes = batch * (causes.compute_s / devices + causes.links_s / links);
    return passes + causes.once_compute_s / devices + causes.once_links_s / links + causes.start_s;
  }

  // Bring the table up to what the address says.
  update() {
    for (const name of this.names) {
      this.inputs[name].value = this.position(name);
      const of = name === "memory" ? `: ${format.bytes(this.limit * this.factor(name))}` : "";
      this.texts[name].textContent = `${this.factor(name).toPrecision(3)} × ${SLIDERS[name].as}${of}`;
    }
    const room = this.limit ? this.limit * this.factor("memory") : Infinity;
    const found = this.candidates
      .map((each) => ({ each, seconds: this.seconds(each), fits: each.memory_bytes <= room }))
      .sort((a, b) => b.fits - a.fits || a.seconds - b.seconds);
    this.rows.replaceChildren(
      ...found.map(({ each, seconds, fits }, i) =>
        h(
          "tr",
          { "data-candidate": each.name, "data-value": seconds },
          h(
            "td",
            {},
            each.name,
            i === 0 && fits && found.length > 1 && h("span", { class: "tag" }, "fastest"),
          ),
          h("td", { class: "number" }, format.seconds(seconds)),
          h("td", { class: "number" }, format.against(seconds, each.seconds)),
          h("td", { class: "number" }, format.bytes(each.memory_bytes)),
          h("td", {}, fits ? "fits" : "does not fit"),
        ),
      ),
    );
  }
}
