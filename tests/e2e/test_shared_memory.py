"""Worker processes of one host hand KV over through shared memory by default, through a process group where
that is switched off; the tokens are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app as baton
from core import telemetry
from core.ids import Role
from tests.e2e import prompts
from tests.e2e.fleet import Fleet
from tests.e2e.meddler import Mode
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import rise, scrape, wait_idle, wait_until
from tests.e2e.split import SplitSystem

BLOCK = 16


@pytest.fixture(scope="module", params=["shm", "distributed"])
def way(request: pytest.FixtureRequest) -> str:
    """The label of payloads' metrics."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def split(fleet: Fleet, way: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitSystem]:
    bridge = {"shm": "auto" if way == "shm" else "never"}
    settings = {"router": {"plan": "remote"}, "prefill": {"bridge": bridge}}
    with SplitSystem(fleet.models.toy(), settings, tmp_path_factory.mktemp("split")) as system:
        yield system


@pytest.fixture(autouse=True)
def untouched(split: SplitSystem) -> Iterator[None]:
    """Each test begins idle, and ends with a bridge that passes everything."""
    wait_idle(split.client)
    yield
    split.bridge.mode = Mode.PASS
    wait_idle(split.client)


def ask(fleet: Fleet, split: SplitSystem, ids: list[int]) -> None:
    """16 greedy tokens, checked against the reference."""
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    answer = split.client.complete(ids, **body, logprobs=1)
    ledger = Ledger()
    output = fleet.models.vocabulary.ids_of(answer)
    assert len(output) == 16
    check_greedy(
        fleet.models.reference(fleet.models.toy()), ids, output, ledger, f"{len(ids)} ids", answer.logprobs
    )
    assert not ledger.near_ties


@pytest.mark.parametrize("length", [1, 17, 500, 3000])
def test_all_payload_goes_that_way_and_next_to_nothing_over_the_connection(
    fleet: Fleet, split: SplitSystem, way: str, length: int
) -> None:
    before, on_the_wire = scrape(split.client), split.bridge.num_bytes_to_server
    ask(fleet, split, prompts.random_ids(fleet.models.bundled, length, seed=5000 + length))
    wait_idle(split.client)
    after = scrape(split.client)
    payload = -(-length // BLOCK) * split.block_bytes
    assert rise(before, after, telemetry.KV_TRANSFER_BYTES, transport=way) == payload
    assert rise(before, after, telemetry.KV_TRANSFER_BYTES) == payload
    assert rise(before, after, telemetry.KV_TRANSFER_FALLBACKS) == 0
    if length >= 500:
        assert split.bridge.num_bytes_to_server - on_the_wire < payload / 20


def test_the_way_and_what_it_has_carried_are_shown_to_the_operator(
    fleet: Fleet, split: SplitSystem, way: str
) -> None:
    ask(fleet, split, prompts.random_ids(fleet.models.bundled, 200, seed=50))
    url = f"http://127.0.0.1:{split.port}"

    def is_shown() -> str:
        """Workers tell of it every second."""
        state = json.loads(CliRunner().invoke(baton, ["status", "--url", url, "--json"]).output)
        pairs = {worker["id"]: worker["status"]["pairs"] for worker in state["workers"] if worker["status"]}
        if not pairs.get("prefill-0"):
            return f"no pair is told of: {pairs}"
        (pair,) = pairs["prefill-0"]
        assert (pair["to"], pair["transport"], pair["fallbacks"]) == ("decode-0", way, {})
        return (
            "" if pair["bytes"].get(way, 0) >= 13 * split.block_bytes and pair["gb_per_s"] > 0 else str(pair)
        )

    wait_until(is_shown, 10.0)
    found = scrape(split.client)
    peer = {"worker_id": "prefill-0", "peer": "decode-0"}
    assert found.value(telemetry.KV_PAIR_TRANSPORT, **peer, transport=way) == 1


def test_the_workers_map_one_memory_that_lies_in_no_file_system(
    fleet: Fleet, split: SplitSystem, way: str
) -> None:
    if way != "shm":
        pytest.skip("a group shares no memory")
    ask(fleet, split, prompts.random_ids(fleet.models.bundled, 100, seed=51))
    maps = {role: Path(f"/proc/{split.pids[role]}/maps").read_text().splitlines() for role in Role}
    found = {role: [line for line in lines if "memfd:baton-staging" in line] for role, lines in maps.items()}
    inodes = {line.split()[4] for lines in found.values() for line in lines}
    assert all(len(lines) == 1 for lines in found.values())
    assert len(inodes) == 1
    assert " rw-s " in found[Role.PREFILL][0]
    assert " r--s " in found[Role.DECODE][0], "decode does not write to it"


def test_with_the_messages_lost_decode_prefills_and_afterwards_the_way_serves_again(
    fleet: Fleet, split: SplitSystem, way: str
) -> None:
    split.bridge.mode = Mode.SWALLOW
    ask(fleet, split, prompts.random_ids(fleet.models.bundled, 300, seed=52))
    split.bridge.mode = Mode.PASS
    split.bridge.cut()
    wait_idle(split.client)
    before = scrape(split.client)
    seeds = count(53)

    def serves_again() -> str:
        """While prefill's connection waits before it tries anew, decode reads the prompts."""
        ask(fleet, split, prompts.random_ids(fleet.models.bundled, 300, seed=next(seeds)))
        risen = rise(before, scrape(split.client), telemetry.KV_TRANSFER_BYTES, transport=way)
        return "" if risen > 0 else "nothing has come that way"

    wait_until(serves_again, 30.0)
