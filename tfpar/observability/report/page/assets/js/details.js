"use strict";
// What there is to know of the layer that is chosen, or of a scope of the graph.

class Details {
  constructor(model, tree, state) {
    Object.assign(this, { model, tree, state });
    this.element = byId("details");
  }

  // The panel beside the view; empty choices close it.
  show() {
    const layer = this.model.byPath.get(this.state.get("layer"));
    const scope = this.tree.nodes.get(this.state.get("scope"));
    const found = layer ? this.ofLayer(layer) : scope ? this.ofScope(scope) : null;
    this.element.hidden = !found;
    if (!found) return this.element.replaceChildren();
    const close = h(
      "button",
      { class: "icon close", "aria-label": "Close details", onclick: () => this.close() },
      "×",
    );
    this.element.replaceChildren(close, ...found.flat().filter(Boolean));
  }

  close() {
    this.state.set({ layer: null, scope: null });
  }

  section(title, ...content) {
    return content.flat().some(Boolean) && h("section", {}, h("h3", {}, title), content);
  }

  facts(rows) {
    return h(
      "dl",
      { class: "facts" },
      rows
        .filter(([, value]) => value)
        .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    );
  }

  ofLayer(layer) {
    const { model } = this;
    const status = model.status(layer);
    const names = layer.path.split("/");
    const { repeat } = layer;
    return [
      h(
        "h2",
        {},
        h(
          "small",
          {},
          names
            .slice(0, -1)
            .map((name) => `${name}/`)
            .join("​"),
        ),
        names[names.length - 1],
      ),
      h(
        "p",
        { class: "tags" },
        h("span", { class: `tag ${status}` }, `${status[0].toUpperCase()} ${status}`),
        layer.class_name && h("span", { class: "tag" }, layer.class_name),
      ),
      h(
        "p",
        { class: "links" },
        ["graph", "table", "memory", "timeline"]
          .filter((view) => view !== this.state.view)
          .map((view) => h("a", { href: this.state.address(view, {}) }, `show in ${view}`)),
      ),
      this.facts([
        ["Time", model.seconds !== null && `${format.seconds(model.secondsOf(layer))} of a step`],
        ["Memory", `${format.bytes(total(layer.memory))} of a rank`],
        [
          "Weights",
          layer.weights > 0 &&
            `${format.short(layer.weights)} (${format.bytes(layer.weight_bytes)})`,
        ],
        ["Lies", layer.placement],
        [
          "Work",
          layer.flops > 0 &&
            `${format.short(layer.flops)}FLOP in ${format.plural(layer.ops, "op")}, most in ${layer.kind}`,
        ],
        ["Made in", layer.source],
        ["Stage", layer.stage !== null && String(layer.stage)],
        [
          "Repeats",
          repeat &&
            `number ${repeat.instance + 1} of ${repeat.of}, ${model.blocks.get(repeat.block).name}`,
        ],
      ]),
      model.seconds !== null && this.section("Time by phase", this.phases(layer)),
      this.section("Memory when the rank stores most", this.memory(layer)),
      this.section(
        "Weights on the mesh",
        model.weightsOf(layer).map((variable, i) => this.variable(variable, i === 0)),
      ),
      this.section("Collectives of a step", this.collectives(layer)),
      this.section(
        "Tensors",
        this.tensors("reads", model.incoming.get(layer.path), (flow) => flow.source),
        this.tensors("makes", model.outgoing.get(layer.path), (flow) => flow.target),
      ),
      this.section(
        "Sharding patterns",
        layer.patterns.length > 0 &&
          h(
            "ul",
            { class: "lines" },
            layer.patterns.map((text) => h("li", {}, text)),
          ),
      ),
    ];
  }

  phases(layer) {
    const rows = PHASES.map((phase) => [phase, layer.seconds[phase], layer.communication_s[phase]]);
    return h(
      "table",
      { class: "small" },
      h("thead", {}, h("tr", {}, h("th", {}, ""), h("th", {}, "compute"), h("th", {}, "waits"))),
      h(
        "tbody",
        {},
        rows.map(([phase, work, wait]) =>
          h(
            "tr",
            {},
            h("th", {}, phase),
            h("td", {}, format.seconds(work)),
            h("td", {}, format.seconds(wait)),
          ),
        ),
      ),
    );
  }

  memory(layer) {
    const parts = KINDS.map((kind) => ({
      name: KIND_NAMES[kind],
      class: kind,
      value: layer.memory[kind],
    }));
    const whole = total(layer.memory);
    return whole > 0 && [bar(parts, whole, format.bytes), legend(parts, format.bytes)];
  }

