"""The real cluster: Ray Serve, separate processes, gRPC between them, the OpenAI client in front."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from cluster.status_command import fetch_state
from core import telemetry
from core.errors import StaleEpoch, Unauthenticated
from core.peer_security import PeerSecurity, new_cluster_token
from tests.e2e import explained, on_ray, profiles, prompts, sockets, strangers
from tests.e2e.checks import survives
from tests.e2e.client import COMPLETIONS, Client, at_once
from tests.e2e.fixtures import Report
from tests.e2e.fleet import Fleet
from tests.e2e.harness import ROOT, System
from tests.e2e.killing import DECODE_WORKER
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.right_tokens import Comparison, short_set
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until

BLOCK = 16
BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * BLOCK
# workers tell the routers their load once a second; a client's second turn does not come sooner
STATUS_S = 3.0
CLIENT_PYTHON = ROOT / ".venv-client" / "bin" / "python"


TOKEN = new_cluster_token()


@pytest.fixture(scope="module")
def system(fleet: Fleet) -> System:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CLUSTER_TOKEN", TOKEN.secret)
        return fleet.system(profiles.WIRE, is_local=False)


@pytest.fixture(scope="module")
def client(system: System) -> Client:
    return system.client


def test_twelve_prompts_equal_the_reference_first_and_again(fleet: Fleet, system: System) -> None:
    comparison = Comparison(
        fleet.models.reference(fleet.models.bundled), fleet.models.vocabulary, num_tokens=24
    )
    batch = short_set(fleet.models.bundled)
    with survives(system):
        comparison.run(system.client, batch, "Ray, first", at_a_time=6)
        comparison.run(system.client, batch, "Ray, again", at_a_time=12)


def test_prefill_is_ready_for_each_decode_worker_before_a_request_and_baton_status_shows_it(
    system: System,
) -> None:
    def is_ready() -> str:
        told = fetch_state(f"http://127.0.0.1:{system.port}", None)
        ready = {
            (worker["id"], pair["to"])
            for worker in told["workers"]
            for pair in (worker["status"] or {}).get("pairs", [])
            if worker["role"] == "prefill" and pair["is_warm"] and pair["transport"] == "grpc"
        }
        return "" if len(ready) == 2 else f"ready: {ready}"

    wait_until(is_ready, 30.0)


def test_prefill_and_decode_are_processes_of_their_own(system: System) -> None:
    prefill, decode = on_ray.workers(system, "prefill"), on_ray.workers(system, "decode")
    assert (len(prefill), len(decode)) == (1, 2)
    assert len({process.pid for process in [*prefill, *decode]}) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_answers_nobody_without_the_token(system: System, role: str) -> None:
    for process in on_ray.workers(system, role):
        for stranger in (PeerSecurity(), PeerSecurity(new_cluster_token())):
            assert strangers.answers(process, stranger).count(Unauthenticated) == 1
        # with the token it is let in: it then meets the check of what it asks for
        assert strangers.answers(process, PeerSecurity(TOKEN)).count(StaleEpoch) == 1


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_no_port_of_a_replica_does_anything_without_a_token(system: System, role: str) -> None:
    """Ours, and those that Serve and Ray open on all interfaces."""
    for process in on_ray.workers(system, role):
        by_port = strangers.refusals(process)
        assert len(by_port) >= 3, by_port
        for statuses in by_port.values():
            is_http = statuses == {"UNAVAILABLE"}
            assert is_http or "UNAUTHENTICATED" in statuses, by_port
            assert "OK" not in statuses, by_port
        assert sum(statuses == {"UNAVAILABLE"} for statuses in by_port.values()) == (role == "router")


def test_the_token_stands_nowhere(system: System) -> None:
    assert strangers.places_with(TOKEN.secret, system) == []


def test_the_parts_of_the_time_to_first_token_are_what_the_client_has_waited(
    fleet: Fleet, client: Client
) -> None:
    wait_idle(client)
    found = [
        explained.ask(client, prompts.random_ids(fleet.models.bundled, length, seed=9300 + length))
        for length in (20, 200, 400, 600)
    ]
    for one in found:
        one.check()
        assert one.told["plan"] == "remote"
    # beside other work of the machine one of them may have been late
    assert sum(one.is_close for one in found) >= len(found) - 1, [one.outside_ms for one in found]


def received(system: System) -> int:
    """Bytes that the decode processes' own listeners have received so far."""
    ports: set[int] = set()
    for process in on_ray.workers(system, "decode"):
        ports |= sockets.listening_ports(process.pid)
    return sum(sum(sockets.received_on_port(port).values()) for port in ports)


