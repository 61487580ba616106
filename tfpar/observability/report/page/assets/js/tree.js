"use strict";
// The layers as a tree: stages, scopes, and blocks that repeat. A repeat has one child for each of
// its instances in that place; folded, one of them stands for all.

const LIMIT = 300;
const COMFORTABLE = 70;

// Ops between layers that neither take time nor store anything worth a box, at the ends of the
// graph: constants, counters, reads of them. What lies between others stays.
function smallLayers(model) {
  const [seconds, bytes] = [
    sum(model.layers, (layer) => model.secondsOf(layer)),
    sum(model.layers, (layer) => total(layer.memory)),
  ];
  const inputs = new Set(model.report.inputs.map((input) => input.name));
  const isTiny = (layer) =>
    !layer.class_name &&
    !layer.weights &&
    !inputs.has(layer.path) &&
    model.secondsOf(layer) <= 1e-3 * seconds &&
    total(layer.memory) <= 1e-3 * bytes;
  const tiny = model.layers.filter(isTiny).map((layer) => layer.path);
  const found = new Set();
  const ends = (path) => [
    (model.incoming.get(path) || []).every((flow) => found.has(flow.source)),
    (model.outgoing.get(path) || []).every((flow) => found.has(flow.target)),
  ];
  for (let before = -1; before < found.size;) {
    before = found.size;
    for (const path of tiny) if (!found.has(path) && ends(path).some(Boolean)) found.add(path);
  }
  return found;
}

class TreeNode {
  constructor(id, kind, label, parent) {
    Object.assign(this, { id, kind, label, parent, children: [], layer: null });
  }

  // The layers below it, whether they are shown or not.
  layers() {
    return this.layer ? [this.layer] : this.children.flatMap((child) => child.layers());
  }
}

class Tree {
  constructor(model) {
    this.model = model;
    this.root = new TreeNode("", "root", "", null);
    this.nodes = new Map([["", this.root]]);
    this.leaves = new Map();
    this.small = smallLayers(model);
    const prefixes = this.prefixes();
    for (const layer of model.layers) this.add(layer, prefixes);
    this.flatten(this.root);
  }

  // The scope that all layers of an instance of a block share, as a list of names.
  prefixes() {
    const instances = grouped(
      this.model.layers.filter((layer) => layer.repeat),
      (layer) => `${layer.repeat.block}/${layer.repeat.instance}`,
    );
    const found = new Map();
    for (const [key, layers] of instances) {
      let shared = layers[0].path.split("/").slice(0, -1);
      for (const layer of layers) {
        const names = layer.path.split("/");
        let same = 0;
        while (same < shared.length && names[same] === shared[same]) same += 1;
        shared = shared.slice(0, same);
      }
      found.set(key, shared);
    }
    return found;
  }

  add(layer, prefixes) {
    let names = layer.path.split("/");
    let at = this.root;
    if (this.model.report.pipeline && layer.stage !== null) {
      at = this.child(at, `stage ${layer.stage}`, "stage", `stage ${layer.stage}`);
    }
    let inner = names.slice(0, -1);
    if (layer.repeat) {
      const { block, instance } = layer.repeat;
      const prefix = prefixes.get(`${block}/${instance}`);
      for (const scope of prefix.slice(0, -1)) at = this.child(at, scope, "scope", scope);
      at = this.child(
        at,
        `repeat ${block}`,
        "repeat",
        this.lastName(this.model.blocks.get(block).name),
      );
      at = this.child(
        at,
        `instance ${instance}`,
        "instance",
        this.lastName(this.model.scopeOf(layer)),
      );
      inner = inner.slice(prefix.length);
      const own = this.model.scopeOf(layer);
      if (!prefix.length && layer.path.startsWith(own) && layer.path !== own) {
        // `block_3_mlp/up` is the layer `up` of the scope `mlp` of `block_3`.
        names = layer.path
          .slice(own.length)
          .replace(/^[/_.-]/, "")
          .split("/");
        inner = names.slice(0, -1);
      }
    }
    for (const scope of inner) at = this.child(at, scope, "scope", scope);
    const leaf = this.child(at, `layer ${layer.path}`, "layer", names[names.length - 1]);
    leaf.layer = layer;
    this.leaves.set(layer.path, leaf);
  }

  lastName(path) {
    return path.split("/").pop();
  }

  child(parent, name, kind, label) {
    const id = `${parent.id}|${name}`;
    if (!this.nodes.has(id)) {
      const node = new TreeNode(id, kind, label, parent);
      this.nodes.set(id, node);
      parent.children.push(node);
    }
    return this.nodes.get(id);
  }