  variable(variable, open) {
    const { model } = this;
    const base = model.seconds;
    return h(
      "details",
      { open },
      h(
        "summary",
        {},
        h("b", {}, variable.path.split("/").pop()),
        h("span", {}, `${format.shape(variable.shape)} ${variable.dtype}`),
        variable.spec && letters(specLetters(variable.spec), model.axes, "held"),
      ),
      variable.spec && placement.draw(variable.spec, variable.shape, model.axes),
      this.facts([
        ["Lies", variable.placement],
        [
          "On a rank",
          variable.local_shape &&
            `${format.shape(variable.local_shape)}, ${format.bytes(variable.device_bytes)} of ${format.bytes(variable.num_bytes)}`,
        ],
        ["Why", variable.why],
        ["Slots", variable.slots && `lie as ${variable.slots}`],
        ["Layers read it", variable.gathered && `gathered: ${variable.gathered}`],
        ["Slots are in", variable.offloaded && "host memory"],
      ]),
      this.options(variable, base),
      this.uses(variable),
    );
  }

  options(variable, base) {
    if (!variable.options.length) return null;
    const row = (option) =>
      h(
        "tr",
        {},
        h("th", {}, option.placement, option.layout && h("small", {}, ` on ${option.layout}`)),
        h("td", {}, option.seconds === null ? "not valid" : format.seconds(option.seconds)),
        h("td", {}, option.seconds === null || !base ? "" : format.against(option.seconds, base)),
      );
    return h(
      "table",
      { class: "small" },
      h(
        "thead",
        {},
        h("tr", {}, h("th", {}, "it could be"), h("th", {}, "a step"), h("th", {}, "longer")),
      ),
      h("tbody", {}, variable.options.map(row)),
    );
  }

  uses(variable) {
    const count = variable.num_uses + variable.num_reshards;
    if (!count) return null;
    const rest =
      variable.num_uses - variable.uses.length + variable.num_reshards - variable.reshards.length;
    return h(
      "details",
      { class: "inner" },
      h("summary", {}, `used by ${format.plural(variable.num_uses, "op")}`),
      h(
        "ul",
        { class: "lines" },
        variable.uses.map((use) =>
          h(
            "li",
            {},
            h("b", {}, use.type),
            ` ${use.name}: reads ${use.reads}, makes ${use.makes}`,
            use.planned && " (planned)",
          ),
        ),
        variable.reshards.map((text) => h("li", {}, text)),
        rest > 0 && h("li", {}, `and ${rest} more`),
      ),
    );
  }

  collectives(layer) {
    const found = this.model.collectives.get(layer.path) || [];
    if (!found.length) return null;
    const row = (each) =>
      h(
        "tr",
        {},
        h(
          "th",
          {},
          format.collective(each),
          h("small", {}, ` ${each.phase}, ${each.when} ${each.when === "between" ? "ops" : "it"}`),
        ),
        h("td", {}, `${each.count} ×`),
        h("td", {}, format.bytes(each.num_bytes)),
        h("td", {}, format.seconds(each.seconds)),
      );
    return h("table", { class: "small" }, h("tbody", {}, found.map(row)));
  }

  tensors(verb, flows, other) {
    return (flows || []).map((flow) => {
      const moves = flow.read_as.filter((spec) => spec !== flow.spec);
      const path = other(flow);
      return h(
        "p",
        { class: "tensor" },
        `${verb} ${format.shape(flow.shape)} ${flow.dtype}, ${format.bytes(flow.num_bytes)}, as `,
        h("code", {}, flow.spec),
        moves.length > 0 && [" → ", h("code", {}, moves.join("; "))],
        verb === "reads" ? " of " : " for ",
        h("a", { href: this.state.address(this.state.view, { layer: path, scope: null }) }, path),
      );
    });
  }

  // A scope, or a block that repeats: what its layers add up to.
  ofScope(node) {
    const { model } = this;
    const layers = node.layers();
    const dearest = [...layers].sort((a, b) => model.secondsOf(b) - model.secondsOf(a)).slice(0, 8);
    return [
      h("h2", {}, node.label),
      h(
        "p",
        { class: "tags" },
        h(
          "span",
          { class: "tag" },
          node.kind === "repeat" ? `block × ${node.children.length}` : node.kind,
        ),
      ),
      this.facts([
        ["Layers", String(layers.length)],
        [
          "Time",
          model.seconds !== null &&
            `${format.seconds(sum(layers, (layer) => model.secondsOf(layer)))} of a step`,
        ],
        ["Memory", `${format.bytes(sum(layers, (layer) => total(layer.memory)))} of a rank`],
        ["Weights", format.short(sum(layers, (layer) => layer.weights))],
      ]),
      this.section(
        "Layers that take longest",
        h(
          "ul",
          { class: "lines" },
          dearest.map((layer) =>
            h(
              "li",
              {},
              h(
                "a",
                { href: this.state.address(this.state.view, { layer: layer.path, scope: null }) },
                layer.path,
              ),
              ` ${format.seconds(model.secondsOf(layer))}`,
            ),
          ),
        ),
      ),
    ];
  }
}
