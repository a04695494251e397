// Each answer comes from one router. Several routers stand behind one address: what they say is put together.

const FORGET_S = 15;

export class Routers {
  constructor() {
    this.heard = new Map();
  }

  take(state) {
    const now = performance.now() / 1e3;
    this.heard.set(state.router.id, { state, now });
    for (const [id, { now: at }] of this.heard) if (now - at > FORGET_S) this.heard.delete(id);
    return this.merged(state);
  }

  merged(latest) {
    const states = [...this.heard.values()].map(({ state }) => state);
    if (states.length === 1) return { ...latest, num_routers: 1 };
    const calls = states.flatMap((state) => state.calls).sort((a, b) => b.ended_at_s - a.ended_at_s);
    return {
      ...latest,
      num_routers: states.length,
      router: {
        ...latest.router,
        waiting: sum(states, (state) => state.router.waiting),
        running: sum(states, (state) => state.router.running),
      },
      totals: totals(states.map((state) => state.totals)),
      flows: flows(states.flatMap((state) => state.flows)),
      calls: calls.slice(0, 40),
    };
  }
}

const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);

function totals(all) {
  const outcomes = {};
  for (const one of all) {
    for (const [name, value] of Object.entries(one.outcomes)) outcomes[name] = (outcomes[name] ?? 0) + value;
  }
  const added = (name) => sum(all, (one) => one[name]);
  return {
    window_s: all[0].window_s,
    outcomes,
    prompt_tokens: added("prompt_tokens"),
    cached_tokens: added("cached_tokens"),
    output_tokens: added("output_tokens"),
    ttft_ms: percentiles(all, "ttft_ms"),
    tpot_ms: percentiles(all, "tpot_ms"),
  };
}

// Percentiles cannot be added up: the median is weighted by calls, of p99 the worst router's is shown.
function percentiles(all, name) {
  const known = all.filter((one) => one[name].p50 !== null);
  if (!known.length) return { p50: null, p99: null };
  const weight = (one) => Math.max(1, sum(Object.values(one.outcomes), (value) => value));
  const p50 = sum(known, (one) => one[name].p50 * weight(one)) / sum(known, weight);
  return { p50, p99: Math.max(...known.map((one) => one[name].p99)) };
}

function flows(all) {
  const found = new Map();
  for (const flow of all) {
    const key = JSON.stringify([flow.prefill, flow.decode]);
    const known = found.get(key) ?? { ...flow, prompts: 0, tokens: 0 };
    known.prompts += flow.prompts;
    known.tokens += flow.tokens;
    found.set(key, known);
  }
  return [...found.values()];
}
