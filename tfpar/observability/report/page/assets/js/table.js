"use strict";
// Tables that sort, filter and save themselves as CSV; a row is linked with the graph by its layer.

class TableView {
  constructor(model, state) {
    Object.assign(this, { model, state });
    this.title = "Table";
    this.sorted = {};
  }

  kind() {
    return TABLES[this.state.get("table")] ? this.state.get("table") : "layers";
  }

  isFolded() {
    return this.model.layers.some((layer) => layer.repeat) && this.state.get("each") === null;
  }

  draw() {
    this.body = h("tbody", {});
    this.foot = h("tfoot", {});
    this.head = h("thead", {});
    this.count = h("span", { class: "note", role: "status" });
    this.tools = h("div", { class: "toolbar" });
    this.update();
    return h(
      "div",
      { class: "table-view" },
      this.tools,
      h("div", { class: "scroll" }, h("table", { class: "rows" }, this.head, this.body, this.foot)),
    );
  }

  toolbar(kind) {
    const names = Object.fromEntries(
      Object.entries(TABLES).map(([key, table]) => [key, table.name]),
    );
    const repeats = kind === "layers" && this.model.layers.some((layer) => layer.repeat);
    const stages = this.model.report.pipeline && kind === "layers";
    const options = [
      ["", "all"],
      ...(stages ? this.model.report.pipeline.stages : []).map((_, i) => [String(i), String(i)]),
    ];
    const parts = [
      choice("Table", names, kind, (key) => this.state.set({ table: key })),
      kind === "layers" &&
        menu(
          "Lies",
          [
            ["", "any way"],
            ["split", "split"],
            ["partial", "partial"],
            ["replicated", "replicated"],
          ],
          this.state.get("lies") || "",
          (key) => this.state.set({ lies: key }),
        ),
      stages &&
        menu("Stage", options, this.state.get("stage") || "", (key) =>
          this.state.set({ stage: key }),
        ),
      repeats &&
        h(
          "button",
          { id: "fold", onclick: () => this.fold() },
          this.isFolded() ? "Unfold repeats" : "Fold repeats",
        ),
      this.count,
      h("span", { class: "grow" }),
      h("button", { onclick: () => this.save() }, "Save CSV"),
    ];
    this.tools.replaceChildren(...parts.filter(Boolean));
  }

  fold() {
    this.state.set({ each: this.isFolded() ? "1" : null });
  }