def test_received_bytes_are_blocks_times_layout_bytes_and_agree_with_the_sockets(
    fleet: Fleet, system: System, client: Client, report: Report
) -> None:
    wait_idle(client)
    before, kernel = scrape(client), received(system)
    lengths = (500, 777, 1200)
    for length in lengths:
        client.complete(prompts.random_ids(fleet.models.bundled, length, seed=length), max_tokens=2)
    wait_idle(client)
    after, on_the_wire = scrape(client), received(system) - kernel
    counted = rise(before, after, telemetry.KV_TRANSFER_BYTES, transport="grpc")
    assert counted == sum(-(-length // BLOCK) for length in lengths) * BLOCK_BYTES
    assert counted == rise(before, after, telemetry.KV_TRANSFER_BYTES), "only gRPC carries bytes here"
    assert abs(on_the_wire - counted) <= 0.02 * counted, f"{on_the_wire} on the sockets, {counted} counted"
    more = f"sockets {100 * (on_the_wire / counted - 1):+.2f} %"
    report("d", "bytes received, Ray", f"{counted / BLOCK_BYTES:.0f} blocks, {counted:.0f} bytes, {more}")


def test_a_second_turn_sends_only_the_blocks_that_its_decode_worker_lacks(
    fleet: Fleet, client: Client, report: Report
) -> None:
    """Until it goes to the worker of the first turn, which the price of the way there may speak against."""
    vocabulary, reference = fleet.models.vocabulary, fleet.models.reference(fleet.models.bundled)
    body = {
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    for seed in range(201, 231, 2):
        first = prompts.random_ids(fleet.models.bundled, 200, seed=seed)
        turn = client.stream(COMPLETIONS, prompt=first, **body)
        output = vocabulary.ids_of(turn.only)
        second = [*first, *output, *prompts.random_ids(fleet.models.bundled, 40, seed=seed + 1)]
        wait_idle(client)
        time.sleep(STATUS_S)
        before = scrape(client)
        next_turn = client.stream(COMPLETIONS, prompt=second, **body)
        wait_idle(client)
        # what prefill got from decode first does not count
        sent = rise(before, scrape(client), telemetry.KV_TRANSFER_BYTES, role="decode")
        check_greedy(
            reference,
            second,
            vocabulary.ids_of(next_turn.only),
            Ledger(),
            "second turn",
            next_turn.only.logprobs,
        )
        is_same = next_turn.response.headers[DECODE_WORKER] == turn.response.headers[DECODE_WORKER]
        num_blocks, num_known = -(-len(second) // BLOCK), (len(first) + len(output) - 1) // BLOCK
        held = num_known if is_same else 0
        assert sent == (num_blocks - held) * BLOCK_BYTES
        if is_same:
            report(
                "d", "second turn, Ray", f"{num_blocks} blocks, {held} held, {sent / BLOCK_BYTES:.0f} sent"
            )
            return
    raise AssertionError("no second turn went where the first was")


def test_the_openai_package_talks_to_it(system: System) -> None:
    assert CLIENT_PYTHON.exists(), "the client's environment is missing: make client"
    program = Path(__file__).with_name("openai_program.py")
    done = subprocess.run(
        [str(CLIENT_PYTHON), str(program), f"http://127.0.0.1:{system.port}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "ok"


def test_the_start_tells_the_address_a_curl_line_and_a_sample(system: System) -> None:
    log = system.log()
    assert f"http://127.0.0.1:{system.port}" in log
    assert "curl -N" in log


def test_thirty_streams_at_once_are_all_complete(client: Client) -> None:
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    jobs = [partial(client.stream_completion, f"Item {i % 3}:", **body) for i in range(30)]
    texts = at_once(jobs)
    assert all(answer.num_tokens == 20 for answer in texts)
    wait_idle(client)


def test_metrics_answer_within_a_second_while_two_hundred_streams_are_open(
    client: Client, report: Report
) -> None:
    wait_idle(client)
    body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        for connection in at_once([partial(client.open, COMPLETIONS, body)] * 200, limit=50):
            stack.enter_context(connection)
        wait_until(lambda: "" if scrape(client).num_running > 32 else "too few run", 30.0)
        times = sorted(scrape(client).seconds for _ in range(10))
    assert times[len(times) // 2] < 1.0, f"scrapes took {times} s"
    assert times[-1] < 3.0, f"scrapes took {times} s"
    took = wait_idle(client, 10.0)
    report(
        "f",
        "scrape with 200 open streams, Ray",
        f"{times[-1]:.2f} s at most; idle {took:.1f} s after they closed",
    )
