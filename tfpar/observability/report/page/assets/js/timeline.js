"use strict";
// A predicted step, lane by lane, a measured one below it, and what each stage takes.

const LANE = { height: 30, thin: 16, gap: 6, top: 26, left: 128 };

class TimelineView {
  constructor(model, state) {
    Object.assign(this, { model, state });
    this.title = "Timeline";
  }

  draw() {
    const { report } = this.model;
    const { pipeline, measured } = report;
    const why = this.missing(report);
    if (why && !measured)
      return emptyState(
        "There is no timeline",
        why,
        "tfpar plan SCRIPT.PY:FUNCTION --mesh 2x8 --cluster dgx-a100 -o plan.json",
      );
    const predicted = () => (pipeline ? pipelineLanes(pipeline) : layerLanes(this.model));
    this.lanes = why ? [] : predicted();
    const predictedEnd = this.lastEnd();
    if (measured) this.lanes.push(...measuredLanes(measured, this.model));
    this.end = Math.max(this.lastEnd(), measured ? measured.seconds : 0);
    const height =
      this.lanes.reduce(
        (y, lane) => y + (lane.thin ? LANE.thin : LANE.height) + LANE.gap,
        LANE.top,
      ) + 4;
    this.content = svg("g", {});
    this.frame = svg(
      "svg",
      { class: "timeline", height, role: "group", "aria-label": "Timeline of a step" },
      this.content,
    );
    this.names = svg("svg", { class: "lane-names", width: LANE.left, height }, this.laneNames());
    this.zoom = new Zoom(this.frame, this.content, [1, height], {
      flat: true,
      change: () => this.fill(),
    });
    new ResizeObserver(() => this.zoom.apply()).observe(this.frame);
    return h(
      "div",
      { class: "timeline-view" },
      h(
        "div",
        { class: "toolbar" },
        !why && [
          h(
            "b",
            { class: "figure", "data-total": "end", "data-value": predictedEnd },
            format.seconds(predictedEnd),
          ),
          h(
            "span",
            { class: "note" },
            pipeline
              ? this.words(pipeline)
              : "predicted; all ranks run alike, and one stands for them",
          ),
        ],
        measured && this.measured(measured),
        h("span", { class: "grow" }),
        zoomButtons(this.zoom),
      ),
      h("div", { class: "lanes" }, this.names, this.frame),
      legend(this.kinds()),
      !pipeline && report.cost && this.phases(report.cost),
      pipeline && this.stages(pipeline),
      pipeline && this.schedules(pipeline),
    );
  }

  lastEnd() {
    return this.lanes.reduce(
      (end, lane) => lane.tasks.reduce((most, task) => Math.max(most, task.end), end),
      0,
    );
  }

  // What was measured, and how far it is from what was predicted.
  measured({ source, number, seconds, all_seconds, ranks, lanes }) {
    const base = this.model.seconds;
    const several = all_seconds.length > 1 ? `, the median of ${all_seconds.length}` : "";
    const shown = new Set(lanes.map((lane) => lane.rank)).size;
    const some = shown < ranks ? `; ${shown} of ${ranks} ranks are shown` : "";
    return [
      h(
        "b",
        { class: "figure", "data-total": "measured", "data-value": seconds },
        format.seconds(seconds),
      ),
      h(
        "span",
        { class: "note" },
        `measured${base ? ` (${format.against(seconds, base)})` : ""}: step ${number} of ${source}${several}${some}`,
      ),
    ];
  }

  missing(report) {
    if (report.pipeline && !report.pipeline.tasks.length)
      return "The plan has stages, but nothing was priced, so that it is not known when they run. A plan for a cluster knows it:";
    if (!report.pipeline && !report.cost)
      return "Nothing was priced, as the plan was made without a cluster. One that is made for a cluster has times:";
    if (!report.pipeline && !report.layers.length)
      return "The plan's layers are not known. A plan that is made anew keeps them:";
    return null;
  }

