"use strict";
// Candidates on machines that are as sliders say; and the best plan for the same model on other
// machines: a row for each cluster, a column for each mesh.

class WhatIfView {
  constructor(model, state) {
    this.model = model;
    this.title = "What if";
    this.sliders = new Sliders(model, state);
  }

  draw() {
    const slides = this.sliders.candidates.length > 0;
    return h("div", { class: "what-if-view" }, slides && this.sliders.draw(), this.elsewhere());
  }

  update() {
    if (this.sliders.candidates.length) this.sliders.update();
  }

  elsewhere() {
    const found = this.found();
    if (!found.length) {
      return emptyState(
        "No other machines were priced",
        "When this plan was made, it was not asked what other machines would do. To ask, name clusters and meshes:",
        "tfpar plan SCRIPT.PY:FUNCTION --mesh 2x8 --cluster dgx-a100 --what-if dgx-h100:2x8 v100-ethernet:4x8 -o plan.json",
      );
    }
    const meshes = [...grouped(found, (each) => each.mesh)]
      .map(([mesh, all]) => ({ mesh, ranks: all[0].ranks }))
      .sort((a, b) => a.ranks - b.ranks || a.mesh.localeCompare(b.mesh));
    const clusters = [...grouped(found, (each) => each.cluster).keys()];
    const times = found
      .filter((each) => each.fits && each.seconds !== null)
      .map((each) => each.seconds);
    const [least, most] = [Math.min(...times), Math.max(...times)];
    const strength = (seconds) =>
      most > least ? 1 - Math.log(seconds / least) / Math.log(most / least) : 1;
    const cell = (cluster, mesh) =>
      this.cell(
        found.find((each) => each.cluster === cluster && each.mesh === mesh),
        strength,
      );
    return h(
      "section",
      { class: "card wide" },
      h(
        "h2",
        {},
        "The same model elsewhere",
        h(
          "small",
          {},
          `a step of the best plan; this one takes ${format.seconds(this.model.seconds)}. The darker, the faster.`,
        ),
      ),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "matrix" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "Cluster"),
              meshes.map(({ mesh, ranks }) =>
                h(
                  "th",
                  { scope: "col" },
                  mesh,
                  h("small", {}, ` ${format.plural(ranks, "rank")}`),
                ),
              ),
            ),
          ),
          h(
            "tbody",
            {},
            clusters.map((cluster) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, cluster),
                meshes.map(({ mesh }) => cell(cluster, mesh)),
              ),
            ),
          ),
        ),
      ),
    );
  }

  // What was asked, and this plan itself where a row and a column are for as many of its machines.
  found() {
    const { what_if: asked, machines, facts, cost } = this.model.report;
    if (!asked.length || !machines || !cost) return asked;
    const isHere = (each) => each.cluster === machines.name && each.ranks === facts.ranks;
    const column = asked.find((each) => each.ranks === facts.ranks);
    const row = asked.some((each) => each.cluster === machines.name);
    if (!column || !row || asked.some(isHere)) return asked;
    const { seconds, memory_bytes } = cost;
    const fits = !machines.memory_limit || memory_bytes <= machines.memory_limit;
    const { mesh, ranks } = column;
    const note = `this plan, ${facts.where}`;
    return [...asked, { cluster: machines.name, mesh, ranks, seconds, memory_bytes, fits, note }];
  }

  cell(each, strength) {
    if (!each) return h("td", { class: "none" });
    if (each.seconds === null)
      return h(
        "td",
        { class: "unfit", "data-tip": each.note },
        h("b", {}, "no plan"),
        h("small", {}, each.note),
      );
    const base = this.model.seconds;
    const { machines, facts } = this.model.report;
    const here =
      machines && each.cluster === machines.name && each.ranks === facts.ranks ? " here" : "";
    const tip = [
      `${each.cluster}, ${each.mesh}: ${format.plural(each.ranks, "rank")}`,
      `${format.seconds(each.seconds)} a step, ${format.bytes(each.memory_bytes)} of a rank`,
      each.note,
    ]
      .filter(Boolean)
      .join("\n");
    return h(
      "td",
      {
        class: (each.fits ? "fits" : "unfit") + here,
        "data-tip": tip,
        style: each.fits ? { "--strength": strength(each.seconds) } : {},
      },
      h("b", {}, format.seconds(each.seconds)),
      h(
        "small",
        {},
        each.fits
          ? `${base ? `${(base / each.seconds).toPrecision(2)} × as fast, ` : ""}${format.bytes(each.memory_bytes)}`
          : each.note || "does not fit",
      ),
    );
  }
}
