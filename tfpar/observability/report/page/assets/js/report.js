"use strict";
// The report that the page holds, and what is looked up in it.

// Unpack the report's JSON.
async function unpack(text) {
  const packed = Uint8Array.from(atob(text.trim()), (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const PHASES = ["forward", "backward", "update"];
const KINDS = ["weights", "slots", "live"];
const KIND_NAMES = {
  weights: "weights",
  slots: "optimizer slots and state",
  live: "activations and gradients",
};

function sum(items, value) {
  return items.reduce((total, item) => total + (value(item) || 0), 0);
}

function total(fields) {
  return sum(Object.values(fields), (value) => value);
}

function grouped(items, key) {
  const found = new Map();
  for (const item of items) {
    const name = key(item);
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(item);
  }
  return found;
}

// `S(0),R` as a letter for each axis.
function specLetters(spec) {
  return spec ? spec.split(",").map((part) => part.trim()[0]) : [];
}

// What blocks that repeat are called, and each of their instances: by what the paths of its layers
// begin with.
function blockNames(layers) {
  const found = new Map();
  for (const [block, inner] of grouped(
    layers.filter((layer) => layer.repeat),
    (layer) => layer.repeat.block,
  )) {
    const instances = new Map();
    for (const [instance, own] of grouped(inner, (layer) => layer.repeat.instance)) {
      const named = own.filter((layer) => layer.class_name);
      instances.set(instance, sharedStart((named.length ? named : own).map((layer) => layer.path)));
    }
    found.set(block, { name: pattern([...instances.values()]) || inner[0].repeat.name, instances });
  }
  return found;
}

// What all texts begin with, without what separates it from the rest.
function sharedStart(texts) {
  let shared = texts[0];
  for (const text of texts) while (!text.startsWith(shared)) shared = shared.slice(0, -1);
  return texts.length > 1 ? shared.replace(/[/_.-]+$/, "") : shared;
}

// `block_*` for `block_0`, `block_1`, ...; empty if they differ in more than numbers.
function pattern(names) {
  const parts = names.map((name) => name.match(/\d+|\D+/g) || []);
  const [first] = parts;
  if (!first.length || parts.some((own) => own.length !== first.length)) return "";
  const differs = (i) => parts.some((own) => own[i] !== first[i]);
  const found = first.map((text, i) => (differs(i) ? "*" : text));
  return found.every((text, i) => text !== "*" || /\d/.test(first[i])) ? found.join("") : "";
}

class Model {
  constructor(report) {
    this.report = report;
    this.axes = report.facts.mesh;
    this.layers = report.layers;
    this.byPath = new Map(this.layers.map((layer) => [layer.path, layer]));
    this.variables = grouped(report.variables, (variable) => variable.layer);
    this.collectives = grouped(report.collectives, (collective) => collective.layer);
    this.outgoing = grouped(report.flows, (flow) => flow.source);
    this.incoming = grouped(report.flows, (flow) => flow.target);
    this.seconds = report.cost ? report.cost.seconds : null;
    this.blocks = blockNames(this.layers);
    this.statuses = new Map(this.layers.map((layer) => [layer.path, this.statusOf(layer)]));
  }

  // The layer that a measured slice is called after, by its path with the model's name or without.
  layerCalled(name) {
    return this.byPath.get(name) || this.byPath.get(name.slice(name.indexOf("/") + 1)) || null;
  }

  weightsOf(layer) {
    return (this.variables.get(layer.path) || []).filter((variable) => variable.kind === "weight");
  }

  // Of its weights on each axis: S if one of them is split.
  heldLetters(layer) {
    return this.merged(this.weightsOf(layer).map((variable) => specLetters(variable.spec)));
  }

  // Of what it hands on, as it makes it.
  madeLetters(layer) {
    return this.merged((this.outgoing.get(layer.path) || []).map((flow) => specLetters(flow.spec)));
  }

  merged(found) {
    const known = found.filter((each) => each.length === this.axes.length);
    if (!known.length) return [];
    return this.axes.map((axis, i) => {
      if (axis.size === 1) return "R";
      return ["P", "S"].find((letter) => known.some((each) => each[i] === letter)) || "R";
    });
  }

  // `partial`: it makes partial sums. `split`: its weights are, or, if it has none, its work is
  // beyond the batch. Else `replicated`.
  statusOf(layer) {
    const held = this.heldLetters(layer);
    const made = this.madeLetters(layer);
    if (made.includes("P")) return "partial";
    if (held.includes("S")) return "split";
    const beyond = (letter, i) => letter === "S" && !this.axes[i].splits_batch;
    return !held.length && made.some(beyond) ? "split" : "replicated";
  }

  status(layer) {
    return this.statuses.get(layer.path);
  }

  secondsOf(layer) {
    return total(layer.seconds) + total(layer.communication_s);
  }

  // `block_3`: the instance of a block that repeats, else the outermost scope.
  scopeOf(layer) {
    if (!layer.repeat) return layer.path.split("/")[0];
    const { block, instance } = layer.repeat;
    return this.blocks.get(block).instances.get(instance) || `${layer.repeat.name} ${instance}`;
  }

  // `block_*/mlp/up`: the path of a layer as that of all that are alike.
  alikePath(layer) {
    if (!layer.repeat) return layer.path;
    const { name, instances } = this.blocks.get(layer.repeat.block);
    const own = instances.get(layer.repeat.instance);
    return own && layer.path.startsWith(own) ? name + layer.path.slice(own.length) : layer.path;
  }

  // A row for each layer, or one for those that are alike in blocks that repeat, of one stage.
  rows(layers, fold) {
    if (!fold)
      return layers.map((layer) => ({
        layer,
        layers: [layer],
        path: layer.path,
        name: layer.path,
      }));
    const key = ({ path, repeat, stage }) =>
      repeat ? `${stage}|${repeat.block}|${repeat.member}` : path;
    return [...grouped(layers, key).values()].map((alike) => {
      const path = alike.length > 1 ? this.alikePath(alike[0]) : alike[0].path;
      return {
        layer: alike[0],
        layers: alike,
        path,
        name: alike.length > 1 ? `${path} × ${alike.length}` : path,
      };
    });
  }

  // Layers whose path has all words of the search.
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    return this.layers.filter((layer) => {
      const searched = `${layer.path} ${layer.class_name}`.toLowerCase();
      return words.every((word) => searched.includes(word));
    });
  }

  // The sets of ranks that store alike: those that run the same stages, or all ranks.
  sets() {
    const pipeline = this.report.pipeline;
    if (pipeline) {
      return pipeline.actors.map((ranks, actor) => {
        const own = pipeline.actor_of_stage.flatMap((owner, stage) =>
          owner === actor ? [stage] : [],
        );
        const first = pipeline.stages[own[0]];
        return {
          key: String(actor),
          name: `stage${own.length > 1 ? "s" : ""} ${own.join(", ")}, ${format.ranks(ranks)}`,
          layers: this.layers.filter((layer) => own.includes(layer.stage)),
          limit: first && first.limit_bytes,
          peak: first && first.peak_bytes,
        };
      });
    }
    const { cost, machines, facts } = this.report;
    const name = facts.ranks > 1 ? `all ranks, 0–${facts.ranks - 1}: they store alike` : "the rank";
    return [
      {
        key: "0",
        name,
        layers: this.layers,
        limit: machines && machines.memory_limit,
        peak: cost && cost.memory_bytes,
      },
    ];
  }
}
