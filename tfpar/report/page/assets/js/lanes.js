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
    const stages = pipeline.actor_of_stage.flatMap((owner, stage) => (owner === actor ? [stage] : []));
    for (const stage of stages) {
      const tasks = pipeline.tasks
        .filter((task) => task.actor === actor && task.stage === stage)
        .map((task) => ({
          ...task,
          class: `task-${task.kind}`,
          text: task.microbatch === null ? task.kind : String(task.microbatch),
          tip: `${TASK_KINDS[task.kind] || task.kind}${task.microbatch === null ? "" : ` of microbatch ${task.microbatch}`}\nstage ${stage}, ranks ${format.ranks(ranks)}`,
        }));
      lanes.push({ name: `stage ${stage}`, about: `ranks ${format.ranks(ranks)}`, tasks });
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
// then backward from the last to the first, then the update.
function layerLanes(model) {
  const start = model.report.cost.parts.find((part) => part.name === "start");
  const [compute, waits] = [[], []];
  let now = 0;
  const add = (lane, seconds, cssClass, what, layer) => {
    if (!(seconds > 0)) return;
    lane.push({ start: now, end: now + seconds, class: cssClass, text: layer ? layer.path : what, tip: `${layer ? `${layer.path}\n` : ""}${what}`, layer });
    now += seconds;
  };
  add(compute, start ? start.seconds : 0, "task-start", "start of the step", null);
  for (const phase of PHASES) {
    const layers = phase === "backward" ? [...model.layers].reverse() : model.layers;
    for (const layer of layers) {
      add(compute, layer.seconds[phase], `task-${phase[0].toUpperCase()}`, `${phase}: compute`, layer);
      add(waits, layer.communication_s[phase], "task-wait", `${phase}: waits for communication`, layer);
    }
  }
  const { ranks } = model.report.facts;
  const about = ranks > 1 ? `ranks 0–${ranks - 1}, alike` : "rank 0";
  return [
    { name: "compute", about, tasks: compute },
    { name: "waits", about: "for communication", tasks: waits },
  ];
}
