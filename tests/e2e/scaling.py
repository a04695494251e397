"""Scaling: what a running service tells of its pools, and load that moves them.

Owns profiles with short patience, the reading of the autoscaler's series, and clients that keep asking until
they are told to stop. Used from the test's thread; each client has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from cluster.autoscaler.decision_log import DecisionEvent
from cluster.autoscaler.replay import replay_file
from core.ids import Role
from tests.e2e.answers import Answer
from tests.e2e.client import COMPLETIONS, Client
from tests.e2e.harness import Profile
from tests.e2e.scrape import wait_until

WANTED = "baton_autoscaling_wanted_replicas"
RUNNING = "baton_autoscaling_running_replicas"

QUICK: dict[str, Any] = {
    "autoscaling.is_enabled": True,
    "autoscaling.startup_s": 5.0,
    "autoscaling.scale_up_delay_s": 2.0,
    "autoscaling.scale_down_delay_s": 6.0,
    "autoscaling.idle_delay_s": 6.0,
    "autoscaling.window_s": 5.0,
    "autoscaling.max_prefill_workers": 2,
    "autoscaling.max_decode_workers": 2,
    "engine.threads": 1,
    "router.plan": "remote",
}


def profile(name: str, log: Path, model: Path, **settings: Any) -> Profile:
    """One worker of each kind at first; `settings` by path, with __ for a dot."""
    own = {path.replace("__", "."): value for path, value in settings.items()}
    return Profile(name, {**QUICK, "autoscaling.log_file": str(log), **own}, model, is_local=False)


def replicas(client: Client, series: str = RUNNING) -> dict[str, int]:
    """By pool; empty before the first decision. Also where no worker is left to be scraped."""
    return {
        sample.labels["pool"]: round(sample.value)
        for family in text_string_to_metric_families(client.metrics_text()[0])
        for sample in family.samples
        if sample.name == series
    }


def wait_replicas(client: Client, timeout_s: float, **wanted: int) -> float:
    """Until so many replicas are wanted and run; returns the seconds it took."""

    def missing() -> str:
        asked, running = replicas(client, WANTED), replicas(client)
        is_there = all(asked.get(pool) == running.get(pool) == num for pool, num in wanted.items())
        return "" if is_there else f"wanted {asked}, running {running}"

    return wait_until(missing, timeout_s, 0.5)


@dataclass
class Work:
    """What clients asked for: answers, and whatever else came."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def check(self, num_tokens: int) -> None:
        """Each stream ended whole."""
        assert not self.failures, self.failures[:3]
        assert self.answers
        for answer in self.answers:
            assert answer.finish_reason == "length", answer
            assert answer.num_tokens == num_tokens, answer


@contextmanager
def asking(
    client: Client, num_clients: int, body: Callable[[int], dict[str, Any]], pause_s: float = 0.0
) -> Iterator[Work]:
    """So many clients stream one answer after the other, with a pause between, until the block ends. Those
    that run then are read to their end.
    """
    work, is_over = Work(), threading.Event()

    def keep_asking(number: int) -> None:
        while not is_over.is_set():
            try:
                work.answers.append(client.stream(COMPLETIONS, **body(number)).only)
            except BaseException as failure:  # noqa: BLE001 - told by `check`
                work.failures.append(failure)
                return
            number += num_clients
            is_over.wait(pause_s)

    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield work
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def ask_at_zero(client: Client) -> None:
    """While both pools are at zero: what is refused wakes nobody; of five that do, two leave before anybody
    is there to answer them, and the others are answered.
    """
    num_before = _num_decisions(client)
    for _ in range(5):
        assert client.post(COMPLETIONS, {"prompt": "a", "max_tokens": -1}).status == 400
    wait_until(lambda: "" if _num_decisions(client) > num_before + 4 else "too few decisions", 60.0, 0.5)
    assert replicas(client, WANTED) == {"prefill": 0, "decode": 0}
    with ThreadPoolExecutor(3) as pool:
        leaving = [client.open(COMPLETIONS, {**ask(number, 100, 5), "stream": True}) for number in (1, 2)]
        staying = [pool.submit(client.stream_completion, **ask(number, 100, 5)) for number in (3, 4, 5)]
        wait_until(lambda: "" if replicas(client, WANTED)["decode"] else "nobody has woken", 60.0)
        for connection in leaving:
            connection.hang_up()
        answers = [stays.result() for stays in staying]
    assert [(answer.num_tokens, answer.finish_reason) for answer in answers] == [(5, "length")] * 3


def ask_of_all_kinds(client: Client) -> None:
    """Streams that end, that are given up in their middle, and requests that are refused, in turn."""
    for number in range(5):
        with client.open(COMPLETIONS, {**ask(10 + number, 100, 2000), "stream": True}) as connection:
            head = connection.read_head()
            next(iter(connection.pieces(head)))
        assert client.post(COMPLETIONS, {"prompt": "a", "max_tokens": -1}).status == 400
        assert client.stream_completion(**ask(20 + number, 100, 10)).num_tokens == 10


def _num_decisions(client: Client) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(client.metrics_text()[0])
        for sample in family.samples
        if sample.name == "baton_autoscaling_decisions_total" and sample.labels["pool"] == "decode"
    )


def prompt(number: int, num_tokens: int) -> list[int]:
    """One that no other shares a block with."""
    return [1000 + (number * 7919 + index * (number % 97 + 3)) % 40000 for index in range(num_tokens)]


def ask(number: int, num_prompt: int, num_output: int) -> dict[str, Any]:
    return {
        "prompt": prompt(number, num_prompt),
        "max_tokens": num_output,
        "ignore_eos": True,
        "temperature": 0,
    }


def changes(events: tuple[DecisionEvent, ...], role: Role) -> list[int]:
    """How the pool's applied number of replicas changed, one after the other."""
    numbers = [event.applied_prefill if role is Role.PREFILL else event.applied_decode for event in events]
    return [later - earlier for earlier, later in pairwise(numbers) if later != earlier]


def num_reversals(events: tuple[DecisionEvent, ...], role: Role) -> int:
    signs = [change > 0 for change in changes(events, role)]
    return sum(one is not two for one, two in pairwise(signs))


def replayed(log: Path) -> tuple[DecisionEvent, ...]:
    """The decisions of a log, each of them made again with the same result."""
    result = replay_file(log)
    assert result.num_decisions > 10
    assert result.differences == ()
    return result.events


def controller_errors(processes: Sequence[psutil.Process]) -> list[str]:
    """What the autoscaler complained about, in the log of Serve's controller."""
    (run,) = {
        Path(process.environ()["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parents[1]
        for process in processes
        if "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC" in process.environ()
        and "ServeController" in " ".join(process.cmdline())
    }
    (log,) = (run / "r" / "session_latest" / "logs" / "serve").glob("controller_[0-9]*.log")
    lines = log.read_text().splitlines()
    return [line for line in lines if line.startswith(("ERROR", "WARNING")) and "autoscaler" in line]
