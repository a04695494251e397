// The row of numbers at the top, each with its last two minutes as a line.

import { byId, count, h, ms, percent, s } from "./dom.js";

const KEPT = 120;
const history = new Map();

export function showTiles(state) {
  const { totals, router } = state;
  const seconds = Math.max(1, Math.min(totals.window_s, router.uptime_s));
  const ended = Object.values(totals.outcomes).reduce((all, value) => all + value, 0);
  const wrong = Object.entries(totals.outcomes).filter(([name]) => name !== "succeeded");
  const cached = totals.cached_tokens / totals.prompt_tokens;
  byId("tiles").replaceChildren(
    tile("Calls", count(ended / seconds), "per s", wrong.map(([name, value]) => `${value} ${name}`).join(", ") || `${ended} in the last minute`, ended / seconds),
    tile("Output", count(totals.output_tokens / seconds), "tokens/s", `prompts ${count(totals.prompt_tokens / seconds)} tokens/s`, totals.output_tokens / seconds),
    tile("Time to first token", ms(totals.ttft_ms.p50), "p50", `p99 ${ms(totals.ttft_ms.p99)}`, totals.ttft_ms.p50),
    tile("Time per output token", ms(totals.tpot_ms.p50), "p50", `p99 ${ms(totals.tpot_ms.p99)}`, totals.tpot_ms.p50),
    tile("Inside the router", count(router.running), "running", `${router.waiting} waiting in line`, router.running + router.waiting),
    tile("Prompt tokens cached", percent(cached), "", `${count(totals.cached_tokens)} of ${count(totals.prompt_tokens)}`, cached || 0),
  );
}

function tile(name, value, unit, note, number) {
  const [figure, own] = value.split(" ");
  return h(
    "div",
    { class: "tile" },
    h("div", { class: "name" }, name),
    h("div", { class: "value" }, figure, h("small", {}, [own, unit].filter(Boolean).join(" "))),
    h("div", { class: "note" }, note),
    spark(name, number),
  );
}

function spark(name, number) {
  const values = history.get(name) ?? [];
  values.push(number ?? 0);
  if (values.length > KEPT) values.shift();
  history.set(name, values);
  const top = Math.max(...values) || 1;
  const points = values.map((value, index) => `${((index + KEPT - values.length) * 100) / (KEPT - 1)},${30 - (28 * value) / top}`);
  const first = points[0].split(",")[0];
  return s(
    "svg",
    { viewBox: "0 0 100 31", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("polygon", { class: "spark-area", points: `${first},31 ${points.join(" ")} 100,31` }),
    s("polyline", { class: "spark", points: points.join(" ") }),
  );
}
