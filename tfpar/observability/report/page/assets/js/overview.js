"use strict";
// The verdict, what a step's time and memory consist of, and what to know of the plan.

const PARTS = {
  compute: "compute",
  collectives: "communication waited for",
  gradients: "sums of gradients waited for",
  transfers: "transfers between stages",
  bubble: "bubble: waiting for other stages",
  host: "waiting for the host to issue ops",
  start: "start of a step",
};

const overview = {
  title: "Overview",

  draw(model, state) {
    const { report } = model;
    return h(
      "div",
      { class: "overview" },
      h("p", { class: "verdict" }, unbroken(report.verdict)),
      report.warnings.length > 0 && overview.warnings(report),
      report.cost ? overview.step(model) : overview.unpriced(),
      report.cost && overview.memory(model),
      h(
        "div",
        { class: "columns" },
        overview.hints(report),
        overview.baselines(report),
        overview.dearest(model, state),
        overview.facts(report),
        overview.machines(report, model),
        overview.ran(report),
        overview.inputs(report),
      ),
    );
  },

  unpriced() {
    return emptyState(
      "Nothing was priced",
      "This plan comes from constraints alone, without a cluster, so that there are no times. A plan that is made for a cluster has them:",
      "tfpar plan SCRIPT.PY:FUNCTION --mesh 2x8 --cluster dgx-a100 -o plan.json",
    );
  },

  warnings(report) {
    return h(
      "ul",
      { class: "warnings", "aria-label": "Warnings" },
      report.warnings.map((text) => h("li", {}, text)),
    );
  },

  // A step as a bar: what hides behind work lies in a bar of its own below, as it adds nothing.
  parts(cost) {
    const seconds = Object.fromEntries(cost.parts.map((part) => [part.name, part.seconds]));
    const hidden = -(seconds.hidden || 0);
    const found = Object.entries(PARTS)
      .filter(([name]) => seconds[name])
      .map(([name, text]) => ({ name: text, class: name, value: seconds[name] }));
    // What is hidden is taken off the communication of which it is a part.
    let rest = hidden;
    for (const part of found.filter((each) =>
      ["collectives", "gradients", "transfers"].includes(each.class),
    )) {
      const taken = Math.min(rest, part.value);
      part.value -= taken;
      rest -= taken;
    }
    return { found, hidden };
  },

  step(model) {
    const { cost } = model.report;
    const { found, hidden } = overview.parts(cost);
    const beside = hidden + Math.max(0, cost.gradients_s - cost.exposed_s);
    return h(
      "section",
      { class: "card wide" },
      h(
        "h2",
        {},
        "A step",
        h("b", { class: "figure", "data-total": "seconds" }, format.seconds(cost.seconds)),
      ),
      bar(found, cost.seconds, format.seconds),
      beside > 0 &&
        h(
          "div",
          { class: "beside" },
          bar(
            [
              {
                name: "hidden communication",
                class: "hidden-part",
                value: Math.min(beside, cost.seconds),
              },
            ],
            cost.seconds,
            () => format.seconds(beside),
          ),
        ),
      legend(
        [
          ...found,
          ...(beside > 0
            ? [{ name: "communication hidden behind work", class: "hidden-part", value: beside }]
            : []),
        ],
        format.seconds,
      ),
    );
  },

  memory(model) {
    const { cost, machines } = model.report;
    const limit = machines && machines.memory_limit;
    const whole = Math.max(limit || 0, cost.memory_bytes);
    const parts = KINDS.map((kind) => ({
      name: KIND_NAMES[kind],
      class: kind,
      value: cost.memory[kind],
    }));
    const over = limit && cost.memory_bytes > limit;
    return h(
      "section",
      { class: "card wide" },
      h(
        "h2",
        {},
        "Memory of a rank",
        h("b", { class: "figure", "data-total": "memory" }, format.bytes(cost.memory_bytes)),
        limit &&
          h(
            "small",
            { class: over ? "over" : "" },
            `${format.percent(cost.memory_bytes, limit)} of the ${format.bytes(limit)} that it may use`,
          ),
      ),
      bar(parts, whole, format.bytes),
      legend(
        [
          ...parts,
          ...(limit && !over
            ? [{ name: "free", class: "free", value: limit - cost.memory_bytes }]
            : []),
        ],
        format.bytes,
      ),
    );
  },

  list(title, lines) {
    return (
      lines.length > 0 &&
      h(
        "section",
        { class: "card" },
        h("h2", {}, title),
        h(
          "ul",
          { class: "lines" },
          lines.map((line) => h("li", {}, line)),
        ),
      )
    );
  },

  hints(report) {
    return overview.list("Worth knowing", report.hints);
  },

  // How long a step takes beside what one would do without a plan.
  baselines(report) {
    const shown = report.candidates.filter(
      (each) => ["plan", "baseline"].includes(each.kind) && each.seconds !== null,
    );
    if (!report.cost || shown.length < 2) return null;
    const most = Math.max(...shown.map((each) => each.seconds));
    const row = (each) =>
      h(
        "li",
        { class: each.kind },
        h(
          "span",
          {},
          each.name === "lower bound" ? "no plan takes less" : each.name,
          each.fits === false && h("small", { class: "over" }, " does not fit"),
        ),
        h("b", {}, format.seconds(each.seconds)),
        h("i", { style: { width: `${(100 * each.seconds) / most}%` } }),
      );
    return h(
      "section",
      { class: "card" },
      h("h2", {}, "Against baselines"),
      h("ol", { class: "bars" }, shown.map(row)),
    );
  },

  dearest(model, state) {
    if (model.seconds === null) return null;
    const seconds = (row) => sum(row.layers, (layer) => model.secondsOf(layer));
    const busiest = model.sets().reduce((a, b) => (seconds(b) > seconds(a) ? b : a));
    const rows = model
      .rows(busiest.layers, true)
      .sort((a, b) => seconds(b) - seconds(a))
      .slice(0, 6);
    const most = rows.length && seconds(rows[0]);
    return h(
      "section",
      { class: "card" },
      h(
        "h2",
        {},
        "Layers that take longest",
        model.report.pipeline && h("small", {}, `on ${busiest.name}`),
      ),
      h(
        "ol",
        { class: "bars" },
        rows.map((row) =>
          h(
            "li",
            {},
            h("a", { href: state.address("graph", { layer: row.layer.path }) }, row.name),
            h("b", {}, format.seconds(seconds(row))),
            h("i", { style: { width: `${(100 * seconds(row)) / (most || 1)}%` } }),
          ),
        ),
      ),
    );
  },

  facts(report) {
    const { facts } = report;
    const rows = [
      [
        "Model",
        [facts.model, facts.model_class && `(${facts.model_class})`].filter(Boolean).join(" "),
      ],
      ["Mesh", facts.where],
      ["Ranks", format.count(facts.ranks)],
      ["Batch", facts.batch],
      ["Planner", facts.planner || "none: constraints alone"],
      ["Microbatches", facts.microbatches > 1 && String(facts.microbatches)],
      ["Chunks", facts.chunks > 1 && String(facts.chunks)],
      ["Collectives", report.cost && format.count(report.cost.collectives)],
      [
        "Computed again",
        facts.recompute.length > 0 && format.plural(facts.recompute.length, "block"),
      ],
      [
        "In host memory",
        (facts.offloaded_slots || facts.offloaded_activations.length) &&
          `slots of ${format.plural(facts.offloaded_slots, "weight")}, activations of ${format.plural(facts.offloaded_activations.length, "block")}`,
      ],
      [
        "Slots split further",
        facts.split_slots > 0 && `of ${format.plural(facts.split_slots, "weight")}`,
      ],
      [
        "Gathered for their layers",
        facts.gathered_weights > 0 && format.plural(facts.gathered_weights, "weight"),
      ],
      [
        "Normalisation",
        facts.batch_statistics !== "exact" && `statistics of ${facts.batch_statistics}`,
      ],
      ["Search", facts.cut_short && "was cut short: there may be better plans"],
      ["Constraints", facts.constraints.join("; ")],
      ["Made by", `tfpar ${report.tfpar_version}`],
    ];
    return h("section", { class: "card" }, h("h2", {}, "The plan"), overview.pairs(rows));
  },

  pairs(rows) {
    return h(
      "dl",
      { class: "facts" },
      rows
        .filter(([, value]) => value)
        .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    );
  },

  machines(report, model) {
    const { machines, cost } = report;
    if (!machines) return null;
    const flops = sum(model.layers, (layer) => layer.flops);
    const rows = [
      ["Cluster", machines.name],
      ["Shape", machines.shape],
      [
        "Devices",
        Object.entries(machines.devices)
          .map(([name, count]) => `${count} × ${name}`)
          .join(", "),
      ],
      [
        "Rent",
        report.rentals.length > 0 &&
          `${format.dollars(report.rentals[0].dollars_per_hour)} an hour, ${format.dollars(report.rentals[0].dollars_per_million)} a million samples`,
      ],
      ["Memory", machines.memory_limit && `${format.bytes(machines.memory_limit)} of a rank`],
      [
        "Use of FLOPs",
        machines.flops &&
          cost &&
          `${format.percent(flops, machines.flops * cost.seconds)} of ${format.short(machines.flops)}FLOP/s`,
      ],
      ...machines.links.map((link) => [
        link.name,
        `${format.bytes(link.bandwidth)}/s, ${format.seconds(link.latency_s)}`,
      ]),
    ];
    return h("section", { class: "card" }, h("h2", {}, "The machines"), overview.pairs(rows));
  },

  // What runs otherwise than by its rule, so that nothing is silent.
  ran(report) {
    const planned = Object.entries(report.planned_ops)
      .sort(([, a], [, b]) => b - a)
      .map(([type, count]) => `${count} ${type}`);
    const { padding } = report;
    const lines = [
      ...(planned.length
        ? [`As the plan says, where by themselves they would run otherwise: ${planned.join(", ")}`]
        : []),
      ...report.without_rule.map(
        (found) => `${found.count} × ${found.type} without a rule, replicated: ${found.first}`,
      ),
      ...report.run_whole.map(
        (found) => `${found.type} runs whole along ${found.axis}: ${found.op}`,
      ),
      ...(padding && (padding.variables.length || padding.tensors)
        ? [
            `Padded: ${padding.variables.join(", ") || "no variable"}, ${format.bytes(padding.num_bytes)}; ${format.plural(padding.tensors, "other tensor")}`,
          ]
        : []),
      ...Object.entries(report.facts.fixed_tensors).map(
        ([name, where]) => `${name} is fixed: ${where}`,
      ),
    ];
    return overview.list("How ops run", lines);
  },

  inputs(report) {
    const lines = report.inputs.map(
      (input) =>
        `${input.name} ${format.shape(input.shape)}: given ${input.given}, taken ${input.taken}`,
    );
    return overview.list("Inputs", lines);
  },
};
