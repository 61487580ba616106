"use strict";
// The layers as a graph: scopes are frames that open and close, and what repeats is drawn once.

class GraphView {
  constructor(model, tree, state) {
    Object.assign(this, { model, tree, state });
    this.title = "Graph";
    this.opened = new Map();
  }

  // What asks for another drawing: repeats that are not folded, and whether small ops have boxes.
  asked() {
    const layer = this.model.byPath.get(this.state.get("layer"));
    this.tree.all =
      this.state.get("small") !== null || (layer !== undefined && this.tree.small.has(layer.path));
    return `${this.state.get("unfold")} ${this.tree.all}`;
  }

  unfolded() {
    return new Set(
      (this.state.get("unfold") || "")
        .split(",")
        .filter(Boolean)
        .map((i) => this.tree.repeats()[i]?.id),
    );
  }

  draw() {
    if (!this.model.layers.length) {
      return emptyState(
        "The plan's layers are not known",
        "It was made without its graph. A plan that is made anew keeps its layers with it:",
        "tfpar plan SCRIPT.PY:FUNCTION --mesh 2x8 -o plan.json",
      );
    }
    this.content = svg("g", {});
    this.frame = svg(
      "svg",
      { class: "graph", role: "group", "aria-label": "Graph of layers" },
      this.defs(),
      this.content,
    );
    this.note = h("p", { class: "note", role: "status" });
    this.zoom = new Zoom(this.frame, this.content, [1, 1]);
    const tools = h(
      "div",
      { class: "toolbar" },
      this.legend(),
      h("span", { class: "grow" }),
      this.note,
      this.tree.small.size > 0 &&
        h(
          "button",
          {
            id: "small",
            "data-tip": "Constants, counters and such, at the ends of the graph",
            onclick: () => this.state.set({ small: this.state.get("small") ? null : "1" }),
          },
          "Small ops",
        ),
      this.tree.repeats().length > 0 &&
        h("button", { id: "fold", onclick: () => this.fold() }, "Fold repeats"),
    );
    return h(
      "div",
      { class: "graph-view" },
      tools,
      h("div", { class: "canvas" }, this.frame, zoomButtons(this.zoom)),
    );
  }

  // Once it is in the page, and has a size.
  shown() {
    if (!this.frame) return;
    this.reveal();
    this.render();
    this.begin();
    this.mark();
  }

  // All of it, or the first box above where all would be too small to read.
  begin() {
    this.zoom.fit(0.9);
    const first = this.laid.boxes.get(this.leaves[0]?.id);
    if (first && this.zoom.size[0] * this.zoom.scale > this.frame.clientWidth) {
      this.zoom.x = this.frame.clientWidth / 2 - first.x * this.zoom.scale;
      this.zoom.apply();
    }
  }

  legend() {
    return h(
      "ul",
      { class: "legend" },
      ["split", "partial", "replicated"].map((name) =>
        h(
          "li",
          {
            "data-tip": `A letter for each axis of the mesh: ${this.model.axes.map((axis) => axis.name).join(", ")}.\nOf a layer with weights how these lie, else what it makes.`,
          },
          h("i", { class: `letter ${name[0].toUpperCase()}` }, name[0].toUpperCase()),
          name,
        ),
      ),
      h("li", {}, h("i", { class: "line" }), "as wide as its bytes"),
      h("li", {}, h("i", { class: "line moved" }), "laid anew"),
    );
  }

  defs() {
    const arrow = (id) =>
      svg(
        "marker",
        {
          id,
          viewBox: "0 0 8 8",
          refX: 7,
          refY: 4,
          markerWidth: 9,
          markerHeight: 9,
          markerUnits: "userSpaceOnUse",
          orient: "auto",
        },
        svg("path", { d: "M0,0.8 L8,4 L0,7.2 z" }),
      );
    return svg("defs", {}, arrow("arrow"), arrow("arrow-moved"));
  }

  // Open what hides the chosen layer.
  reveal() {
    const layer = this.model.byPath.get(this.state.get("layer"));
    if (!layer) return;
    const leaf = this.tree.leafFor(layer, this.unfolded());
    for (let node = leaf && leaf.parent; node; node = node.parent) this.opened.set(node.id, true);
  }

