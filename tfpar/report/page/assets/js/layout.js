"use strict";
// Where the boxes of a graph lie: rows by dagre, and around them the frames of open scopes.

const BOX = { width: 196, height: 54, pad: 14, title: 26 };

// `nodes`: drawn leaves; `edges`: [{source, target}] between them; `frameOf`: the open scope that a
// node or a scope lies in, or null. Returns boxes by id, frames by id, and the points of edges.
function layOut(nodes, edges, frames, frameOf) {
  const graph = new dagre.graphlib.Graph({ compound: true, multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: 26, ranksep: 30, edgesep: 14, marginx: 20, marginy: 20 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const frame of frames) graph.setNode(frame.id, {});
  for (const node of nodes) graph.setNode(node.id, { width: BOX.width, height: BOX.height });
  for (const item of [...frames, ...nodes]) {
    const frame = frameOf(item);
    if (frame) graph.setParent(item.id, frame.id);
  }
  edges.forEach((edge, i) => graph.setEdge(edge.source.id, edge.target.id, { weight: edge.weight || 1 }, String(i)));
  dagre.layout(graph);
  const boxes = new Map(nodes.map((node) => [node.id, graph.node(node.id)]));
  const points = edges.map((edge, i) => graph.edge(edge.source.id, edge.target.id, String(i)).points);
  const around = framesAround(nodes, frames, frameOf, boxes);
  const corners = [...boxes.values(), ...around.values()];
  const size = [
    Math.max(...corners.map((box) => box.x + box.width / 2), 0, ...points.flat().map((p) => p.x)) + 20,
    Math.max(...corners.map((box) => box.y + box.height / 2), 0) + 20,
  ];
  return { boxes, frames: around, points, size };
}

// Frames as tight as their content lets them, innermost first.
function framesAround(nodes, frames, frameOf, boxes) {
  const found = new Map();
  const depth = (frame) => (frame ? 1 + depth(frameOf(frame)) : 0);
  for (const frame of [...frames].sort((a, b) => depth(b) - depth(a))) {
    const inner = [
      ...nodes.filter((node) => frameOf(node) === frame).map((node) => boxes.get(node.id)),
      ...frames.filter((other) => frameOf(other) === frame).map((other) => found.get(other.id)),
    ].filter(Boolean);
    if (!inner.length) continue;
    const left = Math.min(...inner.map((box) => box.x - box.width / 2)) - BOX.pad;
    const right = Math.max(...inner.map((box) => box.x + box.width / 2)) + BOX.pad;
    const top = Math.min(...inner.map((box) => box.y - box.height / 2)) - BOX.title;
    const bottom = Math.max(...inner.map((box) => box.y + box.height / 2)) + BOX.pad;
    found.set(frame.id, { x: (left + right) / 2, y: (top + bottom) / 2, width: right - left, height: bottom - top });
  }
  return found;
}

// A smooth line through points: straight to the middle of each piece, bent at the points between.
function smooth(points) {
  const [first, ...rest] = points;
  if (rest.length < 2) return `M${first.x},${first.y} ${rest.map((p) => `L${p.x},${p.y}`).join(" ")}`;
  let path = `M${first.x},${first.y}`;
  for (let i = 0; i < rest.length - 1; i += 1) {
    const [at, next] = [rest[i], rest[i + 1]];
    const end = i === rest.length - 2 ? next : { x: (at.x + next.x) / 2, y: (at.y + next.y) / 2 };
    path += ` Q${at.x},${at.y} ${end.x},${end.y}`;
  }
  return path;
}
