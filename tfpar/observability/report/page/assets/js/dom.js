"use strict";
// Elements. Text goes in as text alone: a name of the model is never read as markup.

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") restyle(element, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

function restyle(element, values) {
  for (const [name, value] of Object.entries(values)) {
    if (name.startsWith("--")) element.style.setProperty(name, value);
    else element.style[name] = value;
  }
}

// An element of HTML: `h("td", {class: "number"}, "3")`.
function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

// An element of SVG.
function svg(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function byId(id) {
  return document.getElementById(id);
}

// How wide a text is, in letters of `size` pixels.
function textWidth(text, size) {
  const context = (textWidth.context ??= document.createElement("canvas").getContext("2d"));
  context.font = `500 ${size}px ${getComputedStyle(document.body).fontFamily}`;
  return context.measureText(text).width;
}

// As much of a text as `width` pixels hold.
function shorten(text, width, size) {
  if (textWidth(text, size) <= width) return text;
  let most = text.length;
  while (most > 1 && textWidth(`${text.slice(0, most)}…`, size) > width) most -= 1;
  return `${text.slice(0, most)}…`;
}

// A letter for each axis of the mesh: S, P or R, in the colour of what it means.
function letters(found, axes, what) {
  const names = { S: "split", P: "partial sums", R: "replicated" };
  return h(
    "span",
    { class: "letters" },
    found.map((letter, i) =>
      h(
        "i",
        { class: `letter ${letter}`, "data-tip": `${what}: ${names[letter]} over ${axes[i].name}` },
        letter,
      ),
    ),
  );
}

// What stands in place of a view that has nothing to show: why, and the command that gives it.
function emptyState(title, why, command) {
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, title),
    h("p", {}, why),
    command && h("pre", {}, command),
  );
}

// A choice of few: buttons side by side, of which one is pressed.
function choice(label, options, chosen, choose) {
  return h(
    "div",
    { class: "choice", role: "group", "aria-label": label },
    Object.entries(options).map(([key, text]) =>
      h(
        "button",
        { "aria-pressed": String(key === chosen), "data-choice": key, onclick: () => choose(key) },
        text,
      ),
    ),
  );
}

function menu(label, options, chosen, choose) {
  const select = h(
    "select",
    { "aria-label": label, onchange: (event) => choose(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === chosen }, text)),
  );
  return h("label", { class: "menu" }, h("span", {}, label), select);
}

// A bar of parts that add up, each as wide as its share of `whole`.
function bar(parts, whole, text) {
  return h(
    "div",
    { class: "bar" },
    parts
      .filter((part) => part.value > 0)
      .map((part) => {
        const share = (100 * part.value) / whole;
        return h(
          "span",
          {
            class: `part ${part.class}`,
            style: { width: `${share}%` },
            "data-tip": `${part.name}\n${text(part.value)} (${format.percent(part.value, whole)})`,
          },
          share > 12 && h("em", {}, part.name),
        );
      }),
  );
}

function legend(parts, text) {
  return h(
    "ul",
    { class: "legend" },
    parts.map((part) =>
      h(
        "li",
        {},
        h("i", { class: `swatch ${part.class}` }),
        part.name,
        text && h("b", {}, text(part.value)),
      ),
    ),
  );
}

// One box for all hints: of what the pointer is on, or what has the focus, that has `data-tip`.
function followTips() {
  const tip = byId("tip");
  const hide = () => (tip.hidden = true);
  const show = (event) => {
    const target = event.target.closest && event.target.closest("[data-tip]");
    if (!target) return hide();
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const box = target.getBoundingClientRect();
    const follows = event.type === "mousemove";
    const x = follows ? event.clientX + 14 : box.left;
    const y = follows ? event.clientY + 16 : box.bottom + 6;
    tip.style.left = `${Math.max(6, Math.min(x, innerWidth - tip.offsetWidth - 8))}px`;
    const fits = y + tip.offsetHeight < innerHeight - 6;
    tip.style.top = `${fits ? y : Math.max(6, (follows ? event.clientY - 10 : box.top - 6) - tip.offsetHeight)}px`;
  };
  document.addEventListener("mousemove", show);
  document.addEventListener(
    "focusin",
    (event) => event.target.matches(":focus-visible") && show(event),
  );
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, true);
}