  render() {
    const { tree } = this;
    this.drawnFor = this.asked();
    this.drawnUnfolded = this.unfolded();
    const { open, refused } = tree.visible(this.opened, this.drawnUnfolded);
    this.open = open;
    const leaves = [];
    const frames = [];
    const collect = (node) => {
      for (const child of tree.inside(node, this.drawnUnfolded)) {
        if (child.layer || !open.has(child.id)) leaves.push(child);
        else {
          frames.push(child);
          collect(child);
        }
      }
    };
    collect(tree.root);
    const drawn = new Set([...leaves, ...frames]);
    const frameOf = (node) => {
      for (let at = node.parent; at; at = at.parent) if (drawn.has(at)) return at;
      return null;
    };
    const edges = this.edges();
    const laid = layOut(leaves, edges, frames, frameOf, this.order(leaves));
    this.leaves = leaves;
    this.laid = laid;
    this.zoom.size = laid.size;
    this.content.replaceChildren(
      ...frames.map((frame) => this.frameOf(frame, laid.frames.get(frame.id))),
      ...edges.map((edge, i) => this.edge(edge, laid.points[i])),
      ...frames.map((frame) => this.titleOf(frame, laid.frames.get(frame.id))),
      ...leaves.map((leaf) => this.box(leaf, laid.boxes.get(leaf.id))),
    );
    const small = byId("small");
    if (small) small.setAttribute("aria-pressed", String(this.tree.all));
    const fold = byId("fold");
    if (fold) fold.textContent = this.drawnUnfolded.size ? "Fold repeats" : "Unfold repeats";
    const more = refused
      ? `At most ${LIMIT} boxes are drawn at once: close a scope to open another. `
      : "";
    const layers = format.plural(this.model.layers.length, "layer");
    this.note.textContent = `${more}${leaves.length} boxes for ${layers}`;
  }

  // Flows between drawn boxes, added up. From one instance of a folded block to the next there is
  // no edge: they are one box.
  edges() {
    const found = new Map();
    const unfolded = this.drawnUnfolded;
    for (const flow of this.model.report.flows) {
      const [a, b] = [this.model.byPath.get(flow.source), this.model.byPath.get(flow.target)];
      const hidden = (layer) => !this.tree.all && this.tree.small.has(layer.path);
      if (!a || !b || hidden(a) || hidden(b) || this.tree.acrossInstances(a, b, unfolded)) continue;
      const source = this.tree.standIn(a, this.open, unfolded);
      const target = this.tree.standIn(b, this.open, unfolded);
      if (!source || !target || source === target) continue;
      const key = `${source.id}>${target.id}`;
      if (!found.has(key)) found.set(key, { source, target, flows: [], bytes: 0, moves: false });
      const edge = found.get(key);
      edge.flows.push(flow);
      edge.bytes += flow.num_bytes;
      edge.moves = edge.moves || flow.read_as.some((spec) => spec !== flow.spec);
    }
    const edges = [...found.values()];
    const most = Math.max(1, ...edges.map((edge) => edge.bytes / edge.flows.length));
    for (const edge of edges) edge.width = 1 + 6 * Math.sqrt(edge.bytes / edge.flows.length / most);
    return edges;
  }

  // Stages one below the other: from the last box of each to the first of the next.
  order(leaves) {
    const stages = [...grouped(leaves, (leaf) => this.tree.ancestor(leaf, "stage")).values()];
    return stages
      .slice(1)
      .map((stage, i) => ({ source: stages[i][stages[i].length - 1], target: stage[0] }));
  }

