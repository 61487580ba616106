"use strict";
// What the tables show: the columns of layers, variables and collectives.

// A column: `get` gives the value to sort and export, `show` what is drawn of it; `adds` has a sum.
function column(title, get, { show = null, number = false, adds = false, tip = null } = {}) {
  return { title, get, show: show || ((value) => value), number: number || adds, adds, tip };
}

function secondsColumn(title, get, tip) {
  return column(title, get, {
    show: (value) => (value === 0 ? "0" : format.seconds(value)),
    adds: true,
    tip,
  });
}

function bytesColumn(title, get, tip) {
  return column(title, get, {
    show: (value) => (value === 0 ? "0" : format.bytes(value)),
    adds: true,
    tip,
  });
}

const TABLES = {
  layers: {
    name: "Layers",
    path: (row) => row.layer.path,
    columns: (model) =>
      [
        column("Layer", (row) => row.name),
        column("Class", (row) => row.layer.class_name || row.layer.kind),
        model.report.pipeline && column("Stage", (row) => row.layer.stage, { number: true }),
        column("Lies", (row) => model.status(row.layer), {
          show: (value, row) => [
            h("i", { class: `letter ${value[0].toUpperCase()}` }, value[0].toUpperCase()),
            " ",
            row.layer.placement || value,
          ],
        }),
        model.seconds !== null &&
          secondsColumn(
            "Compute",
            (row) => sum(row.layers, (x) => total(x.seconds)),
            "of its ops in a step",
          ),
        model.seconds !== null &&
          secondsColumn(
            "Waits",
            (row) => sum(row.layers, (x) => total(x.communication_s)),
            "of its collectives, as far as they are waited for",
          ),
        model.seconds !== null &&
          secondsColumn("Time", (row) => sum(row.layers, (x) => model.secondsOf(x))),
        column("Weights", (row) => sum(row.layers, (x) => x.weights), {
          show: format.short,
          adds: true,
          tip: "parameters of the whole layer",
        }),
        bytesColumn(
          "Memory",
          (row) => sum(row.layers, (x) => total(x.memory)),
          "of a rank, when it stores most",
        ),
        bytesColumn("Kept", (row) => sum(row.layers, (x) => x.kept_bytes), "for the backward pass"),
        column("Source", (row) => row.layer.source),
      ].filter(Boolean),
    rows: (model, fold) => model.rows(model.layers, fold),
  },
  variables: {
    name: "Variables",
    path: (row) => row.layer,
    columns: (model) => [
      column("Variable", (row) => row.path),
      column("Kind", (row) => row.kind),
      column("Shape", (row) => format.shape(row.shape), { number: true }),
      column("Type", (row) => row.dtype),
      column("Spec", (row) => row.spec || "", {
        show: (value) =>
          value ? [letters(specLetters(value), model.axes, "held"), " ", value] : "not known",
      }),
      bytesColumn("Whole", (row) => row.num_bytes),
      bytesColumn("On a rank", (row) => row.device_bytes),
      column("Why", (row) => row.why),
    ],
    rows: (model) => model.report.variables,
  },
  collectives: {
    name: "Collectives",
    path: (row) => row.layer,
    columns: () => [
      column("Collective", (row) => format.collective(row)),
      column("Layer", (row) => row.layer || ""),
      column("Phase", (row) => row.phase),
      column(
        "When",
        (row) =>
          ({ between: "between ops", beside: "beside the pass", after: "after the pass" })[
            row.when
          ],
      ),
      column("Count", (row) => row.count, { show: format.count, adds: true }),
      bytesColumn("Bytes", (row) => row.num_bytes, "payload on a rank"),
      secondsColumn("Time", (row) => row.seconds, "packed as the program packs them"),
      secondsColumn("Alone", (row) => row.alone_s, "one by one"),
    ],
    rows: (model) => model.report.collectives,
  },
};
