"""A worker that changes its role over real gRPC: streams lose no token, cached prefixes stay, the old role
leaves nothing behind; and a prefill worker that steps in when the last decode worker is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from cluster.config import config_from_settings
from cluster.role_worker import RoleWorker
from core.errors import LastOfRole, StaleEpoch, WrongRole
from core.ids import RequestId, Role, WorkerId, new_ticket_id
from core.jobs import PrefillJob, SampleStart
from core.request import Request, SamplingParams
from core.role_change import RoleCause, RoleOrder
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from router.worker_clients import GrpcWorker
from tests.integration.cluster.role_fleet import MAX_TOKENS, RoleFleet, refusal, settings
from tests.integration.decode_worker.conftest import prompt_ids
from tests.oracle import make_toy_checkpoint, oracle_greedy

PROMPT = prompt_ids(100)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), eos_token_id=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(checkpoint), threads=1))


@pytest.fixture
async def fleet(loaded: LoadedModel, checkpoint: Path) -> AsyncIterator[RoleFleet]:
    torch.set_num_threads(1)
    fleet = RoleFleet(loaded, config_from_settings(settings(checkpoint)))
    yield fleet
    await fleet.stop()


@pytest.fixture
def right(checkpoint: Path) -> Callable[[tuple[int, ...]], list[int]]:
    return lambda ids: oracle_greedy(checkpoint, ids, MAX_TOKENS)


Right = Callable[[tuple[int, ...]], list[int]]


async def text_of(worker: RoleWorker) -> str:
    return (await worker.metrics()).decode()


async def started(fleet: RoleFleet, **roles: Role) -> None:
    for name, role in roles.items():
        await fleet.start(name, role)
    await fleet.table.refresh()
    await fleet.until(lambda: all(name in fleet.usable(role) for name, role in roles.items()))


async def test_streams_go_on_token_by_token_when_the_last_decode_worker_is_lost(
    fleet: RoleFleet, right: Right
) -> None:
    await started(fleet, p0=Role.PREFILL, d0=Role.DECODE)
    prompts = [prompt_ids(60 + 10 * seed, seed) for seed in range(3)]
    fleet.sites["d0"].gate.hold(after=12)
    streams = [fleet.open(ids) for ids in prompts]
    await fleet.sites["d0"].gate.reached()
    lost_at = time.monotonic()
    await fleet.lose("d0")
    await fleet.until(lambda: fleet.usable(Role.DECODE) == {"p0"})
    seconds = time.monotonic() - lost_at
    late, late_end = fleet.open(PROMPT)
    await asyncio.gather(late_end, *(end for _, end in streams))
    assert [reader.tokens for reader, _ in streams] == [right(ids) for ids in prompts]
    assert late.tokens == right(PROMPT)
    assert seconds < 1.0
    (order, change), *_ = fleet.desk.changes
    assert (order.role, order.cause) == (Role.DECODE, RoleCause.EMPTY_POOL)
    assert change.drain_s + change.start_s < 1.0
    await fleet.at_rest()


async def test_the_stand_in_goes_home_when_the_pool_is_back_and_its_streams_move(
    fleet: RoleFleet, right: Right
) -> None:
    await started(fleet, p0=Role.PREFILL, d0=Role.DECODE)
    await fleet.lose("d0")
    await fleet.until(lambda: fleet.usable(Role.DECODE) == {"p0"})
    fleet.sites["p0"].gate.hold(after=10)
    reader, end = fleet.open(PROMPT)
    await fleet.sites["p0"].gate.reached()
    await fleet.start("d1", Role.DECODE)
    await fleet.until(lambda: "d1" in fleet.usable(Role.DECODE))
    fleet.sites["p0"].gate.release()
    await fleet.until(lambda: fleet.usable(Role.PREFILL) == {"p0"})
    assert fleet.usable(Role.DECODE) == {"d1"}
    await end
    assert reader.tokens == right(PROMPT)
    line = fleet.sites["p0"].worker.announcement()
    assert (line.cause, line.home_pool, line.ref.role) == (RoleCause.POOL_BACK, "prefill", Role.PREFILL)
    await fleet.at_rest()


async def test_cached_prefixes_survive_the_change_in_the_pool_and_in_the_routers_index(
    fleet: RoleFleet, right: Right
) -> None:
    await started(fleet, p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    _, end = fleet.open(PROMPT)
    await end
    name = max(("p0", "p1"), key=lambda name: fleet.table.index.num_blocks(WorkerId(name)))
    held = fleet.table.index.num_blocks(WorkerId(name))
    assert held == len(PROMPT) // 16
    await fleet.lose("d0")
    await fleet.until(lambda: bool(fleet.usable(Role.DECODE)))
    if fleet.usable(Role.DECODE) != {name}:
        order = await fleet.desk.order(WorkerId(name), Role.DECODE, RoleCause.OPERATOR, is_forced=True)
        assert order is not None
        await fleet.desk.carry_out(order)
        await fleet.table.refresh()
        await fleet.until(lambda: name in fleet.usable(Role.DECODE))
    assert fleet.table.index.num_blocks(WorkerId(name)) == held
    await fleet.until(lambda: fleet.table.index.confidence(WorkerId(name)) == 1.0)
    for other in fleet.usable(Role.DECODE) | fleet.usable(Role.PREFILL):
        if other != name:
            await fleet.lose(other)
    reader, end = fleet.open(PROMPT)
    await end
    assert reader.tokens == right(PROMPT)
    assert reader.cached[0] == held * 16
    assert reader.decisions[-1].reader.num_cached_tokens == held * 16


async def test_a_change_under_streams_moves_them_and_leaves_no_block_behind(
    fleet: RoleFleet, right: Right
) -> None:
    await started(fleet, p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    prompts = [prompt_ids(50 + 10 * seed, seed) for seed in range(6)]
    streams = [fleet.open(ids) for ids in prompts]
    for reader, _ in streams:
        await reader.has_tokens(3)
    order = await fleet.desk.order(WorkerId("d0"), Role.PREFILL, RoleCause.OPERATOR)
    assert order is not None
    await fleet.desk.carry_out(order)
    await fleet.table.refresh()
    back = await fleet.desk.order(WorkerId("d0"), Role.DECODE, RoleCause.OPERATOR)
    assert back is not None
    await fleet.desk.carry_out(back)
    await asyncio.gather(*(end for _, end in streams))
    assert [reader.tokens for reader, _ in streams] == [right(ids) for ids in prompts]
    await fleet.at_rest()


async def test_calls_to_the_role_that_was_left_are_refused_as_retryable(fleet: RoleFleet) -> None:
    await started(fleet, p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    worker = fleet.sites["p0"].worker
    before = worker.ref
    order = RoleOrder(before, Role.DECODE, RoleCause.OPERATOR)
    first, again = await asyncio.gather(worker.change_role(order), worker.change_role(order))
    assert first == again
    assert worker.ref.epoch != before.epoch
    stale = await refusal(worker.change_role(order))
    assert isinstance(stale, StaleEpoch)
    assert stale.retryable
    caller = GrpcWorker(worker.ref, fleet.security)
    sampling = SamplingParams(max_tokens=1, seed=1, temperature=0.0)
    request = Request(RequestId("r"), PROMPT, sampling)
    job = PrefillJob(request, (SampleStart(0),), new_ticket_id(), None, 1, 5.0)
    wrong = await refusal(caller.prefill(job))
    await caller.close()
    assert isinstance(wrong, WrongRole)
    assert wrong.retryable
    last = await refusal(fleet.desk.order(WorkerId("p1"), Role.DECODE, RoleCause.OPERATOR))
    assert isinstance(last, LastOfRole)


async def test_counters_go_on_over_changes_and_the_role_is_told(fleet: RoleFleet) -> None:
    await started(fleet, p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    worker = fleet.sites["p0"].worker
    for role in (Role.DECODE, Role.PREFILL, Role.DECODE):
        await worker.change_role(RoleOrder(worker.ref, role, RoleCause.AUTOSCALER))
    async with asyncio.timeout(5):
        while 'baton_kv_blocks{model="",role="decode",state="free"} 96.0' not in await text_of(worker):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    text = await text_of(worker)
    assert 'baton_worker_role{role="decode"} 1.0' in text
    assert 'baton_worker_role{role="prefill"} 0.0' in text
    assert 'baton_role_changes_total{cause="autoscaler",role="decode"} 2.0' in text
    assert 'baton_role_change_seconds_count{part="start",role="decode"} 2.0' in text
    assert text.count("# TYPE baton_kv_blocks gauge") == 1
    assert 'baton_kv_blocks{model="",role="prefill",state="free"} 0.0' in text


async def test_without_a_prefill_worker_decode_prefills(fleet: RoleFleet, right: Right) -> None:
    await started(fleet, d0=Role.DECODE)
    reader, end = fleet.open(PROMPT)
    await end
    assert reader.tokens == right(PROMPT)