  // The rows that are asked for, in the order that is.
  found(kind, columns) {
    const table = TABLES[kind];
    const words = (this.state.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
    const [lies, stage] =
      kind === "layers" ? [this.state.get("lies"), this.state.get("stage")] : [];
    const rows = table.rows(this.model, this.isFolded()).filter((row) => {
      if (lies && this.model.status(row.layer) !== lies) return false;
      if (stage && String(row.layer.stage) !== stage) return false;
      if (!words.length) return true;
      const names = row.layers ? row.layers.map((layer) => layer.path) : [table.path(row)];
      const text = [...names, ...columns.filter((c) => !c.number).map((c) => c.get(row))]
        .join(" ")
        .toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const order = this.sorted[kind];
    if (!order) return rows;
    const { get } = columns[order.at];
    const compare = (a, b) =>
      typeof a === "number" || typeof b === "number"
        ? (a ?? -1) - (b ?? -1)
        : String(a).localeCompare(String(b), "en", { numeric: true });
    return [...rows].sort((a, b) => order.sign * compare(get(a), get(b)));
  }

  update() {
    const kind = this.kind();
    const columns = TABLES[kind].columns(this.model);
    const drawn = JSON.stringify([
      kind,
      this.sorted[kind],
      ...["q", "lies", "stage", "each"].map((name) => this.state.get(name)),
    ]);
    if (drawn !== this.drawn || !this.body.childElementCount) {
      this.drawn = drawn;
      this.drawnRows = this.found(kind, columns);
      this.toolbar(kind);
      this.fillHead(kind, columns);
      this.body.replaceChildren(...this.drawnRows.map((row) => this.row(kind, columns, row)));
      this.fillFoot(kind, columns);
    }
    this.mark();
  }

  fillHead(kind, columns) {
    const order = this.sorted[kind];
    const cells = columns.map((each, at) => {
      const sorted =
        order && order.at === at ? (order.sign > 0 ? "ascending" : "descending") : "none";
      const sort = () => {
        const sign = sorted === "none" ? (each.number ? -1 : 1) : sorted === "ascending" ? -1 : 1;
        this.sorted[kind] = { at, sign };
        this.update();
      };
      return h(
        "th",
        {
          class: each.number ? "number" : "",
          "aria-sort": sorted,
          scope: "col",
          "data-tip": each.tip,
        },
        h("button", { onclick: sort }, each.title),
      );
    });
    this.head.replaceChildren(h("tr", {}, cells));
  }

  row(kind, columns, row) {
    const path = TABLES[kind].path(row);
    const paths = row.layers ? row.layers.map((layer) => layer.path) : [path];
    const element = h(
      "tr",
      { "data-path": path, onclick: () => path && this.state.set({ layer: path, scope: null }) },
      columns.map((each) => {
        const value = each.get(row);
        return h(
          "td",
          {
            class: each.number ? "number" : "",
            title: !each.number && typeof value === "string" && value.length > 28 ? value : null,
          },
          value === null || value === "" ? "" : each.show(value, row),
        );
      }),
    );
    element.paths = paths;
    return element;
  }

  fillFoot(kind, columns) {
    const rows = this.drawnRows;
    this.count.textContent = format.plural(rows.length, "row");
    const cells = columns.map((each, i) => {
      if (i === 0) return h("th", { scope: "row" }, this.totalOf(kind));
      if (!each.adds) return h("td", {});
      const value = sum(rows, each.get);
      return h(
        "td",
        { class: "number", "data-sum": each.title, "data-value": value },
        each.show(value, null),
      );
    });
    this.foot.replaceChildren(h("tr", {}, cells));
  }

  totalOf(kind) {
    const stages = kind === "layers" && this.model.report.pipeline && !this.state.get("stage");
    return stages ? "All stages" : "Total";
  }

  mark() {
    const chosen = this.state.get("layer");
    for (const row of this.body.children) {
      const is = chosen !== null && row.paths.includes(chosen);
      row.classList.toggle("chosen", is);
      row.toggleAttribute("aria-selected", is);
    }
    const first = this.body.querySelector(".chosen");
    if (first) first.scrollIntoView({ block: "nearest" });
  }

  move(step) {
    const rows = [...this.body.children];
    const at = rows.findIndex((row) => row.classList.contains("chosen"));
    const next = rows[Math.min(Math.max(at + step, 0), rows.length - 1)];
    if (next && next.dataset.path) this.state.set({ layer: next.dataset.path, scope: null });
  }

  // The rows that are shown, in full numbers: seconds and bytes.
  save() {
    const kind = this.kind();
    const columns = TABLES[kind].columns(this.model);
    const quote = (value) => {
      const text = value === null || value === undefined ? "" : String(value);
      // What a spreadsheet would take for a formula stays text.
      const safe = typeof value === "string" && /^[=+\-@]/.test(text) ? `'${text}` : text;
      return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
    };
    const lines = [
      columns.map((each) => quote(each.title)),
      ...this.drawnRows.map((row) => columns.map((each) => quote(each.get(row)))),
    ];
    const blob = new Blob([`${lines.map((line) => line.join(",")).join("\n")}\n`], {
      type: "text/csv",
    });
    const link = h("a", {
      href: URL.createObjectURL(blob),
      download: `${this.model.report.facts.model || "plan"}_${kind}.csv`,
    });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
}