  edge(edge, points) {
    const [flow] = edge.flows;
    const moves = flow.read_as.filter((spec) => spec !== flow.spec);
    const tip = [
      `${flow.source} → ${flow.target}`,
      `${format.shape(flow.shape)} ${flow.dtype}, ${format.bytes(flow.num_bytes)}`,
      `as ${flow.spec}${moves.length ? `, read as ${moves.join("; ")}` : ""}`,
      ...(edge.flows.length > 1
        ? [`and ${edge.flows.length - 1} more, ${format.bytes(edge.bytes)} in all`]
        : []),
    ].join("\n");
    const path = smooth(points);
    return svg(
      "g",
      { class: `edge ${edge.moves ? "moved" : ""}`, "data-tip": tip },
      svg("path", { class: "near", d: path }),
      svg("path", {
        class: "line",
        d: path,
        "stroke-width": edge.width,
        "marker-end": `url(#arrow${edge.moves ? "-moved" : ""})`,
      }),
    );
  }

  frameOf(node, box) {
    return svg(
      "g",
      {
        class: `frame ${node.kind}`,
        transform: `translate(${box.x - box.width / 2} ${box.y - box.height / 2})`,
        "data-id": node.id,
      },
      svg("rect", { width: box.width, height: box.height, rx: 8 }),
    );
  }

  titleOf(node, box) {
    const times =
      node.kind === "repeat" && !this.drawnUnfolded.has(node.id)
        ? ` × ${node.children.length}`
        : "";
    return svg(
      "g",
      {
        class: "frame-title",
        transform: `translate(${box.x - box.width / 2} ${box.y - box.height / 2})`,
        role: "button",
        tabindex: 0,
        "data-frame": node.id,
        "aria-label": `Close ${node.label}`,
        "data-tip": `Close ${node.label}`,
        onclick: () => this.toggle(node),
        onkeydown: (event) => event.key === "Enter" && this.toggle(node),
      },
      svg("rect", { width: box.width, height: 24, rx: 8 }),
      svg("path", { d: "M10,9.5 l4,5 l4,-5 z" }),
      svg("text", { x: 24, y: 17 }, shorten(node.label + times, box.width - 34, 13)),
    );
  }

  box(node, at) {
    const { model } = this;
    const layers = this.tree.standsFor(node, this.drawnUnfolded);
    const [layer] = node.layer ? [node.layer] : layers;
    const status = node.layer ? model.status(layer) : this.mixed(layers);
    const seconds = sum(layers, (each) => model.secondsOf(each));
    const time = !seconds ? "" : format.seconds(seconds);
    const times = node.kind === "repeat" ? ` × ${node.children.length}` : "";
    const kind = node.layer
      ? layer.class_name || layer.kind
      : format.plural(node.layers().length, "layer");
    const found = node.layer ? this.lettersOf(layer) : [];
    const tip = node.layer
      ? [
          layer.path,
          layer.placement,
          layers.length > 1 ? `one of ${layers.length} alike, ${time} together` : "",
        ]
          .filter(Boolean)
          .join("\n")
      : `${node.label}: ${format.plural(layers.length, "layer")}. Click for what they add up to, press Enter or double-click to open.`;
    const right = at.width - 10 - (found.length ? found.length * 18 + 6 : 0);
    return svg(
      "g",
      {
        class: `box ${status} ${node.layer ? "leaf" : "closed"}`,
        transform: `translate(${at.x - at.width / 2} ${at.y - at.height / 2})`,
        tabindex: 0,
        role: "button",
        "aria-label": `${node.label}, ${status}`,
        "data-id": node.id,
        "data-path": node.layer && layer.path,
        "data-tip": tip,
        onclick: () => this.choose(node),
        ondblclick: () => !node.layer && this.toggle(node),
        onkeydown: (event) => this.key(event, node),
      },
      !node.layer &&
        svg("rect", { class: "stack", x: 4, y: 4, width: at.width, height: at.height, rx: 6 }),
      svg("rect", { class: "card", width: at.width, height: at.height, rx: 6 }),
      svg("path", {
        class: "mark",
        d: `M6,0 h1 v${at.height} h-1 a6,6 0 0 1 -6,-6 v-${at.height - 12} a6,6 0 0 1 6,-6 z`,
      }),
      svg(
        "text",
        { class: "name", x: 16, y: 20 },
        shorten(node.label + times, at.width - (node.layer ? 24 : 46), 13),
      ),
      svg(
        "text",
        { class: "kind", x: 16, y: 38 },
        shorten(kind, right - time.length * 6.2 - 22, 11),
      ),
      svg("text", { class: "time", x: right, y: 38, "text-anchor": "end" }, time),
      found.map((letter, i) => this.letter(letter, right + 8 + i * 18, 27)),
      !node.layer && this.opener(node, at),
    );
  }

