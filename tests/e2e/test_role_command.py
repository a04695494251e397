"""`baton role`, with and without Ray: a worker changes its role, and what cannot be is said plainly."""

from __future__ import annotations

import subprocess

import pytest

from core import telemetry
from tests.e2e import profiles, prompts, wire
from tests.e2e.fleet import Fleet
from tests.e2e.harness import BATON, System
from tests.e2e.scrape import scrape, wait_idle, wait_until

PROMPT = list(prompts.FACTS["The capital of France is"])


def baton_role(system: System, *words: str) -> tuple[int, str]:
    """Exit status and what was printed, on one line."""
    command = [BATON, "role", *words, "--port", str(system.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def roles(system: System) -> dict[str, str]:
    """Worker by worker, what each does at present."""
    reading = scrape(system.client)
    return {
        worker: role
        for role in ("prefill", "decode")
        for worker, has in reading.by_label(telemetry.WORKER_ROLE, "worker_id", role=role).items()
        if has
    }


@pytest.fixture(params=["one process", "on Ray"])
def system(fleet: Fleet, request: pytest.FixtureRequest) -> System:
    return fleet.system(profiles.PAIR, is_local=request.param == "one process")


def test_a_worker_takes_the_role_that_an_operator_names_and_answers_stay_the_same(system: System) -> None:
    wait_until(lambda: "" if len(roles(system)) == 3 else f"workers {roles(system)}", 60.0)
    wanted = system.client.complete(PROMPT, max_tokens=8, temperature=0).text
    prefill = next(worker for worker, role in roles(system).items() if role == "prefill")
    decode = next(worker for worker, role in roles(system).items() if role == "decode")

    code, said = baton_role(system, prefill, "decode")
    assert code == 1
    assert "is the last prefill worker" in said
    assert "--force" in said
    code, said = baton_role(system, "nobody", "decode")
    assert code == 1
    assert "there is no worker 'nobody'" in said
    assert prefill in said

    code, said = baton_role(system, decode, "prefill")
    assert code == 0, said
    assert f"{decode} is a prefill worker now" in said
    assert roles(system)[decode] == "prefill"
    assert system.client.complete(PROMPT, max_tokens=8, temperature=0).text == wanted
    code, said = baton_role(system, decode, "prefill")
    assert code == 0
    assert "has the role prefill already" in said

    code, said = baton_role(system, decode, "decode")
    assert code == 0, said
    assert roles(system)[decode] == "decode"
    assert system.client.complete(PROMPT, max_tokens=8, temperature=0).text == wanted
    wait_idle(system.client)
    assert wire.request(system.port, "GET", "/ready").json()["degraded"] == []


def test_the_page_behind_it_names_the_field_that_is_wrong(system: System) -> None:
    for body, param in (
        (b'{"role": "decode"}', "worker"),
        (b'{"worker": "w", "role": "both"}', "role"),
        (b'{"worker": "w", "role": "decode", "force": 1}', "force"),
        (b'{"worker": "w", "role": "decode", "when": "now"}', "when"),
    ):
        response = wire.request(system.port, "POST", "/admin/role", body)
        assert response.status == 400
        assert response.json()["error"]["param"] == param