  words(pipeline) {
    const bubble =
      pipeline.bubble === null
        ? ""
        : `; ranks wait ${format.percent(pipeline.bubble, 1)} of the time that they work`;
    const some = Array.isArray(pipeline.recompute)
      ? ` of ${format.plural(pipeline.recompute.length, "stage")}`
      : "";
    const again = pipeline.recompute ? `, forward passes${some} run again` : "";
    return `predicted; ${pipeline.schedule}${again}${bubble}`;
  }

  kinds() {
    const names = {
      ...Object.fromEntries(
        Object.entries(TASK_KINDS).map(([kind, text]) => [`task-${kind}`, text]),
      ),
      "task-send": "transfer",
      "task-wait": "waits for communication",
      "task-meet": "communication",
      "task-late": "waits for another rank",
      "task-start": "start of the step, and what belongs to no phase",
    };
    const there = new Set(this.lanes.flatMap((lane) => lane.tasks.map((task) => task.class)));
    return Object.entries(names)
      .filter(([key]) => there.has(key))
      .map(([key, name]) => ({ name, class: key }));
  }

  laneNames() {
    let y = LANE.top;
    return this.lanes
      .map((lane) => {
        const height = lane.thin ? LANE.thin : LANE.height;
        const middle = y + height / 2;
        y += height + LANE.gap;
        if (lane.thin) return svg("text", { class: "about", x: 8, y: middle + 4 }, lane.name);
        return [
          svg("text", { x: 8, y: middle - 1 }, lane.name),
          svg("text", { class: "about", x: 8, y: middle + 12 }, lane.about),
        ];
      })
      .flat();
  }

  shown() {
    if (this.zoom) this.zoom.fit();
  }

  // What of it is in view, at the scale that is.
  fill() {
    const width = this.frame.clientWidth;
    if (!width) return;
    const perSecond = ((width - 12) * this.zoom.scale) / this.end;
    const at = (seconds) => this.zoom.x + seconds * perSecond;
    const chosen = this.state.get("layer");
    const parts = [...this.ticks(at, perSecond, width)];
    let y = LANE.top;
    for (const lane of this.lanes) {
      const height = lane.thin ? LANE.thin : LANE.height;
      parts.push(
        svg("rect", {
          class: "idle",
          x: Math.max(0, at(0)),
          y,
          width: Math.max(0, Math.min(width, at(this.end)) - Math.max(0, at(0))),
          height,
        }),
      );
      for (const task of lane.tasks) {
        const [x0, x1] = [at(task.start), at(task.end)];
        if (x1 < 0 || x0 > width) continue;
        parts.push(this.task(task, x0, x1, y, height, chosen));
      }
      y += height + LANE.gap;
    }
    this.content.replaceChildren(...parts);
  }

  task(task, x0, x1, y, height, chosen) {
    const width = Math.max(0.6, x1 - x0 - (x1 - x0 > 4 ? 1 : 0));
    const tip = `${task.tip}\n${format.seconds(task.end - task.start)}, from ${format.seconds(task.start)} to ${format.seconds(task.end)}`;
    const is = task.layer && task.layer.path === chosen;
    return svg(
      "g",
      {
        class: `task ${task.class} ${is ? "chosen" : ""}`,
        "data-tip": tip,
        onclick: () => task.layer && this.state.set({ layer: task.layer.path, scope: null }),
      },
      svg("rect", { x: x0, y, width, height, rx: width > 6 ? 2 : 0 }),
      task.text &&
        width > task.text.length * 7 + 4 &&
        svg(
          "text",
          { x: x0 + width / 2, y: y + height / 2 + 4, "text-anchor": "middle" },
          task.text,
        ),
    );
  }

  ticks(at, perSecond, width) {
    const wanted = 90 / perSecond;
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
    const first = Math.max(0, Math.ceil(-this.zoom.x / perSecond / step));
    const last = Math.min(
      Math.floor(this.end / step),
      Math.floor((width - this.zoom.x) / perSecond / step),
    );
    const found = [];
    for (let i = first; i <= last; i += 1) {
      const x = at(i * step);
      found.push(
        svg("line", { class: "tick", x1: x, x2: x, y1: 18, y2: "100%" }),
        svg("text", { class: "tick", x: x + 3, y: 13 }, i ? format.seconds(i * step) : "0"),
      );
    }
    return found;
  }

