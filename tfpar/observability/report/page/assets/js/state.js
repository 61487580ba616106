"use strict";
// Where the reader is: a view and what is chosen in it. It is the address, so that links lead there
// and the browser's back button works: `#graph?layer=block_0%2Fmlp&q=mlp`.

class State {
  constructor(views, change) {
    this.views = views;
    this.change = change;
    addEventListener("hashchange", () => this.read());
    // A frame that a notebook made has no address: a link would load the notebook into it.
    this.framed = location.protocol === "about:";
    addEventListener("click", (event) => {
      const link = this.framed && event.target.closest("a[href^='#']");
      if (!link) return;
      event.preventDefault();
      this.read(link.getAttribute("href"));
    });
  }

  // Take over what the address says.
  read(hash = location.hash) {
    this.hash = hash;
    const [view, query] = hash.slice(1).split("?");
    this.view = this.views.includes(view) ? view : this.views[0];
    this.chosen = new URLSearchParams(query || "");
    this.change();
  }

  get(name) {
    return this.chosen.get(name);
  }

  // The address with other choices: `null` takes one away.
  address(view, choices) {
    const chosen = new URLSearchParams(this.chosen);
    for (const [name, value] of Object.entries(choices)) {
      if (value === null || value === "") chosen.delete(name);
      else chosen.set(name, value);
    }
    const query = chosen.toString();
    return `#${view}${query ? `?${query}` : ""}`;
  }

  // Choose something in this view, or go to another one.
  set(choices, view = this.view) {
    const address = this.address(view, choices);
    if (address === this.hash) return;
    const moves = view !== this.view;
    if (!this.framed) history[moves ? "pushState" : "replaceState"](null, "", address);
    this.read(address);
  }
}

// Light or dark: as the system has it, until the reader says otherwise. Browsers may refuse to
// remember anything for a file.
const theme = {
  start() {
    try {
      const kept = localStorage.getItem("tfpar-theme");
      if (kept) document.documentElement.dataset.theme = kept;
    } catch {
      // It is asked for again next time.
    }
  },

  isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },

  toggle() {
    const next = theme.isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("tfpar-theme", next);
    } catch {
      // As above.
    }
  },
};