  // A scope that holds one thing is said in its name.
  flatten(node) {
    for (const child of node.children) this.flatten(child);
    node.children = node.children.map((child) => {
      if (child.kind !== "scope" || child.children.length !== 1) return child;
      const [only] = child.children;
      if (only.kind === "repeat") return child;
      only.label = only.label === child.label ? only.label : `${child.label}/${only.label}`;
      only.parent = node;
      this.nodes.delete(child.id);
      return only;
    });
  }

  // The instance that stands for all of a folded repeat: the first of those that have most layers,
  // as a stage may begin or end within a block.
  standing(repeat) {
    repeat.first ??= repeat.children.reduce((a, b) =>
      b.layers().length > a.layers().length ? b : a,
    );
    return repeat.first;
  }

  // What a group shows inside: a folded repeat what one of its instances holds.
  inside(node, unfolded) {
    const from = node.kind === "repeat" && !unfolded.has(node.id) ? this.standing(node) : node;
    return this.all ? from.children : from.children.filter((child) => !this.isSmall(child));
  }

  // Whether all that it holds is small; `all` has it drawn nevertheless.
  isSmall(node) {
    return node.layers().every((layer) => this.small.has(layer.path));
  }

  // Which nodes are drawn: groups are opened from the outside inwards while there is room, or as
  // the reader says: `opened` has for the id of a node whether it is to be open.
  visible(opened, unfolded) {
    const open = new Set([""]);
    let shown = this.inside(this.root, unfolded).length;
    let refused = 0;
    let waiting = this.inside(this.root, unfolded).filter((node) => !node.layer);
    while (waiting.length) {
      const next = [];
      for (const node of waiting) {
        const inner = this.inside(node, unfolded);
        const grows = shown + inner.length - 1;
        const wanted = opened.get(node.id);
        if (wanted === false) continue;
        if (grows > LIMIT && wanted) refused += 1;
        if (grows > (wanted ? LIMIT : COMFORTABLE) && node.kind !== "stage") continue;
        if (grows > LIMIT) continue;
        shown = grows;
        open.add(node.id);
        next.push(...inner.filter((child) => !child.layer));
      }
      waiting = next;
    }
    return { open, shown, refused };
  }

  // The leaf that is drawn for a layer where all scopes are open: in a folded repeat that of the
  // instance which stands for all; null if that has none like it.
  leafFor(layer, unfolded) {
    const leaf = this.leaves.get(layer.path);
    const repeat = this.ancestor(leaf, "repeat");
    return repeat && !unfolded.has(repeat.id) ? this.twin(leaf, repeat) : leaf;
  }

  // The drawn node that stands for a layer; null if there is none.
  standIn(layer, open, unfolded) {
    const leaf = this.leafFor(layer, unfolded);
    if (!leaf) return null;
    let found = leaf;
    for (let node = leaf.parent; node; node = node.parent) {
      const folded = node.kind === "instance" && !unfolded.has(node.parent.id);
      if (!folded && !open.has(node.id)) found = node;
    }
    return found;
  }

  // The leaf like this one in the instance that stands for all.
  twin(leaf, repeat) {
    repeat.twins ??= new Map(
      this.standing(repeat)
        .layers()
        .map((layer) => [layer.repeat.member, layer.path]),
    );
    return this.leaves.get(repeat.twins.get(leaf.layer.repeat.member)) || null;
  }

  // The layers that a drawn node stands for.
  standsFor(node, unfolded) {
    const repeat = this.ancestor(node, "repeat");
    if (!repeat || repeat === node || unfolded.has(repeat.id)) return node.layers();
    const members = new Set(node.layers().map((layer) => layer.repeat && layer.repeat.member));
    return repeat.layers().filter((layer) => members.has(layer.repeat.member));
  }

  ancestor(node, kind) {
    for (let at = node; at; at = at.parent) if (at.kind === kind) return at;
    return null;
  }

  repeats() {
    return [...this.nodes.values()].filter((node) => node.kind === "repeat");
  }

  // Whether two layers are in different instances of one folded repeat.
  acrossInstances(source, target, unfolded) {
    const [a, b] = [source, target].map((layer) =>
      this.ancestor(this.leaves.get(layer.path), "repeat"),
    );
    return (
      a !== null &&
      a === b &&
      !unfolded.has(a.id) &&
      source.repeat.instance !== target.repeat.instance
    );
  }
}
