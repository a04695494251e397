// The table of calls that have ended: where each prompt went, why, and where its time to first token went.

import { bar, byId, h, ms, short } from "./dom.js";

const PARTS = ["admit", "tokenize", "place", "pull", "retry", "queue", "prefill", "first_token"];
const CLASS = { prefill: "prefill-part" };

export function showLegend() {
  byId("parts").replaceChildren(
    ...PARTS.map((part) => h("span", {}, h("i", { class: `sw ${CLASS[part] ?? part}` }), part.replace("_", " "))),
  );
}

export function showCalls(state) {
  const longest = Math.max(1, ...state.calls.flatMap((call) => call.prompts.map((prompt) => prompt.ttft_ms?.total ?? 0)));
  byId("calls").replaceChildren(...state.calls.flatMap((call) => rows(call, longest)));
  byId("no-calls").hidden = state.calls.length > 0;
}

function rows(call, longest) {
  const prompts = call.prompts.length ? call.prompts : [{}];
  return prompts.flatMap((prompt, index) => {
    const isFirst = index === 0;
    const more = call.num_prompts > 1 ? ` (${index + 1} of ${call.num_prompts})` : "";
    return [
      h(
        "tr",
        {},
        h("td", {}, isFirst ? new Date(1000 * call.ended_at_s).toLocaleTimeString([], { hour12: false }) : ""),
        h("td", {}, h("code", { title: call.id }, isFirst ? short(call.id, 14) : ""), more),
        h("td", { class: `plan ${prompt.plan ?? ""}` }, prompt.plan?.replace("_", " ") ?? "–"),
        h("td", {}, way(prompt)),
        h("td", { class: "num" }, isFirst ? (call.prompt_tokens ?? "–") : ""),
        h("td", { class: "num" }, prompt.cached_tokens ?? "–"),
        h("td", { class: "num" }, isFirst ? (call.output_tokens ?? "–") : ""),
        h("td", { class: "wide" }, first(prompt.ttft_ms, longest)),
        h("td", {}, isFirst ? h("span", { class: `badge ${call.outcome}` }, call.outcome === "succeeded" ? call.reason : `${call.outcome}: ${call.reason}`) : ""),
      ),
      h("tr", { class: "more" }, h("td"), h("td", { class: "why", colspan: 8 }, reason(prompt, call))),
    ];
  });
}

function way(prompt) {
  if (!prompt.plan) return "–";
  const ends = [prompt.prefill_worker, prompt.decode_worker].filter(Boolean).map((name) => short(name, 16));
  return prompt.plan === "prefill_only" ? ends[0] : ends.join(" → ");
}

function first(ttft, longest) {
  if (!ttft) return "–";
  const segments = PARTS.filter((part) => ttft[part]).map((part) => [CLASS[part] ?? part, ttft[part], `${part.replace("_", " ")}: ${ms(ttft[part])}`]);
  return h("div", { class: "ttft" }, h("b", {}, ms(ttft.total)), bar(segments, ttft.total / longest));
}

function reason(prompt, call) {
  const said = [prompt.why ?? "not placed"];
  if (prompt.num_attempts > 1) said.push(`placed ${prompt.num_attempts} times`);
  if (prompt.transfer_wait_ms) said.push(`waited ${ms(prompt.transfer_wait_ms)} for its KV`);
  for (const stall of prompt.stalls ?? []) said.push(`${stall.count} × ${stall.cause.replace("_", " ")}, ${ms(stall.ms)}`);
  said.push(`${ms(1000 * call.seconds)} in all`);
  return said.join(" · ");
}
