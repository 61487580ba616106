"use strict";
// Rectangles whose areas are values, as near to squares as can be (Bruls, Huizing, van Wijk 2000).

// `items` with `value`, in a box {x, y, width, height}; returns [{item, x, y, width, height}].
function squarify(items, box) {
  const whole = sum(items, (item) => item.value);
  if (!(whole > 0) || box.width <= 0 || box.height <= 0) return [];
  const scale = (box.width * box.height) / whole;
  const waiting = items
    .filter((item) => item.value > 0)
    .sort((a, b) => b.value - a.value)
    .map((item) => ({ item, area: item.value * scale }));
  const found = [];
  let rest = { ...box };
  while (waiting.length) {
    const side = Math.min(rest.width, rest.height);
    const row = [waiting.shift()];
    while (waiting.length && worst([...row, waiting[0]], side) <= worst(row, side))
      row.push(waiting.shift());
    rest = placeRow(row, rest, found);
  }
  return found;
}

// How far from a square the worst of a row is.
function worst(row, side) {
  const areas = row.map((each) => each.area);
  const all = sum(areas, (area) => area);
  const most = Math.max(...areas);
  const least = Math.min(...areas);
  return Math.max((side * side * most) / (all * all), (all * all) / (side * side * least));
}

// A row along the shorter side of what is left; returns what is left then.
function placeRow(row, rest, found) {
  const all = sum(row, (each) => each.area);
  const down = rest.width >= rest.height;
  const thick = all / (down ? rest.height : rest.width);
  let at = down ? rest.y : rest.x;
  for (const { item, area } of row) {
    const long = area / thick;
    found.push(
      down
        ? { item, x: rest.x, y: at, width: thick, height: long }
        : { item, x: at, y: rest.y, width: long, height: thick },
    );
    at += long;
  }
  return down
    ? { ...rest, x: rest.x + thick, width: rest.width - thick }
    : { ...rest, y: rest.y + thick, height: rest.height - thick };
}
