"use strict";
// Opens the report: its views, the search above them, and keys.

class Page {
  constructor(report) {
    this.model = new Model(report);
    this.tree = new Tree(this.model);
    const { model, tree } = this;
    const names = ["overview", "graph", "table", "memory", "timeline", "candidates", "what-if"];
    this.state = new State(names, () => this.show());
    const { state } = this;
    this.views = {
      overview: { title: overview.title, draw: () => overview.draw(model, state) },
      graph: new GraphView(model, tree, state),
      table: new TableView(model, state),
      memory: new MemoryView(model, state),
      timeline: new TimelineView(model, state),
      candidates: new CandidatesView(model, state),
      "what-if": new WhatIfView(model, state),
    };
    this.details = new Details(model, tree, state);
    this.names = names;
    this.fillHeader();
    document.addEventListener("keydown", (event) => this.key(event));
    state.read();
  }

  fillHeader() {
    const { facts } = this.model.report;
    byId("model").textContent = facts.model || "plan";
    byId("where").textContent = facts.where;
    byId("tabs").replaceChildren(
      ...this.names.map((name, i) =>
        h(
          "button",
          {
            role: "tab",
            id: `tab-${name}`,
            "data-tip": `${this.views[name].title} (${i + 1})`,
            onclick: () => this.state.set({}, name),
          },
          this.views[name].title,
        ),
      ),
    );
    const search = byId("search");
    search.addEventListener("input", () => this.state.set({ q: search.value }));
    search.addEventListener("keydown", (event) => this.searchKey(event));
    search.addEventListener("focus", () => this.suggest());
    search.addEventListener("blur", () => setTimeout(() => (byId("found").hidden = true), 150));
    byId("theme").addEventListener("click", () => theme.toggle());
    byId("help").addEventListener("click", () => byId("keys").showModal());
  }

  // Draw the view that the address names, or bring the drawn one up to date.
  show() {
    const { view } = this.state;
    const shown = this.views[view];
    for (const tab of byId("tabs").children) {
      tab.setAttribute("aria-selected", String(tab.id === `tab-${view}`));
    }
    const search = byId("search");
    if (document.activeElement !== search) search.value = this.state.get("q") || "";
    document.body.dataset.view = view;
    this.details.show();
    if (this.drawn !== view) {
      this.drawn = view;
      byId("view").replaceChildren(shown.draw());
      if (shown.shown) shown.shown();
    }
    if (shown.update) shown.update();
    if (document.activeElement === search) this.suggest();
  }

  // --- search -------------------------------------------------------------------------------

  suggest() {
    const found = this.model.search(this.state.get("q") || "");
    const rows = this.model.rows(found, true);
    const list = byId("found");
    list.hidden = !found.length || document.activeElement !== byId("search");
    list.replaceChildren(
      ...rows.slice(0, 10).map(({ layer, name }, i) =>
        h(
          "button",
          {
            role: "option",
            "aria-selected": String(i === 0),
            onmousedown: () => this.take(layer),
          },
          h("span", {}, name),
          h("small", {}, layer.class_name),
        ),
      ),
      ...(rows.length > 10 ? [h("p", {}, `and ${rows.length - 10} more`)] : []),
    );
  }

  // Go to a layer that was found; views without layers hand over to the graph.
  take(layer) {
    const linked = ["graph", "table", "memory", "timeline"];
    const view = linked.includes(this.state.view) ? this.state.view : "graph";
    this.state.set({ layer: layer.path, scope: null }, view);
    byId("found").hidden = true;
  }

  searchKey(event) {
    if (event.key === "Enter") {
      const [first] = this.model.search(this.state.get("q") || "");
      if (first) this.take(first);
    }
    if (event.key === "Escape") {
      event.stopPropagation();
      byId("search").value = "";
      byId("search").blur();
      this.state.set({ q: null });
    }
  }

  // --- keys ---------------------------------------------------------------------------------

  key(event) {
    const writes = event.target.matches("input, select, textarea");
    if (writes || event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    const view = this.views[this.state.view];
    const zoom = view.zoom && view.frame && view.frame.isConnected ? view.zoom : null;
    const actions = {
      "/": () => byId("search").focus(),
      "?": () => byId("keys").showModal(),
      d: () => theme.toggle(),
      f: () => view.fold && view.fold(),
      Escape: () => this.details.close(),
      ArrowDown: view.move && (() => view.move(1)),
      ArrowUp: view.move && (() => view.move(-1)),
      "+": zoom && (() => zoom.by(1.25)),
      "-": zoom && (() => zoom.by(1 / 1.25)),
      0: zoom && (() => zoom.fit()),
    };
    this.names.forEach((name, i) => (actions[i + 1] = () => this.state.set({}, name)));
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

async function start() {
  theme.start();
  followTips();
  try {
    new Page(await unpack(byId("report").textContent));
    document.body.dataset.ready = "1";
  } catch (error) {
    byId("view").replaceChildren(emptyState("This report cannot be read", String(error)));
    throw error;
  }
}

start();