  update() {
    if (this.zoom) this.fill();
  }

  phases(cost) {
    const rows = PHASES.map((phase) => [phase, cost.compute_s[phase], cost.communication_s[phase]]);
    const beside = Math.max(0, cost.gradients_s - cost.exposed_s);
    const notes = [
      cost.hidden_s > 0 &&
        `${format.seconds(cost.hidden_s)} of communication run behind other work`,
      beside > 0 &&
        `${format.seconds(beside)} of ${format.seconds(cost.gradients_s)} that gradients are summed in, beside the backward pass`,
    ].filter(Boolean);
    const cells = (row) =>
      row.slice(1).map((seconds) => h("td", { class: "number" }, format.seconds(seconds)));
    return h(
      "section",
      { class: "card wide narrow" },
      h("h2", {}, "Phases", this.model.report.measured && h("small", {}, "as predicted")),
      h(
        "table",
        { class: "rows still" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", {}, "Phase"),
            h("th", { class: "number" }, "Compute"),
            h("th", { class: "number" }, "Communication"),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row) => h("tr", {}, h("td", {}, row[0]), cells(row))),
        ),
      ),
      notes.length > 0 &&
        h("p", { class: "note" }, `Not drawn, as nothing waits for it: ${notes.join("; ")}.`),
    );
  }

  stages(pipeline) {
    const columns = [
      ["Stage", (stage, i) => String(i)],
      ["Ranks", (stage) => format.range(stage.ranks)],
      ["Layers", (stage, i) => this.layersOf(stage, i), true],
      ["Forward", (stage) => format.seconds(stage.forward_s)],
      ["Backward", (stage) => format.seconds(stage.backward_s)],
      ["Update", (stage) => format.seconds(stage.update_s)],
      ["Waits", (stage) => (stage.bubble === null ? "–" : format.percent(stage.bubble, 1))],
      ["In flight", (stage) => format.count(stage.in_flight)],
      ["Sends", (stage) => format.bytes(stage.sent_bytes)],
      ["Peak", (stage) => format.bytes(stage.peak_bytes)],
      ["Limit", (stage) => format.bytes(stage.limit_bytes)],
    ];
    const cell = (tag, text, left) => h(tag, { class: left ? "" : "number" }, text);
    return h(
      "section",
      { class: "card wide" },
      h("h2", {}, "Stages", h("small", {}, "times of one microbatch, of the update of a step")),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "rows still" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              columns.map(([name, , left]) => cell("th", name, left)),
            ),
          ),
          h(
            "tbody",
            {},
            pipeline.stages.map((stage, i) =>
              h(
                "tr",
                {},
                columns.map(([, get, left]) => cell("td", get(stage, i), left)),
              ),
            ),
          ),
        ),
      ),
    );
  }

  // Its first layer and its last.
  layersOf(stage, i) {
    const named = this.model.layers.filter((layer) => layer.stage === i && layer.class_name);
    return named.length
      ? `${named[0].path} … ${named[named.length - 1].path} (${named.length})`
      : stage.layers;
  }

  schedules(pipeline) {
    if (!pipeline.schedules.length) return null;
    const base = pipeline.schedules[0].seconds;
    const row = (schedule, i) =>
      h(
        "tr",
        {},
        h("td", {}, schedule.name, i === 0 && h("span", { class: "tag" }, "this plan")),
        h("td", { class: "number" }, format.seconds(schedule.seconds)),
        h("td", { class: "number" }, i ? format.against(schedule.seconds, base) : ""),
        h("td", { class: "number" }, format.bytes(schedule.memory_bytes)),
        h("td", {}, schedule.fits ? "fits" : "does not fit"),
      );
    return h(
      "section",
      { class: "card wide" },
      h("h2", {}, "Schedules that it was picked from"),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "rows still" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Schedule", "A step", "Longer", "Memory", ""].map((name, i) =>
                h("th", { class: i > 0 && i < 4 ? "number" : "" }, name),
              ),
            ),
          ),
          h("tbody", {}, pipeline.schedules.map(row)),
        ),
      ),
    );
  }
}