  opener(node, at) {
    const open = (event) => {
      event.stopPropagation();
      this.toggle(node);
    };
    return svg(
      "g",
      {
        class: "open",
        transform: `translate(${at.width - 26} 7)`,
        "data-tip": "Open",
        onclick: open,
      },
      svg("rect", { width: 20, height: 20, rx: 4 }),
      svg("path", { d: "M10,5 v10 M5,10 h10" }),
    );
  }

  // Of a layer with weights how these lie, of others what they make.
  lettersOf(layer) {
    const held = this.model.heldLetters(layer);
    const made = this.model.madeLetters(layer);
    if (made.includes("P")) return made;
    return held.length ? held : made;
  }

  letter(letter, x, y) {
    return svg(
      "g",
      { class: `letter ${letter}`, transform: `translate(${x} ${y})` },
      svg("rect", { width: 15, height: 15, rx: 3 }),
      svg("text", { x: 7.5, y: 11.5, "text-anchor": "middle" }, letter),
    );
  }

  mixed(layers) {
    const found = new Set(layers.map((layer) => this.model.status(layer)));
    return ["partial", "split"].find((status) => found.has(status)) || "replicated";
  }

  choose(node) {
    if (node.layer) this.state.set({ layer: node.layer.path, scope: null });
    else this.state.set({ scope: node.id, layer: null });
  }

  toggle(node) {
    this.opened.set(node.id, !this.open.has(node.id));
    const before = this.laid.frames.get(node.id) || this.laid.boxes.get(node.id);
    this.render();
    const after = this.laid.frames.get(node.id) || this.laid.boxes.get(node.id);
    if (before && after) {
      // Its upper edge stays where it was.
      this.zoom.x += (before.x - after.x) * this.zoom.scale;
      this.zoom.y += (before.y - before.height / 2 - after.y + after.height / 2) * this.zoom.scale;
    }
    this.zoom.apply();
    this.mark();
  }

  fold() {
    const all = this.tree
      .repeats()
      .map((_, i) => i)
      .join(",");
    this.state.set({ unfold: this.state.get("unfold") ? null : all });
  }

  key(event, node) {
    if (event.key === "Enter") {
      event.preventDefault();
      if (node.layer) this.choose(node);
      else this.toggle(node);
    }
  }

  // The drawn layer before or after the chosen one.
  move(step) {
    const layers = this.leaves.filter((node) => node.layer);
    const at = layers.findIndex((node) => node.layer.path === this.standing()?.layer?.path);
    const next = layers[Math.min(Math.max(at + step, 0), layers.length - 1)];
    if (next) this.choose(next);
  }

  standing() {
    const layer = this.model.byPath.get(this.state.get("layer"));
    return layer && this.tree.standIn(layer, this.open, this.drawnUnfolded);
  }

  // What is chosen, and what the search finds.
  update() {
    if (!this.frame) return;
    const same = this.drawnFor === this.asked();
    const layer = this.model.byPath.get(this.state.get("layer"));
    const standing = layer && this.standing();
    if (!same || (standing && !standing.layer)) {
      this.reveal();
      this.render();
      if (!same) this.begin();
      else this.zoom.apply();
    }
    this.mark();
  }

  mark() {
    const found = new Set(
      this.model
        .search(this.state.get("q") || "")
        .map((layer) => this.tree.standIn(layer, this.open, this.drawnUnfolded)?.id),
    );
    const standing = this.standing();
    const chosen = standing ? standing.id : this.state.get("scope");
    this.frame.classList.toggle("searched", found.size > 0);
    for (const box of this.content.querySelectorAll(".box, .frame")) {
      box.classList.toggle("found", found.has(box.dataset.id));
      box.classList.toggle("chosen", box.dataset.id === chosen);
    }
    const box = chosen && this.laid.boxes.get(chosen);
    if (box) this.zoom.reveal(box.x, box.y);
  }
}
