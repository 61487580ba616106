"use strict";
// A placement drawn: the mesh as a grid of its ranks, and in each the part of the tensor that it
// holds.

const placement = {
  CELLS: 64,

  // `S(1/64)` as {letter: "S", dim: 1, stride: 64}.
  parse(spec) {
    return spec.split(",").map((text) => {
      const found = /^S\((\d+)(?:\/(\d+))?/.exec(text.trim());
      if (!found) return { letter: text.trim()[0] };
      return { letter: "S", dim: Number(found[1]), stride: found[2] ? Number(found[2]) : null };
    });
  },

  // Of each dim the parts, as pairs of fractions, that the rank at these coordinates holds.
  held(spec, shape, axes, coordinates) {
    const parts = shape.map(() => [[0, 1]]);
    const lengths = [...shape];
    placement.parse(spec).forEach((each, i) => {
      if (each.letter !== "S" || axes[i].size === 1) return;
      const [at, pieces] = [coordinates[i], axes[i].size];
      const length = lengths[each.dim];
      const stride = each.stride || length;
      const block = Math.ceil(stride / pieces);
      const outer = Math.max(1, Math.round(length / stride));
      const from = Math.min(at * block, stride);
      const to = Math.min(from + block, stride);
      const cuts = [];
      for (let o = 0; o < outer; o += 1)
        cuts.push([(o * stride + from) / length, (o * stride + to) / length]);
      parts[each.dim] = cuts.flatMap((cut) => placement.within(parts[each.dim], ...cut));
      lengths[each.dim] = outer * block;
    });
    return parts;
  },

  // The part from `from` to `to` (fractions) of intervals, as if they lay end to end.
  within(intervals, from, to) {
    const whole = sum(intervals, ([a, b]) => b - a);
    const found = [];
    let passed = 0;
    for (const [a, b] of intervals) {
      const start = Math.max(a, a + from * whole - passed);
      const end = Math.min(b, a + to * whole - passed);
      if (end > start + 1e-12) found.push([start, end]);
      passed += b - a;
    }
    return found;
  },

  // The two dims to draw: those that are split, and the largest besides.
  drawnDims(spec, shape) {
    const split = new Set(
      placement
        .parse(spec)
        .filter((p) => p.letter === "S")
        .map((p) => p.dim),
    );
    const order = shape
      .map((n, dim) => dim)
      .sort((a, b) => split.has(b) - split.has(a) || shape[b] - shape[a]);
    return order.slice(0, 2).sort((a, b) => a - b);
  },

  // A tensor, with what one rank holds of it filled.
  tensor(spec, shape, axes, coordinates, width, height) {
    const parts = placement.held(spec, shape, axes, coordinates);
    const dims = placement.drawnDims(spec, shape);
    const [rows, columns] =
      dims.length === 2 ? [parts[dims[0]], parts[dims[1]]] : [[[0, 1]], parts[dims[0]] || [[0, 1]]];
    const kinds = placement.parse(spec).map((p) => p.letter);
    const status = kinds.includes("P") ? "partial" : kinds.includes("S") ? "split" : "replicated";
    return [
      ...rows.flatMap(([y0, y1]) =>
        columns.map(([x0, x1]) =>
          svg("rect", {
            class: `held ${status}`,
            x: x0 * width,
            y: y0 * height,
            width: Math.max(1, (x1 - x0) * width),
            height: Math.max(1, (y1 - y0) * height),
          }),
        ),
      ),
      svg("rect", { class: "whole", width, height }),
    ];
  },

  // The mesh, the last axis to the right, the one before it downwards, others as blocks below.
  draw(spec, shape, axes) {
    const sizes = axes.map((axis) => axis.size);
    const columns = sizes[sizes.length - 1];
    const ranks = sizes.reduce((a, b) => a * b, 1);
    const shownColumns = Math.min(columns, 8);
    const lines = Math.ceil(ranks / columns);
    const shownLines = Math.min(lines, Math.floor(placement.CELLS / shownColumns));
    const [width, height, gap] = [34, shape.length < 2 ? 10 : 26, 14];
    const left = axes.length > 1 ? 46 : 4;
    const cells = [];
    for (let line = 0; line < shownLines; line += 1) {
      const y = 18 + line * (height + gap);
      if (axes.length > 1) {
        const coordinates = placement.coordinates(line * columns, sizes).slice(0, -1);
        cells.push(
          svg(
            "text",
            { class: "axis", x: left - 8, y: y + height / 2 + 4, "text-anchor": "end" },
            coordinates.join(","),
          ),
        );
      }
      for (let column = 0; column < shownColumns; column += 1) {
        const rank = line * columns + column;
        const at = placement.coordinates(rank, sizes);
        const x = left + column * (width + 10);
        cells.push(
          svg(
            "g",
            {
              transform: `translate(${x} ${y})`,
              "data-tip": placement.tip(rank, spec, shape, axes, at),
            },
            placement.tensor(spec, shape, axes, at, width, height),
            svg(
              "text",
              { class: "rank", x: width / 2, y: height + 10, "text-anchor": "middle" },
              rank,
            ),
          ),
        );
      }
    }
    const more = ranks - shownColumns * shownLines;
    const names =
      axes.length > 1
        ? [
            axes
              .slice(0, -1)
              .map((axis) => axis.name)
              .join(","),
            axes[axes.length - 1].name,
          ]
        : ["", axes[0].name];
    const span = [left + shownColumns * (width + 10), 24 + shownLines * (height + gap)];
    return h(
      "figure",
      { class: "placement" },
      svg(
        "svg",
        {
          width: span[0],
          height: span[1],
          role: "img",
          "aria-label": `what each rank holds: ${spec}`,
        },
        svg("text", { class: "axis", x: 0, y: 11 }, names[0] && `${names[0]} ↓`),
        svg("text", { class: "axis", x: left, y: 11 }, `${names[1]} →`),
        cells,
      ),
      more > 0 && h("figcaption", {}, `and ${format.plural(more, "rank")} more`),
    );
  },

  coordinates(rank, sizes) {
    const found = [];
    let rest = rank;
    for (let i = sizes.length - 1; i >= 0; i -= 1) {
      found.unshift(rest % sizes[i]);
      rest = Math.floor(rest / sizes[i]);
    }
    return found;
  },

  tip(rank, spec, shape, axes, at) {
    const where = axes.map((axis, i) => `${axis.name} ${at[i]}`).join(", ");
    const parts = placement.held(spec, shape, axes, at).map((intervals, dim) => {
      const held = sum(intervals, ([a, b]) => b - a);
      if (held > 1 - 1e-9) return ":";
      if (intervals.length > 1) return `${intervals.length} pieces`;
      if (!intervals.length) return "none";
      return intervals[0].map((x) => Math.round(x * shape[dim])).join(":");
    });
    return `rank ${rank} (${where})\nholds [${parts.join(", ")}] of ${format.shape(shape)}`;
  },
};
