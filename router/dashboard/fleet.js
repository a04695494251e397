// Workers as cards, and what flows between them as lines whose width is the number of prompts.

import { bar, byId, count, h, s, short } from "./dom.js";

const STATES = ["held", "quarantined", "cached", "free"];

export function showFleet(state) {
  for (const role of ["prefill", "decode"]) {
    const workers = state.workers.filter((worker) => worker.role === role);
    const cards = workers.map((worker) => card(worker, state.flows));
    byId(role).replaceChildren(...(cards.length ? cards : [h("p", { class: "empty" }, `no ${role} worker`)]));
  }
  drawFlows(state.flows);
}

function card(worker, flows) {
  const { status } = worker;
  const alone = flows.find((flow) => flow.prefill === null && flow.decode === worker.id);
  const only = flows.find((flow) => flow.decode === null && flow.prefill === worker.id);
  const facts = h("div", { class: "facts" });
  const fact = (value, words) => facts.append(h("span", {}, h("b", {}, value), ` ${words}`));
  if (status) {
    fact(`${status.running}/${status.max_running}`, "running");
    fact(status.waiting, status.waiting_tokens ? `waiting, ${count(status.waiting_tokens)} tokens` : "waiting");
    if (status.step_ms) fact(`${count(status.step_ms)} ms`, "per step");
    if (status.prefill_tokens_per_s) fact(count(status.prefill_tokens_per_s), "tokens/s read");
    if (worker.index_confidence < 1) fact(`${Math.round(100 * worker.index_confidence)}%`, "index trusted");
  } else {
    facts.append("nothing heard yet");
  }
  if (alone) fact(alone.prompts, "prompts read here");
  if (only) fact(only.prompts, "answered by prefill alone");
  const away = worker.role === worker.home_role ? "" : `, home ${worker.home_role}`;
  return h(
    "article",
    { class: `worker ${worker.role}${["dead", "suspect"].includes(worker.state) ? " away" : ""}`, "data-worker": worker.id },
    h(
      "div",
      { class: "top" },
      h("span", { class: "id", title: worker.id }, short(worker.id, 26)),
      h("span", { class: `badge ${worker.state}` }, worker.state + away),
      h("span", { class: "node", title: `node ${worker.node}` }, short(worker.node, 22)),
    ),
    status ? occupancy(status) : null,
    facts,
  );
}

function occupancy(status) {
  const parts = STATES.map((name) => [name, status.blocks[name], `${name}: ${status.blocks[name]} blocks`]);
  const element = bar(parts);
  const used = Math.round(100 * status.kv_utilization);
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", `KV pool ${used}% held, ${status.blocks.cached} blocks cached`);
  const tokens = STATES.reduce((sum, name) => sum + status.blocks[name], 0) * status.block_size;
  return h("div", {}, element, h("div", { class: "facts" }, h("span", {}, h("b", {}, `${used}%`), ` of ${count(tokens)} tokens of KV held`)));
}

function drawFlows(flows) {
  const svg = byId("flows");
  const box = svg.getBoundingClientRect();
  const ends = new Map();
  for (const element of document.querySelectorAll("[data-worker]")) {
    const place = element.getBoundingClientRect();
    ends.set(element.dataset.worker, place.top + place.height / 2 - box.top);
  }
  const drawn = flows.filter((flow) => ends.has(flow.prefill) && ends.has(flow.decode));
  const most = Math.max(1, ...drawn.map((flow) => flow.prompts));
  const gradient = s(
    "linearGradient",
    { id: "way", gradientUnits: "userSpaceOnUse", x1: 0, y1: 0, x2: box.width, y2: 0 },
    s("stop", { offset: 0, class: "stop-prefill" }),
    s("stop", { offset: 1, class: "stop-decode" }),
  );
  const parts = [s("defs", {}, gradient)];
  const labels = [];
  drawn.forEach((flow, index) => {
    const [from, to] = [ends.get(flow.prefill), ends.get(flow.decode)];
    const width = 2 + (14 * flow.prompts) / most;
    const path = `M0,${from} C${box.width / 2},${from} ${box.width / 2},${to + 0.01} ${box.width},${to + 0.01}`;
    parts.push(s("path", { class: "flow", d: path, stroke: "url(#way)", "stroke-width": width }));
    // labels of crossing lines lie at different places of them
    const share = drawn.length > 1 ? 0.3 + (0.4 * (index % 3)) / 2 : 0.5;
    const eased = share * share * (3 - 2 * share);
    labels.push(
      s("text", { class: "flow-label", x: box.width * share, y: from + (to - from) * eased + 4 }, `${flow.prompts} prompt${flow.prompts === 1 ? "" : "s"}/min · ${count(flow.tokens)} tokens`),
    );
  });
  svg.replaceChildren(...parts, ...labels);
}
