"""What a call may ask for, as far as it depends on the workers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from core.errors import ContextTooLong
from core.ids import DEFAULT_TENANT, Role, TenantId
from core.request import SamplingParams
from router.admission import Admission, cost_of
from router.api_call import ApiCall, Prompt
from router.leases import Leases
from router.limits import SoleOwner
from router.tenants import Tenant, Tenants
from router.tenants_config import TenantsConfig
from router.text import TextSettings
from tests.doubles import settle
from tests.unit.router.api import new_model
from tests.unit.router.scripted import LAYOUT, Fleet, ScriptedWorker, new_status

TENANT = Tenants(TenantsConfig()).tenant(DEFAULT_TENANT)
POOL = 20 * LAYOUT.block_size


def _d(name: str = "d", num_blocks: int = 20) -> ScriptedWorker:
    return ScriptedWorker(Role.DECODE, name, num_blocks=num_blocks)


def _admission(fleet: Fleet) -> Admission:
    leases = Leases(SoleOwner(), fleet.time, 0.25)
    return Admission(
        fleet.config, new_model(max_context=8192), fleet.table, fleet.metrics, fleet.time, leases
    )


def _call(max_tokens: int | None) -> ApiCall:
    sampling = SamplingParams(max_tokens=0, seed=0)
    prompt = Prompt((1, 2, 3), "x")
    return ApiCall((prompt,), "messages", 1, sampling, 1, max_tokens, None, TextSettings(), False, False)


async def test_the_pool_limits_an_answer_before_its_worker_has_reported_anything() -> None:
    async with Fleet(_d()) as fleet:
        assert all(entry.status is None for entry in fleet.table.entries())
        (request,) = _admission(fleet).requests(_call(None), "c", TENANT, 5)
        assert request.sampling.max_tokens == POOL - 3
        with pytest.raises(ContextTooLong):
            _admission(fleet).requests(_call(POOL - 2), "c", TENANT, 5)


async def test_how_many_may_run_at_once_can_be_scraped() -> None:
    async with Fleet(_d()) as fleet:
        _admission(fleet)
        await fleet.pass_by(0.6)
        (entry,) = fleet.table.entries()
        assert entry.status is not None
        exposed = fleet.metrics.exposition().decode()
        (line,) = [line for line in exposed.splitlines() if line.startswith("baton_router_places ")]
        assert float(line.split()[1]) >= entry.status.max_num_seqs > 0


async def test_the_limits_of_a_worker_that_is_being_replaced_stand() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        fleet.listed = []
        worker.die()
        await fleet.pass_by(0.6)
        assert fleet.table.entries() == ()
        assert _admission(fleet).max_context() == POOL
        fleet.join(_d("d2", num_blocks=30))
        await fleet.pass_by(0.6)
        assert _admission(fleet).max_context() == 30 * LAYOUT.block_size


async def test_the_largest_decode_pool_counts_and_prefill_pools_do_not() -> None:
    prefill = ScriptedWorker(Role.PREFILL, "p", num_blocks=2)
    async with Fleet(prefill, _d("d1"), _d("d2", num_blocks=25)) as fleet:
        assert _admission(fleet).max_context() == 25 * LAYOUT.block_size


async def test_without_any_worker_yet_the_models_context_is_the_limit() -> None:
    async with Fleet() as fleet:
        assert _admission(fleet).max_context() == 8192


async def test_a_worker_that_has_told_nothing_yet_does_not_let_the_whole_line_run() -> None:
    known, silent = _d("d1"), _d("d2")
    known.status = new_status(known.ref, max_num_seqs=4)
    async with Fleet(known, silent) as fleet:
        assert [entry.status is None for entry in fleet.table.usable(Role.DECODE)] == [False, True]
        admission = _admission(fleet)
        (request,) = admission.requests(_call(5), "c", TENANT, 5)
        async with AsyncExitStack() as running:
            for _ in range(4):
                await running.enter_async_context(admission.place(request, TENANT, admission.deadline(None)))
            waits = asyncio.create_task(
                running.enter_async_context(admission.place(request, TENANT, admission.deadline(None)))
            )
            await settle()
            assert (fleet.metrics.num_running, fleet.metrics.num_waiting) == (4, 1)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)


async def test_the_same_prompt_of_another_tenant_is_another_call() -> None:
    async with Fleet(_d()) as fleet:
        admission = _admission(fleet)
        tenants = [Tenant(TenantId(name), TENANT.limits, name) for name in ("a", "b", "a")]
        calls = [cost_of(admission.requests(_call(5), "c", tenant, 5)).call for tenant in tenants]
        assert calls[0] == calls[2] != calls[1]


async def test_the_line_holds_while_the_last_decode_worker_is_replaced_and_not_for_longer() -> None:
    worker = _d()
    worker.status = new_status(worker.ref, max_num_seqs=1)
    async with Fleet(worker) as fleet:
        admission = _admission(fleet)
        (request,) = admission.requests(_call(5), "c", TENANT, 5)
        async with AsyncExitStack() as running:
            await running.enter_async_context(admission.place(request, TENANT, admission.deadline(None)))
            worker.die()
            await settle()
            assert not fleet.table.usable(Role.DECODE)
            waits = asyncio.create_task(
                running.enter_async_context(admission.place(request, TENANT, admission.deadline(None)))
            )
            await settle()
            assert fleet.metrics.num_waiting == 1
            fleet.time.advance(6.0)
            await running.enter_async_context(admission.place(request, TENANT, admission.deadline(None)))
            await waits
            assert (fleet.metrics.num_running, fleet.metrics.num_waiting) == (3, 0)
