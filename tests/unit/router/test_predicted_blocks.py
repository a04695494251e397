"""What a request will leave on its worker counts from the moment it is placed, and no longer if it fails."""

from __future__ import annotations

import asyncio

import pytest

from core.block_hash import hash_blocks, root_hash
from core.errors import ServingError, StepFailed
from core.ids import Role
from core.jobs import GenerateJob
from core.request import Request
from router.config import PlanSetting
from router.setbacks import Setbacks
from tests.doubles import settle
from tests.unit.router.scripted import LAYOUT, Fleet, ScriptedWorker, new_request


def _cached_tokens(fleet: Fleet, request: Request) -> int:
    """What placement credits the prefill worker with."""
    placer, now = fleet.pipeline.placer, fleet.time.now()
    search = placer.seek(request, request.prompt_token_ids, placer.demand(request, 0, 1))
    (candidate,) = search.candidates(Role.PREFILL, Setbacks(fleet.pipeline.config, fleet.time), now)
    return candidate.num_cached_tokens


async def test_equal_prompts_in_a_row_are_expected_on_the_worker_of_the_first() -> None:
    prefill, decode = ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")
    prefill.hold = asyncio.Event()
    async with Fleet(prefill, decode, plan=PlanSetting.REMOTE) as fleet:
        request = new_request()
        root = root_hash(request.cache_salt, LAYOUT.fingerprint, request.adapter)
        names = hash_blocks(root, request.prompt_token_ids, LAYOUT.block_size)
        assert names
        task, _ = fleet.begin(request)
        await settle()
        assert prefill.prefills
        assert fleet.table.index.match(names) == {"p": len(names)}
        assert fleet.table.index.overlaps(names)[prefill.ref.worker_id].num_certain == 0
        assert _cached_tokens(fleet, request) == len(names) * LAYOUT.block_size, "for whoever comes next"
        prefill.hold.set()
        await task
        assert fleet.table.index.match(names) == {"p": len(names)}, "its events are on their way"
        await fleet.pass_by(2.5)
        assert fleet.table.index.match(names) == {}, "none came: it is not there any more"
        assert _cached_tokens(fleet, request) == 0


async def test_a_request_that_fails_leaves_nothing_that_is_expected() -> None:
    decode = ScriptedWorker(Role.DECODE, "d")
    counts: list[int] = []

    async with Fleet(decode, max_failures=2) as fleet:

        def fail(job: GenerateJob) -> ServingError:
            counts.append(fleet.table.index.num_predictions)
            return StepFailed("boom")

        decode.on_generate = fail
        task, _ = fleet.begin(new_request())
        while not task.done():
            await fleet.pass_by(0.1)
        with pytest.raises(ServingError):
            await task
        assert len(counts) >= 2
        assert set(counts) == {1}, "that of the placement under way, none of those before"
        assert fleet.table.index.num_predictions == 0
