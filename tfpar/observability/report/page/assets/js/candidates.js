"use strict";
// What else was found or priced: time against memory, and why each lost.

const CANDIDATE_KINDS = {
  plan: "chosen",
  layout: "another mesh",
  pipeline: "other stages",
  move: "tried to fit",
  baseline: "baseline",
  trial: "was run",
};

class CandidatesView {
  constructor(model, state) {
    Object.assign(this, { model, state });
    this.title = "Candidates";
  }

  draw() {
    const { candidates, machines } = this.model.report;
    if (candidates.length < 2) {
      return emptyState(
        "Nothing else was priced",
        "Candidates are what a planner found on other meshes, and baselines. A plan that is searched for a cluster has them:",
        "tfpar plan SCRIPT.PY:FUNCTION --mesh 2x8 --cluster dgx-a100 -o plan.json",
      );
    }
    this.front = this.pareto(candidates);
    this.limit = machines && machines.memory_limit;
    this.plot = h("div", { class: "plot" });
    new ResizeObserver(() => this.fill()).observe(this.plot);
    return h(
      "div",
      { class: "candidates-view" },
      h(
        "section",
        { class: "card wide" },
        h(
          "h2",
          {},
          "Time against memory",
          h("small", {}, "left and low is better; the line joins those that none beats in both"),
        ),
        this.plot,
        this.key(),
      ),
      this.table(candidates),
    );
  }

  key() {
    const kinds = new Set(this.model.report.candidates.map((each) => each.kind));
    return h(
      "ul",
      { class: "legend" },
      Object.entries(CANDIDATE_KINDS)
        .filter(([kind]) => kinds.has(kind))
        .map(([kind, name]) => h("li", {}, h("i", { class: `dot ${kind}` }), name)),
      h("li", {}, h("i", { class: "dot unfit" }), "does not fit"),
    );
  }

  known(candidates) {
    return candidates.filter((each) => each.seconds !== null && each.memory_bytes !== null);
  }

  // Of those that fit, the ones that no other beats in time and memory.
  pareto(candidates) {
    const known = this.known(candidates).filter((each) => each.fits !== false);
    const beats = (a, b) =>
      a.seconds <= b.seconds &&
      a.memory_bytes <= b.memory_bytes &&
      (a.seconds < b.seconds || a.memory_bytes < b.memory_bytes);
    return known
      .filter((each) => !known.some((other) => beats(other, each)))
      .sort((a, b) => a.seconds - b.seconds);
  }

  // A scale over `values` and round numbers on it: in powers where they are far apart.
  scale(values, from, to, round) {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const far = most / least > 6;
    const map = far ? Math.log : (x) => x;
    const pad = (map(most) - map(least) || Math.abs(map(most)) || 1) * 0.08;
    let [low, high] = [map(least) - pad, map(most) + pad];
    if (!far) low = Math.max(0, low);
    const at = (value) => from + ((map(value) - low) / (high - low)) * (to - from);
    const span = [far ? Math.exp(low) : low, far ? Math.exp(high) : high];
    return { at, ticks: round(span, far) };
  }

