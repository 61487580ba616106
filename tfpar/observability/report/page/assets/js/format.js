"use strict";
// Numbers as text, the same as tfpar prints them.

// A sentence whose numbers stay with their units.
function unbroken(text) {
  return text.replace(/(\d) (?=(?:[um]?s|[KMGTP]iB|B|%)\b)/g, "$1\u00a0");
}

const format = {
  // `1.50 MiB`, rounded up: what is printed, given as a limit, is enough.
  bytes(count) {
    if (count === null || count === undefined) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    const whole = Math.ceil(count);
    let power = 0;
    while (power < units.length - 1 && whole >= 1024 ** (power + 1)) power += 1;
    if (power === 0) return `${whole} B`;
    const hundredths = Math.ceil((100 * whole) / 1024 ** power);
    const rest = String(hundredths % 100).padStart(2, "0");
    return `${Math.floor(hundredths / 100)}.${rest} ${units[power]}`;
  },

  // `1.25 ms`.
  seconds(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 0) return `−${format.seconds(-seconds)}`;
    if (seconds >= 1) return `${seconds.toFixed(2)} s`;
    if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(2)} ms`;
    return `${(seconds * 1e6).toFixed(2)} us`;
  },

  // `$1.25`; below ten cents in two significant digits.
  dollars(amount) {
    const digits = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
    const small = amount !== 0 && amount < 0.1;
    return `$${small ? Number(amount.toPrecision(2)) : amount.toLocaleString("en-US", digits)}`;
  },

  count(number) {
    return number === null || number === undefined ? "–" : number.toLocaleString("en-US");
  },

  // `1.3 G`, as of parameters and operations.
  short(number) {
    const units = ["", " k", " M", " G", " T", " P", " E"];
    let power = 0;
    while (power < units.length - 1 && Math.abs(number) >= 1000 ** (power + 1)) power += 1;
    const scaled = number / 1000 ** power;
    return (power ? scaled.toPrecision(3) : String(Math.round(scaled))) + units[power];
  },

  percent(part, whole) {
    if (!whole) return "–";
    const found = (100 * part) / whole;
    return `${found >= 10 || found === 0 ? found.toFixed(0) : found.toFixed(1)} %`;
  },

  // How much longer or shorter than `base`: `+12 %`, `2.4 ×`.
  against(seconds, base) {
    const ratio = seconds / base;
    if (ratio >= 2) return `${ratio.toPrecision(3)} ×`;
    const more = 100 * (ratio - 1);
    return Math.abs(more) < 0.05
      ? "as long"
      : `${more > 0 ? "+" : "−"}${Math.abs(more).toFixed(1)} %`;
  },

  shape(shape) {
    return shape.length ? shape.map((n) => (n === null ? "?" : n)).join(" × ") : "scalar";
  },

  // `ranks 0–7`, `rank 3`.
  ranks(ranks) {
    return `rank${ranks.length === 1 ? "" : "s"} ${format.range(ranks)}`;
  },

  // `0–7`, `0, 2, 4`.
  range(ranks) {
    const last = ranks[ranks.length - 1];
    if (ranks.length > 2 && last - ranks[0] === ranks.length - 1) return `${ranks[0]}–${last}`;
    return ranks.length > 6 ? `${ranks.slice(0, 4).join(", ")}, … ${last}` : ranks.join(", ");
  },

  plural(count, word) {
    return `${format.count(count)} ${word}${count === 1 ? "" : "s"}`;
  },

  // `all_reduce over model`.
  collective(found) {
    return `${found.kind} over ${found.axes.join(", ")}`;
  },
};
