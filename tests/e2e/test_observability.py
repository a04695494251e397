"""What rules and dashboards ask for is there: by name, and as data in a real Prometheus."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import profiles, prompts
from tests.e2e.client import COMPLETIONS, at_once
from tests.e2e.fleet import Fleet
from tests.e2e.harness import System
from tests.e2e.prometheus import Prometheus, needs_prometheus
from tests.e2e.queries import dashboard_queries, named_metrics, rules, write_configuration
from tests.e2e.scrape import scrape, wait_until


def test_every_metric_that_rules_and_dashboards_name_is_exported(fleet: Fleet) -> None:
    exported = set(scrape(fleet.system(profiles.SPLIT).client).families)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = [(f"rule {rule.get('record') or rule['alert']}", rule["expr"]) for rule in rules()]
    missing = {
        where: sorted(unknown)
        for where, query in [*asked, *dashboard_queries()]
        if (unknown := named_metrics(query) - exported - recorded)
    }
    assert missing == {}


@needs_prometheus
def test_every_query_returns_data_from_a_real_prometheus(fleet: Fleet, tmp_path: Path) -> None:
    system = fleet.system(profiles.SPLIT)
    queries = dict(enumerate(dashboard_queries()))
    configuration = write_configuration(tmp_path, f"127.0.0.1:{system.port}")
    with Prometheus(configuration, tmp_path) as prometheus:
        wait_until(lambda: "" if prometheus.query("baton_requests_total") else "not scraped yet", 20.0)

        def unanswered() -> str:
            _use(fleet, system)
            for number, (_, query) in list(queries.items()):
                if prometheus.query(query):
                    del queries[number]
            return "; ".join(f"{where}: {query}" for where, query in queries.values())

        wait_until(unanswered, 60.0)
        wait_until(lambda: _why_not_recorded(prometheus), 30.0)
        loaded = {rule["name"]: rule for rule in prometheus.rules()}
        assert set(loaded) == {rule.get("alert") or rule["record"] for rule in rules()}
        assert [name for name, rule in loaded.items() if rule["health"] != "ok"] == []
        alerts = [name for name, rule in loaded.items() if rule.get("state") == "firing"]
        assert alerts == [], "an idle, healthy system alerts"


def _use(fleet: Fleet, system: System) -> None:
    """A few prompts with a common beginning, handed over and answered."""
    shared = prompts.random_ids(fleet.models.bundled, 64, seed=5)
    bodies = [[*shared, *prompts.random_ids(fleet.models.bundled, 16, seed=seed)] for seed in range(3)]
    at_once(
        [
            lambda body=body: system.client.answer_all(COMPLETIONS, prompt=body, max_tokens=4, temperature=0)
            for body in bodies
        ]
    )


def _why_not_recorded(prometheus: Prometheus) -> str:
    """Rules that look hours back have nothing to say of a system that has just started."""
    names = [rule["record"] for rule in rules() if "record" in rule]
    return ", ".join(name for name in names if not prometheus.query(name))
