"""The bridge between processes: what travels is counted, what is cut or damaged never becomes a token."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from core import telemetry
from tests.e2e import prompts, sockets
from tests.e2e.answers import Answer
from tests.e2e.fleet import Fleet
from tests.e2e.meddler import Mode
from tests.e2e.reference import Ledger, check_greedy
from tests.e2e.scrape import rise, scrape, wait_idle
from tests.e2e.split import SplitSystem

BLOCK = 16
# over gRPC: what is cut, damaged and counted here is a TCP connection
SETTINGS = {"router": {"plan": "remote"}, "prefill": {"bridge": {"shm": "never", "distributed": "never"}}}


@pytest.fixture(scope="module")
def split(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitSystem]:
    with SplitSystem(fleet.models.toy(), SETTINGS, tmp_path_factory.mktemp("split")) as system:
        yield system


@pytest.fixture(autouse=True)
def untouched(split: SplitSystem) -> Iterator[None]:
    """Each test begins idle, and ends with a bridge that passes everything."""
    wait_idle(split.client)
    yield
    split.bridge.mode = Mode.PASS
    split.bridge.cut()
    wait_idle(split.client)


def ask(fleet: Fleet, split: SplitSystem, ids: list[int]) -> Answer:
    """16 greedy tokens, checked against the reference."""
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    answer = split.client.complete(ids, **body, logprobs=1)
    reference, ledger = fleet.models.reference(fleet.models.toy()), Ledger()
    output = fleet.models.vocabulary.ids_of(answer)
    assert len(output) == 16
    check_greedy(reference, ids, output, ledger, f"{len(ids)} ids", answer.logprobs)
    assert not ledger.near_ties
    return answer


def bytes_so_far(split: SplitSystem) -> tuple[int, int]:
    """Bytes to decode that were relayed, and that the kernel saw, while not even a ping is under way."""
    last = None
    while True:
        counts = (
            split.bridge.num_bytes_to_server,
            sum(sockets.received_on_port(split.bridge.port).values()),
        )
        if counts == last:
            return counts
        last = counts
        time.sleep(0.05)


@pytest.mark.parametrize("length", [1, 16, 17, 500, 3000])
def test_received_bytes_are_blocks_times_layout_bytes_and_agree_with_the_sockets(
    fleet: Fleet, split: SplitSystem, length: int
) -> None:
    ids = prompts.random_ids(fleet.models.bundled, length, seed=4000 + length)
    before, (counted, kernel) = scrape(split.client), bytes_so_far(split)
    ask(fleet, split, ids)
    wait_idle(split.client)
    received = rise(before, scrape(split.client), telemetry.KV_TRANSFER_BYTES)
    num_blocks = -(-length // BLOCK)
    assert received == num_blocks * split.block_bytes
    if length >= 500:
        relayed, seen = bytes_so_far(split)
        on_the_wire = seen - kernel
        assert on_the_wire == relayed - counted, "the kernel saw what went through"
        assert received <= on_the_wire <= received * 1.02


def test_a_second_turn_sends_only_the_blocks_that_decode_lacks(fleet: Fleet, split: SplitSystem) -> None:
    first = prompts.random_ids(fleet.models.bundled, 100, seed=41)
    answer = ask(fleet, split, first)
    output = fleet.models.vocabulary.ids_of(answer)
    second = [*first, *output, *prompts.random_ids(fleet.models.bundled, 30, seed=42)]
    wait_idle(split.client)
    before = scrape(split.client)
    ask(fleet, split, second)
    wait_idle(split.client)
    # the last token of the first turn was never computed, so its block is not named unless it was full before
    held = (len(first) + len(output) - 1) // BLOCK
    missing = -(-len(second) // BLOCK) - held
    # what prefill got from decode first does not count
    received = rise(before, scrape(split.client), telemetry.KV_TRANSFER_BYTES, role="decode")
    assert received == missing * split.block_bytes


@pytest.mark.parametrize(
    ("mode", "is_cut"), [(Mode.REFUSE, True), (Mode.SWALLOW, True), (Mode.SWALLOW, False)]
)
def test_with_the_transfer_blocked_no_byte_arrives_and_decode_prefills(
    fleet: Fleet, split: SplitSystem, mode: Mode, is_cut: bool
) -> None:
    """Blocked by refused connections, by packets that are lost, or lost on a connection that stays open."""
    ask(fleet, split, [prompts.HELLO] * 20)
    wait_idle(split.client)
    before = scrape(split.client)
    split.bridge.mode = mode
    if is_cut:
        split.bridge.cut()
    start = time.monotonic()
    ids = prompts.random_ids(fleet.models.bundled, 300, seed=43 + 2 * len(mode) + is_cut)
    answer = ask(fleet, split, ids)
    assert time.monotonic() - start < 20.0
    assert answer.usage is not None
    (told,) = answer.usage["baton"]["prompts"]
    assert told["num_attempts"] > 1 or told["stalls"][0]["cause"] == "local_prefill", told
    wait_idle(split.client)
    after = scrape(split.client)
    assert rise(before, after, telemetry.KV_TRANSFER_BYTES) == 0
    assert rise(before, after, telemetry.PROMPT_TOKENS, role="decode") >= 300, "decode did not prefill"


def test_damaged_frames_never_end_in_a_token(fleet: Fleet, split: SplitSystem) -> None:
    before = scrape(split.client)
    split.bridge.mode = Mode.DAMAGE
    for seed in range(4):
        ask(fleet, split, prompts.random_ids(fleet.models.bundled, 700, seed=50 + seed))
    assert split.bridge.num_damaged > 0, "nothing was damaged"
    split.bridge.mode = Mode.PASS
    wait_idle(split.client)
    after = scrape(split.client)
    assert rise(before, after, telemetry.KV_TRANSFER_FAILURES, side="receiver") > 0
    ask(fleet, split, prompts.random_ids(fleet.models.bundled, 700, seed=60))


def test_a_connection_that_breaks_during_transfers_costs_no_token(fleet: Fleet, split: SplitSystem) -> None:
    for seed in range(4):
        ids = prompts.random_ids(fleet.models.bundled, 2500, seed=70 + seed)
        timer = threading.Timer(0.05 * (seed + 1), split.bridge.cut)
        timer.start()
        ask(fleet, split, ids)
        timer.join()
