"use strict";
// Where the boxes of a graph lie: rows by dagre, and around them the frames of open scopes.

const BOX = { width: 212, height: 50, pad: 14, title: 28, gap: 24 };

// `nodes`: drawn leaves; `edges`: [{source, target}] between them; `frameOf`: the open scope that a
// node or a scope lies in, or null; `order`: edges that are not drawn. Returns boxes by id, frames
// by id, and the points of edges.
function layOut(nodes, edges, frames, frameOf, order) {
  const graph = new dagre.graphlib.Graph({ compound: true, multigraph: true });
  graph.setGraph({
    rankdir: "TB",
    nodesep: 26,
    ranksep: 22,
    edgesep: 14,
    marginx: 20,
    marginy: 20,
  });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const frame of frames) graph.setNode(frame.id, {});
  for (const node of nodes) graph.setNode(node.id, { width: BOX.width, height: BOX.height });
  for (const item of [...frames, ...nodes]) {
    const frame = frameOf(item);
    if (frame) graph.setParent(item.id, frame.id);
  }
  edges.forEach((edge, i) => graph.setEdge(edge.source.id, edge.target.id, {}, String(i)));
  order.forEach((edge, i) =>
    graph.setEdge(edge.source.id, edge.target.id, { weight: 0 }, `order ${i}`),
  );
  dagre.layout(graph);
  const boxes = new Map(nodes.map((node) => [node.id, graph.node(node.id)]));
  const points = edges.map(
    (edge, i) => graph.edge(edge.source.id, edge.target.id, String(i)).points,
  );
  const move = spread(nodes, frames, frameOf, boxes);
  for (const box of boxes.values()) box.y = move(box.y);
  const moved = points.map((line) => line.map(({ x, y }) => ({ x, y: move(y) })));
  const around = framesAround(nodes, frames, frameOf, boxes);
  const corners = [...boxes.values(), ...around.values()];
  const size = [
    Math.max(...corners.map((box) => box.x + box.width / 2), 0, ...moved.flat().map((p) => p.x)) +
      20,
    Math.max(...corners.map((box) => box.y + box.height / 2), 0) + 20,
  ];
  return { boxes, frames: around, points: moved, size };
}

// Rows as far apart as the frames that end and begin between them need, and no further: a map from
// where dagre has a height to where it is then.
function spread(nodes, frames, frameOf, boxes) {
  const rows = [...new Set([...boxes.values()].map((box) => box.y))].sort((a, b) => a - b);
  const index = new Map(rows.map((y, i) => [y, i]));
  const spans = new Map(frames.map((frame) => [frame, [Infinity, -Infinity]]));
  const rowOf = (node) => index.get(boxes.get(node.id).y);
  const framesOf = (node) => {
    const found = [];
    for (let frame = frameOf(node); frame; frame = frameOf(frame)) found.push(frame);
    return found;
  };
  for (const node of nodes) {
    for (const frame of framesOf(node)) {
      const span = spans.get(frame);
      span[0] = Math.min(span[0], rowOf(node));
      span[1] = Math.max(span[1], rowOf(node));
    }
  }
  const [begin, end] = [rows.map(() => 0), rows.map(() => 0)];
  for (const node of nodes) {
    const [at, around] = [rowOf(node), framesOf(node)];
    begin[at] = Math.max(begin[at], around.filter((frame) => spans.get(frame)[0] === at).length);
    end[at] = Math.max(end[at], around.filter((frame) => spans.get(frame)[1] === at).length);
  }
  const half = BOX.height / 2;
  const [from, to] = [[], []];
  let y = 12;
  rows.forEach((row, i) => {
    y += begin[i] * BOX.title + (i ? BOX.gap + end[i - 1] * BOX.pad : 0);
    from.push(row - half, row + half);
    to.push(y, y + BOX.height);
    y += BOX.height;
  });
  return (height) => {
    let i = from.findIndex((edge) => edge >= height);
    if (i <= 0) i = i < 0 ? from.length - 1 : 1;
    const share = (height - from[i - 1]) / (from[i] - from[i - 1] || 1);
    return to[i - 1] + share * (to[i] - to[i - 1]);
  };
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
    const top = Math.min(...inner.map((box) => box.y - box.height / 2)) - BOX.title + 2;
    const bottom = Math.max(...inner.map((box) => box.y + box.height / 2)) + BOX.pad + 2;
    found.set(frame.id, {
      x: (left + right) / 2,
      y: (top + bottom) / 2,
      width: right - left,
      height: bottom - top,
    });
  }
  return found;
}

// A smooth line through points: straight to the middle of each piece, bent at the points between.
function smooth(points) {
  const [first, ...rest] = points;
  if (rest.length < 2)
    return `M${first.x},${first.y} ${rest.map((p) => `L${p.x},${p.y}`).join(" ")}`;
  let path = `M${first.x},${first.y}`;
  for (let i = 0; i < rest.length - 1; i += 1) {
    const [at, next] = [rest[i], rest[i + 1]];
    const end = i === rest.length - 2 ? next : { x: (at.x + next.x) / 2, y: (at.y + next.y) / 2 };
    path += ` Q${at.x},${at.y} ${end.x},${end.y}`;
  }
  return path;
}
