"use strict";
// What a rank stores when it stores most, as areas: by layer and kind, for each set of ranks.

class MemoryView {
  constructor(model, state) {
    Object.assign(this, { model, state });
    this.title = "Memory";
  }

  draw() {
    const held = sum(this.model.layers, (layer) => total(layer.memory));
    if (!held) {
      return emptyState(
        "Nothing is known of memory",
        "The plan holds no layers with bytes. A plan that is made anew, for a cluster, has them:",
        "tfpar plan SCRIPT.PY:FUNCTION --mesh 2x8 --cluster dgx-a100 -o plan.json",
      );
    }
    this.tools = h("div", { class: "toolbar" });
    this.limit = h("section", { class: "card wide" });
    this.map = h("div", {
      class: "treemap",
      role: "list",
      "aria-label": "Memory by layer and kind",
    });
    new ResizeObserver(() => this.fill()).observe(this.map);
    this.update();
    return h("div", { class: "memory-view" }, this.tools, this.limit, this.map);
  }

  stage() {
    const sets = this.model.sets();
    const fullest = sets.reduce((a, b) => ((b.peak || 0) > (a.peak || 0) ? b : a));
    return sets.find((stage) => stage.key === this.state.get("ranks")) || fullest;
  }

  by() {
    return this.state.get("by") === "kind" ? "kind" : "layer";
  }

  isFolded() {
    return this.model.layers.some((layer) => layer.repeat) && this.state.get("each") === null;
  }

  update() {
    if (!this.map) return;
    const sets = this.model.sets();
    const stage = this.stage();
    this.tools.replaceChildren(
      menu(
        "Ranks",
        sets.map(({ key, name }) => [key, name]),
        stage.key,
        (key) => this.state.set({ ranks: key }),
      ),
      choice("By", { layer: "By layer", kind: "By kind" }, this.by(), (key) =>
        this.state.set({ by: key }),
      ),
      ...[
        this.model.layers.some((layer) => layer.repeat) &&
          h(
            "button",
            { id: "fold", onclick: () => this.fold() },
            this.isFolded() ? "Unfold repeats" : "Fold repeats",
          ),
      ].filter(Boolean),
    );
    const parts = KINDS.map((kind) => ({
      name: KIND_NAMES[kind],
      class: kind,
      value: sum(stage.layers, (layer) => layer.memory[kind]),
    }));
    const held = sum(parts, (part) => part.value);
    this.limit.replaceChildren(
      h(
        "h2",
        {},
        "What layers store",
        h("b", { class: "figure", "data-total": "memory", "data-value": held }, format.bytes(held)),
        h(
          "small",
          { class: stage.limit && held > stage.limit ? "over" : "" },
          stage.limit ? `of ${format.bytes(stage.limit)} that a rank may use` : "of a rank",
        ),
      ),
      bar(parts, Math.max(held, stage.limit || 0), format.bytes),
      legend(parts, format.bytes),
    );
    this.fill();
  }

  fold() {
    this.state.set({ each: this.isFolded() ? "1" : null });
  }

  // Areas: of blocks, or of kinds; in them layers; in these kinds.
  groups(layers) {
    const rows = this.model.rows(layers, this.isFolded());
    const leaf = (row, kinds) => {
      const parts = kinds.map((kind) => ({
        kind,
        value: sum(row.layers, (layer) => layer.memory[kind]),
      }));
      return {
        row,
        parts: parts.filter((part) => part.value > 0),
        value: sum(parts, (part) => part.value),
      };
    };
    if (this.by() === "kind") {
      return KINDS.map((kind) => {
        const inner = rows.map((row) => leaf(row, [kind]));
        return { name: KIND_NAMES[kind], inner, value: sum(inner, (each) => each.value) };
      });
    }
    const folded = this.isFolded();
    const key = ({ layer }) => {
      if (!layer.repeat) return layer.path.includes("/") ? this.model.scopeOf(layer) : "";
      return folded ? this.model.blocks.get(layer.repeat.block).name : this.model.scopeOf(layer);
    };
    return [...grouped(rows, key)].flatMap(([name, found]) => {
      const inner = found.map((row) => leaf(row, KINDS));
      if (!name)
        return inner.map((each) => ({
          name: each.row.layer.path,
          inner: [each],
          value: each.value,
        }));
      for (const each of inner) each.group = name;
      const times = Math.max(...found.map((row) => row.layers.length));
      const title = times > 1 ? `${name} × ${times}` : name;
      return [{ name: title, inner, value: sum(inner, (each) => each.value) }];
    });
  }

  // The name of a layer within its group.
  inside(row, group) {
    const { path } = row;
    return group && path.startsWith(group)
      ? path.slice(group.length).replace(/^[/_.-]/, "") || path
      : path;
  }

  fill() {
    const [width, height] = [this.map.clientWidth, this.map.clientHeight];
    if (!width) return;
    const chosen = this.state.get("layer");
    const searched = new Set(
      this.model.search(this.state.get("q") || "").map((layer) => layer.path),
    );
    const place = ({ x, y, width: w, height: h_ }) => ({
      left: `${x}px`,
      top: `${y}px`,
      width: `${Math.max(0, w)}px`,
      height: `${Math.max(0, h_)}px`,
    });
    const drawn = squarify(this.groups(this.stage().layers), { x: 0, y: 0, width, height }).map(
      (group) => {
        const single = group.item.inner.length === 1;
        const titled = !single && group.height > 44 && group.width > 60;
        const inside = {
          x: 2,
          y: titled ? 20 : 2,
          width: group.width - 5,
          height: group.height - (titled ? 23 : 5),
        };
        const leaves = squarify(group.item.inner, inside).map((each) =>
          this.leaf(each, place, chosen, searched),
        );
        const title =
          titled &&
          h("b", {}, group.item.name, h("small", {}, ` ${format.bytes(group.item.value)}`));
        return h(
          "div",
          {
            class: "group",
            style: place({ ...group, width: group.width - 2, height: group.height - 2 }),
          },
          title,
          leaves,
        );
      },
    );
    this.map.replaceChildren(...drawn);
  }

  leaf(each, place, chosen, searched) {
    const { row, parts, value } = each.item;
    const { path } = row.layer;
    const lines = parts.map((part) => `${KIND_NAMES[part.kind]} ${format.bytes(part.value)}`);
    const along = each.width >= each.height;
    const is = row.layers.some((layer) => layer.path === chosen);
    const faded = searched.size && !row.layers.some((layer) => searched.has(layer.path));
    const choose = () => this.state.set({ layer: path, scope: null });
    return h(
      "div",
      {
        class: `leaf ${is ? "chosen" : ""} ${faded ? "faded" : ""}`,
        style: {
          ...place({ ...each, width: each.width - 2, height: each.height - 2 }),
          flexDirection: along ? "row" : "column",
        },
        role: "listitem",
        tabindex: 0,
        "data-path": path,
        "data-tip": [`${row.name}: ${format.bytes(value)}`, ...lines].join("\n"),
        onclick: choose,
        onkeydown: (event) => event.key === "Enter" && choose(),
      },
      parts.map((part) => h("i", { class: part.kind, style: { flexGrow: part.value } })),
      each.width > 48 && each.height > 18 && h("span", {}, this.inside(row, each.item.group)),
      each.width > 58 && each.height > 36 && h("small", {}, format.bytes(value)),
    );
  }
}
