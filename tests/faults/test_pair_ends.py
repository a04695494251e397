"""A request ends as a unit: whatever ends it, wherever it is, both workers hear of it within a round trip,
and no step is computed for it but the one that had begun.

Every rule of the bridge that ends things by time waits for seconds; here nothing waits that long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.errors import DeadlineExceeded
from core.ids import RequestId, Role
from core.jobs import CancelJob
from engine.config import EngineConfig
from engine.loaded_model import LoadedModel, load_model
from engine.running_step import RunningStep
from engine.step import StepPlan
from router.config import PlanSetting
from tests.faults.pair_site import MAX_TOKENS, Moment, PairSite, pair_site, prompt_ids
from tests.oracle import make_toy_checkpoint, oracle_greedy

SOON_S = 1.0
"""Far less than any silence of the bridge (5 s) and far more than a round trip."""
DEADLINE_S = 1.5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_checkpoint(tmp_path_factory.mktemp("toy"), eos_token_id=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(checkpoint), threads=1))


@pytest.fixture
async def site(
    loaded: LoadedModel, checkpoint: Path, request: pytest.FixtureRequest
) -> AsyncIterator[PairSite]:
    plan = getattr(request, "param", PlanSetting.REMOTE)
    async with pair_site(loaded, checkpoint, plan) as site:
        yield site


async def end_by(cause: str, task: asyncio.Task[None]) -> None:
    """What ends the request, waited for where it comes by itself."""
    if cause == "client":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(DeadlineExceeded):
            await task


_CASES = [
    pytest.param(
        PlanSetting.LOCAL if moment is Moment.QUEUED_AT_DECODE else PlanSetting.REMOTE,
        moment,
        cause,
        id=f"{cause}, {moment}",
    )
    for moment in Moment
    for cause in ("client", "deadline")
]


@pytest.mark.parametrize(("site", "moment", "cause"), _CASES, indirect=["site"])
async def test_client_and_deadline_end_both_legs_at_every_moment(
    site: PairSite, moment: Moment, cause: str
) -> None:
    ids = prompt_ids()
    task = await site.bring_to(moment, ids, DEADLINE_S if cause == "deadline" else 60.0)
    num_prefill_steps, num_decode_steps = site.prefill_gate.num_steps, site.decode_gate.num_steps
    await end_by(cause, task)
    ended_at = time.monotonic()
    match moment:
        case Moment.QUEUED_AT_PREFILL:
            await site.until(lambda: site.prefill.num_calls == 1)
        case Moment.PREFILLING:
            # prefill's step thread stands at its gate: its other thread has told decode
            await site.until(lambda: site.num_held(Role.DECODE) == 0)
        case Moment.TRANSFERRING:
            # the commit still stands at its gate
            await site.until(lambda: site.num_held(Role.DECODE) == site.num_held(Role.PREFILL) == 0)
            await site.until(lambda: len(site.decode._loop._claims) == 0)
        case Moment.QUEUED_AT_DECODE:
            await site.until(lambda: site.decode._thread._commands.qsize() > 0)  # the cancel has come
            await site.decode_gate.step()
            assert site.decode._loop._scheduler.num_waiting == 0
        case Moment.DECODING:
            await site.until(lambda: site.decode._thread._commands.qsize() > 0)  # the cancel has come
            site.decode_gate.release()
            await site.until(lambda: site.num_held(Role.DECODE) == 0)
    assert time.monotonic() - ended_at < SOON_S
    await site.settle()
    if moment is Moment.PREFILLING:
        assert site.prefill_gate.num_steps <= num_prefill_steps + 1
        assert site.decode_gate.num_steps == 0
    if moment is Moment.TRANSFERRING:
        assert (site.prefill_gate.num_steps, site.decode_gate.num_steps) == (num_prefill_steps, 0)
    if moment is Moment.DECODING:
        assert site.decode_gate.num_steps <= num_decode_steps + 1


async def test_a_prompt_that_breaks_prefills_step_gives_decodes_room_back_and_is_read_there(
    site: PairSite, checkpoint: Path
) -> None:
    ids = prompt_ids()
    site.prefill_gate.hold(after=3)
    task, answer = site.begin("r", ids)
    await site.prefill_gate.reached()
    await site.until(lambda: len(site.decode._loop._inbox._arrivals) == 1)

    def broken(plan: StepPlan) -> RunningStep:
        raise RuntimeError("boom")

    site.prefill_gate._start = broken  # type: ignore[method-assign]
    (ticket_id,) = site.decode._loop._inbox._arrivals
    site.prefill_gate.release()
    began_at = time.monotonic()
    await site.until(lambda: ticket_id not in site.decode._loop._inbox._arrivals)
    assert time.monotonic() - began_at < SOON_S
    await task
    assert answer.tokens == oracle_greedy(checkpoint, ids, MAX_TOKENS)
    await site.settle()


async def test_decode_that_gives_a_ticket_up_stops_the_prompt_that_is_read_for_it(
    site: PairSite, checkpoint: Path
) -> None:
    ids = prompt_ids()
    site.prefill_gate.hold(after=3)
    task, answer = site.begin("r", ids)
    await site.prefill_gate.reached()
    await site.until(lambda: len(site.decode._loop._inbox._arrivals) == 1)
    (ticket_id,) = site.decode._loop._inbox._arrivals
    await site.decode.cancel(CancelJob(RequestId("r"), ticket_id, "given up"))
    # its next word on the bridge, a block or a keepalive, is refused, and with it the call: no step is needed
    await site.until(lambda: all(call.prompt.job.ticket_id != ticket_id for call in site.prefill._calls))
    num_steps = site.prefill_gate.num_steps
    site.prefill_gate.release()
    await asyncio.wait_for(task, 30)
    assert answer.tokens == oracle_greedy(checkpoint, ids, MAX_TOKENS)
    # what had been read before is cached: only the rest is read again
    assert site.prefill_gate.num_steps <= num_steps + len(ids) // 16 - 1
    await site.settle()
