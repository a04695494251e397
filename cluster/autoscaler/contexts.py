"""What Ray Serve tells a policy of a deployment, in our words. Needs no Ray: contexts are read, not made."""

from __future__ import annotations

from typing import Any

from cluster.autoscaler.meter import Fleet, Report


def fleet_of(context: Any) -> Fleet:
    """A deployment's replicas, and the last point of each series that they sent."""
    stats: dict[str, dict[str, float]] = {}
    times: dict[str, float] = {}
    for name, series_of in (context.raw_metrics or {}).items():
        for replica, series in series_of.items():
            if series:
                key = replica.unique_id
                stats.setdefault(key, {})[name] = series[-1].value
                times[key] = max(times.get(key, 0.0), series[-1].timestamp)
    return Fleet(
        context.current_num_replicas,
        context.target_num_replicas,
        [Report(replica, times[replica], stats[replica]) for replica in stats],
    )