  roundTicks([low, high], far, base) {
    if (far) {
      const found = [];
      for (
        let power = base ** Math.floor(Math.log(low) / Math.log(base));
        power <= high;
        power *= base
      ) {
        for (const n of base === 2 ? [1] : [1, 2, 5]) found.push(n * power);
      }
      return found.filter((value) => value >= low && value <= high);
    }
    const wanted = (high - low) / 5;
    const power =
      base === 2 ? 2 ** Math.floor(Math.log2(wanted)) : 10 ** Math.floor(Math.log10(wanted));
    const step = (base === 2 ? [1, 2] : [1, 2, 5, 10])
      .map((n) => n * power)
      .find((n) => n >= wanted);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i += 1) found.push(i * step);
    return found;
  }

  fill() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const height = Math.max(280, Math.min(460, width * 0.42));
    const [left, bottom] = [86, 46];
    const known = this.known(this.model.report.candidates);
    const bytes = [...known.map((each) => each.memory_bytes), ...(this.limit ? [this.limit] : [])];
    const x = this.scale(
      known.map((each) => each.seconds),
      left,
      width - 24,
      (span, far) => this.roundTicks(span, far, 10),
    );
    const y = this.scale(bytes, height - bottom, 22, (span, far) => this.roundTicks(span, far, 2));
    const line = this.front.map((each, i) => {
      const [px, py] = [x.at(each.seconds), y.at(each.memory_bytes)];
      return i ? `L${px},${y.at(this.front[i - 1].memory_bytes)} L${px},${py}` : `M${px},${py}`;
    });
    this.plot.replaceChildren(
      svg(
        "svg",
        {
          class: "scatter",
          width,
          height,
          role: "group",
          "aria-label": "Time and memory of each candidate",
        },
        x.ticks
          .map((value) => [
            svg("line", {
              class: "grid",
              x1: x.at(value),
              x2: x.at(value),
              y1: 14,
              y2: height - bottom,
            }),
            svg(
              "text",
              { class: "tick", x: x.at(value), y: height - bottom + 18, "text-anchor": "middle" },
              format.seconds(value),
            ),
          ])
          .flat(),
        y.ticks
          .map((value) => [
            svg("line", {
              class: "grid",
              x1: left,
              x2: width - 24,
              y1: y.at(value),
              y2: y.at(value),
            }),
            svg(
              "text",
              { class: "tick", x: left - 8, y: y.at(value) + 4, "text-anchor": "end" },
              format.bytes(value),
            ),
          ])
          .flat(),
        this.limit && [
          svg("line", {
            class: "limit",
            x1: left,
            x2: width - 24,
            y1: y.at(this.limit),
            y2: y.at(this.limit),
          }),
          svg(
            "text",
            { class: "limit", x: width - 28, y: y.at(this.limit) - 6, "text-anchor": "end" },
            `limit ${format.bytes(this.limit)}`,
          ),
        ],
        svg(
          "text",
          { class: "axis", x: width - 24, y: height - 8, "text-anchor": "end" },
          "a step →",
        ),
        svg("text", { class: "axis", x: 4, y: 12 }, "memory of a rank ↑"),
        svg("path", { class: "front", d: line.join(" ") }),
        this.points(known, x, y, width),
      ),
    );
  }

  points(known, x, y, width) {
    const at = (each) => [x.at(each.seconds), y.at(each.memory_bytes)];
    const taken = known.map((each) => around(...at(each), 8, 8));
    // The plan and baselines choose the places of their names first.
    const order = [...known].sort(
      (a, b) =>
        (a.kind !== "plan") - (b.kind !== "plan") ||
        (a.kind !== "baseline") - (b.kind !== "baseline"),
    );
    const drawn = order.map((each) => {
      const [px, py] = at(each);
      const place = this.freePlace(px, py, textWidth(each.name, 12), width, taken);
      if (place) taken.push(place.box);
      return svg(
        "g",
        {
          class: `point ${each.kind} ${each.fits === false ? "unfit" : ""}`,
          "data-tip": this.tip(each),
          tabindex: 0,
        },
        each.kind === "baseline"
          ? svg("path", { d: `M${px},${py - 7} l7,7 l-7,7 l-7,-7 z` })
          : svg("circle", { cx: px, cy: py, r: each.kind === "plan" ? 8 : 5.5 }),
        place && svg("text", { x: place.x, y: place.y + 4, "text-anchor": "middle" }, each.name),
      );
    });
    return drawn.reverse(); // the plan lies on top
  }

  // Where a name of this width covers no point and no other name: right, left, below or above.
  freePlace(px, py, wide, width, taken) {
    const places = [
      [px + 14 + wide / 2, py],
      [px - 14 - wide / 2, py],
      [px, py + 18],
      [px, py - 18],
    ];
    for (const [x, y] of places) {
      const box = around(x, y, wide / 2, 7);
      const inside = box.x0 > 88 && box.x1 < width - 4;
      const covers = (other) =>
        other.x0 < box.x1 && box.x0 < other.x1 && other.y0 < box.y1 && box.y0 < other.y1;
      if (inside && !taken.some(covers)) return { x, y, box };
    }
    return null;
  }

  tip(each) {
    return [
      `${each.name} (${CANDIDATE_KINDS[each.kind]})`,
      `${format.seconds(each.seconds)} a step, ${format.bytes(each.memory_bytes)}`,
      each.why,
    ]
      .filter(Boolean)
      .join("\n");
  }

  table(candidates) {
    const base = this.model.seconds;
    const best = new Set(this.front);
    const measured = candidates.some((each) => each.measured_s !== null);
    const corrected = candidates.some((each) => each.corrected_s !== null);
    const order = [...candidates].sort((a, b) => (a.seconds ?? Infinity) - (b.seconds ?? Infinity));
    const row = (each) =>
      h(
        "tr",
        { class: each.kind === "plan" ? "chosen" : "" },
        h(
          "td",
          { class: "name" },
          h("i", { class: `dot ${each.kind} ${each.fits === false ? "unfit" : ""}` }),
          " ",
          each.name,
          best.has(each) && h("span", { class: "tag" }, "front"),
        ),
        h("td", { class: "kind" }, CANDIDATE_KINDS[each.kind]),
        h("td", { class: "number" }, format.seconds(each.seconds)),
        h(
          "td",
          { class: "number" },
          each.seconds !== null && base && each.kind !== "plan"
            ? format.against(each.seconds, base)
            : "",
        ),
        h("td", { class: "number" }, format.bytes(each.memory_bytes)),
        h("td", {}, each.fits === null ? "" : each.fits ? "yes" : "no"),
        corrected && h("td", { class: "number" }, format.seconds(each.corrected_s)),
        measured && h("td", { class: "number" }, format.seconds(each.measured_s)),
        h("td", { class: "why" }, each.why),
        h("td", { class: "parts" }, this.parts(each)),
      );
    const heads = [
      "Candidate",
      "Kind",
      "A step",
      "Longer",
      "Memory",
      "Fits",
      ...(corrected ? ["Corrected"] : []),
      ...(measured ? ["Measured"] : []),
      "Why it lost",
      "Of what",
    ];
    const numbers = new Set(["A step", "Longer", "Memory", "Corrected", "Measured"]);
    return h(
      "section",
      { class: "card wide" },
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
              heads.map((name) =>
                h("th", { class: numbers.has(name) ? "number" : name.toLowerCase() }, name),
              ),
            ),
          ),
          h("tbody", {}, order.map(row)),
        ),
      ),
    );
  }

  parts(each) {
    if (!each.parts.length) return null;
    const { found } = overview.parts(each);
    return bar(
      found,
      sum(found, (part) => part.value),
      format.seconds,
    );
  }
}

function around(x, y, dx, dy) {
  return { x0: x - dx, x1: x + dx, y0: y - dy, y1: y + dy };
}
