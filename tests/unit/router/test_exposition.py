"""One scrape of many processes is one legal text."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.ids import Role
from router.exposition import WorkerExpositions, merge
from router.worker_entry import WorkerEntry, WorkerState
from tests.unit.router.scripted import ScriptedWorker


def _text(role: str | None = None, value: float = 3.0) -> str:
    registry = CollectorRegistry()
    Counter("work", "Work done.", registry=registry).inc(value)
    names = ("role", "text") if role else ("text",)
    gauge = Gauge("load", 'With "odd"\nhelp.', names, registry=registry)
    odd = 'a,role="x" {y}\\\n'
    (gauge.labels(role, odd) if role else gauge.labels(odd)).set(1)
    Histogram("took_seconds", "Time.", buckets=(1.0,), registry=registry).observe(0.5)
    return generate_latest(registry).decode()


def _samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_series_of_all_processes_are_told_apart_and_parse() -> None:
    workers = [({"worker_id": "p", "role": "prefill"}, _text()), ({"worker_id": "d"}, _text(value=4))]
    merged = merge(_text(value=1), workers)
    samples = _samples(merged)
    assert samples["work_total", frozenset()] == 1
    assert samples["work_total", frozenset({("worker_id", "p"), ("role", "prefill")})] == 3
    assert samples["work_total", frozenset({("worker_id", "d")})] == 4
    assert samples["took_seconds_bucket", frozenset({("worker_id", "d"), ("le", "1.0")})] == 1


def test_help_and_type_come_once_and_before_all_samples_of_the_family() -> None:
    lines = (
        merge(_text(), [({"worker_id": str(number)}, _text()) for number in range(5)]).decode().split("\n")
    )
    types = [line.split(" ")[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    starts = [line.split("{")[0].split(" ")[0] for line in lines if line and not line.startswith("#")]
    loads = [index for index, name in enumerate(starts) if name == "load"]
    assert loads == list(range(loads[0], loads[0] + 6))


def test_a_label_that_a_series_has_already_is_not_added_twice() -> None:
    odd = 'a,role="x" {y}\\\n'
    merged = merge("", [({"worker_id": "p", "role": "prefill"}, _text(role="prefill"))])
    (line,) = [line for line in merged.decode().split("\n") if line.startswith("load{")]
    assert line.count('role="prefill"') == 1
    labels = frozenset({("worker_id", "p"), ("role", "prefill"), ("text", odd)})
    assert _samples(merged)["load", labels] == 1


def test_a_family_that_changes_its_type_is_left_out() -> None:
    merged = merge(
        "# TYPE a counter\na 1\n", [({"worker_id": "w"}, "# TYPE a gauge\na 2\n# TYPE b gauge\nb 3\n")]
    )
    assert merged == b'# TYPE a counter\na 1\n# TYPE b gauge\nb{worker_id="w"} 3\n'


def test_values_of_labels_are_escaped() -> None:
    merged = merge("", [({"worker_id": 'a"\\\n'}, "# TYPE b gauge\nb 3\n")])
    assert _samples(merged) == {("b", frozenset({("worker_id", 'a"\\\n')})): 3}


async def test_a_worker_that_does_not_answer_is_shown_as_last_known_and_holds_nobody_up() -> None:
    class Slow(ScriptedWorker):
        is_slow = False

        async def metrics(self) -> bytes:
            if self.is_slow:
                await asyncio.Event().wait()
            return self.exposition

    slow = Slow(Role.DECODE, "slow", exposition=b"# TYPE a gauge\na 1\n")
    quick = ScriptedWorker(Role.PREFILL, "quick", exposition=b"# TYPE a gauge\na 2\n")
    entries = [WorkerEntry(worker.announcement(), worker, 0.0, WorkerState.ALIVE) for worker in (slow, quick)]
    expositions = WorkerExpositions(timeout_s=0.05)
    await expositions.fetch(entries)
    slow.is_slow, quick.exposition = True, b"# TYPE a gauge\na 3\n"
    found = {labels["worker_id"]: text for labels, text in await expositions.fetch(entries)}
    assert found == {"slow": "# TYPE a gauge\na 1\n", "quick": "# TYPE a gauge\na 3\n"}
    assert [labels["worker_id"] for labels, _ in await expositions.fetch(entries[1:])] == ["quick"]


def test_the_routers_own_series_carry_its_label_and_those_of_workers_do_not() -> None:
    text = "# HELP x Text.\n# TYPE x gauge\nx 1\n"
    merged = merge(text, [({"worker_id": "d"}, text)], {"router": "r"}).decode()
    assert 'x{router="r"} 1' in merged
    assert 'x{worker_id="d"} 1' in merged
