"""Why a request went where it went, as one sentence: against the best of the other plans, and which term made
the difference. Pure.
"""

from __future__ import annotations

from router.decision import Decision


def why_line(decision: Decision) -> str:
    if not decision.terms:
        return "the policy chooses without costs"
    if not decision.others:
        return f"{decision.plan.value} is the only plan that is possible; it costs {decision.cost_ms:.1f} ms"
    other = min(decision.others, key=lambda item: item.cost_ms)
    added = {
        term: other.terms.get(term, 0.0) - decision.terms.get(term, 0.0)
        for term in (*decision.terms, *other.terms)
    }
    term = max(added, key=lambda name: added[name])
    difference = other.cost_ms - decision.cost_ms
    if difference < 0:
        return (
            f"{decision.plan.value} costs {decision.cost_ms:.1f} ms, {other.plan.value} {-difference:.1f} ms "
            "less: a near tie, left to chance"
        )
    return (
        f"{decision.plan.value} costs {decision.cost_ms:.1f} ms, {other.plan.value} {difference:.1f} ms "
        f"more; {term} alone {added[term]:+.1f} ms"
    )
