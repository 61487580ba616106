"use strict";
// What runs when, as lanes: [{name, about, tasks: [{start, end, class, text, tip, layer}]}].

const TASK_KINDS = {
  F: "forward",
  B: "backward",
  I: "backward, of inputs",
  W: "backward, of weights",
  U: "update",
  R: "sum of gradients",
};

// Of a pipeline: a lane for each set of ranks and stage, and one for what the set sends.
function pipelineLanes(pipeline) {
  const lanes = [];
  pipeline.actors.forEach((ranks, actor) => {
    const stages = pipeline.actor_of_stage.flatMap((owner, stage) =>
      owner === actor ? [stage] : [],
    );
    for (const stage of stages) {
      const tasks = pipeline.tasks
        .filter((task) => task.actor === actor && task.stage === stage)
        .map((task) => ({
          ...task,
          class: `task-${task.kind}`,
          text: task.microbatch === null ? task.kind : String(task.microbatch),
          tip: `${TASK_KINDS[task.kind] || task.kind}${task.microbatch === null ? "" : ` of microbatch ${task.microbatch}`}\nstage ${stage}, ${format.ranks(ranks)}`,
        }));
      lanes.push({ name: `stage ${stage}`, about: format.ranks(ranks), tasks });
    }
    const sends = pipeline.transfers
      .filter((sent) => pipeline.actor_of_stage[sent.source] === actor)
      .map((sent) => ({
        ...sent,
        class: "task-send",
        text: "",
        tip: `stage ${sent.source} sends ${format.bytes(sent.num_bytes)} to stage ${sent.target}${sent.microbatch === null ? "" : `, microbatch ${sent.microbatch}`}`,
      }));
    if (sends.length) lanes.push({ name: "sends", about: "", tasks: sends, thin: true });
  });
  return lanes;
}

// Of one set of ranks, which all run alike: layer by layer what they compute and wait for, forward,
// then backward from the last to the first, then the update; above it which phase and scope that
// is.
function layerLanes(model) {
  const start = model.report.cost.parts.find((part) => part.name === "start");
  const [phases, scopes, compute, waits] = [[], [], [], []];
  let now = 0;
  const add = (lane, seconds, cssClass, text, tip, layer) => {
    if (!(seconds > 0)) return;
    lane.push({ start: now, end: now + seconds, class: cssClass, text, tip, layer });
    now += seconds;
  };
  // Prolong the last span of a lane, or begin another one.
  const span = (lane, from, cssClass, text, tip) => {
    const last = lane[lane.length - 1];
    if (last && last.tip === tip && last.end === from) last.end = now;
    else if (now > from) lane.push({ start: from, end: now, class: cssClass, text, tip });
  };
  add(phases, start ? start.seconds : 0, "task-start", "start", "start of the step", null);
  for (const phase of PHASES) {
    const layers = phase === "backward" ? [...model.layers].reverse() : model.layers;
    for (const layer of layers) {
      const from = now;
      add(
        compute,
        layer.seconds[phase],
        `task-${phase[0].toUpperCase()}`,
        layer.path,
        `${layer.path}\n${phase}: computes`,
        layer,
      );
      add(
        waits,
        layer.communication_s[phase],
        "task-wait",
        layer.path,
        `${layer.path}\n${phase}: waits for communication`,
        layer,
      );
      const scope = model.scopeOf(layer);
      span(scopes, from, "task-scope", scope, `${scope}\n${phase}`);
      span(phases, from, `task-${phase[0].toUpperCase()}`, phase, phase);
    }
  }
  const { ranks } = model.report.facts;
  return [
    { name: "phase", about: ranks > 1 ? `ranks 0–${ranks - 1}, alike` : "rank 0", tasks: phases },
    { name: "scope", about: "", tasks: scopes, thin: true },
    { name: "compute", about: "layer by layer", tasks: compute },
    { name: "waits", about: "for communication", tasks: waits },
  ];
}

const MEASURED_KINDS = { waiting: "late", forward: "F", backward: "B", update: "U" };

// Of a step that was measured: the threads of each rank, which have what they are called after.
function measuredLanes(measured, model) {
  return measured.lanes.map(({ rank, thread, slices }) => {
    const communicates = thread.startsWith("communication");
    const kindOf = ({ name, category }) => {
      if (category === "waiting") return MEASURED_KINDS.waiting;
      if (communicates) return "meet";
      return thread.startsWith("tasks")
        ? (name.match(/[A-Z]/) || ["F"])[0]
        : MEASURED_KINDS[category] || "start";
    };
    const tasks = slices.map((slice) => ({
      start: slice.start,
      end: slice.end,
      class: `task-${kindOf(slice)}`,
      text: slice.name,
      tip: `${slice.name}\n${slice.category}, rank ${rank}, measured`,
      layer: model.layerCalled(slice.name),
    }));
    return { name: `rank ${rank}`, about: thread, tasks, thin: / \d+$/.test(thread) };
  });
}
