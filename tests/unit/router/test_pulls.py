"""What decode has cached goes to the prefill worker first; if it does not come, the prompt is read there."""

from __future__ import annotations

import asyncio

import pytest

from core.block_hash import hash_blocks, root_hash
from core.errors import DeadlineExceeded, ReservationRefused, ServingError, WorkerLost
from core.request import Request
from core.telemetry import TTFTPart
from router.stamps import Stamps
from tests.doubles import settle
from tests.unit.router.pipeline_fleet import REMOTE
from tests.unit.router.pipeline_fleet import decode_worker as _d
from tests.unit.router.pipeline_fleet import prefill_worker as _p
from tests.unit.router.scripted import LAYOUT, Fleet, ScriptedWorker, answer, new_request

_NUM_BLOCKS = 20
_REQUEST = new_request(prompt_len=90)


def _holder(request: Request = _REQUEST) -> ScriptedWorker:
    """A decode worker that has told of the prompt's first blocks."""
    root = root_hash(request.cache_salt, LAYOUT.fingerprint, request.adapter)
    names = hash_blocks(root, request.prompt_token_ids, LAYOUT.block_size)
    return _d(hashes=tuple(names[:_NUM_BLOCKS]))


def _pulls(fleet: Fleet, outcome: str) -> float:
    return fleet.metrics.registry.get_sample_value("baton_pulls_total", {"outcome": outcome}) or 0.0


async def _know(fleet: Fleet, worker: ScriptedWorker) -> None:
    """Until the router knows what the worker holds."""
    async with asyncio.timeout(5):
        while fleet.table.index.num_blocks(worker.ref.worker_id) < _NUM_BLOCKS:
            await settle()


async def test_decode_lends_what_it_has_cached_before_prefill_is_called() -> None:
    prefill, decode = _p(num_cached_tokens=_NUM_BLOCKS * LAYOUT.block_size), _holder()
    decode.hold_loans = asyncio.Event()
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        await _know(fleet, decode)
        task, reader = fleet.begin(_REQUEST)
        await settle()
        (loan,) = decode.loans
        assert (loan.to, loan.block_hashes) == (prefill.ref, decode.hashes)
        assert not prefill.prefills, "it is read when the blocks are there"
        decode.hold_loans.set()
        await task
        assert reader.tokens[0] == answer(_REQUEST, 0)
        assert prefill.prefills[0].ticket_id != loan.ticket_id
        assert not prefill.cancels
        assert _pulls(fleet, "done") == 1
        pulled = fleet.metrics.registry.get_sample_value("baton_pulled_tokens_total")
        assert pulled == _NUM_BLOCKS * LAYOUT.block_size
    (decision,) = reader.decisions
    assert decision.pull_from is not None
    assert decision.pull_from.ref == decode.ref


@pytest.mark.parametrize("error", [ReservationRefused("no room"), WorkerLost("the connection broke")])
async def test_a_pull_that_fails_costs_no_attempt_and_the_borrower_is_told(error: ServingError) -> None:
    prefill, decode = _p(), _holder()
    decode.on_lend = lambda job: error
    async with Fleet(prefill, decode, **REMOTE) as fleet:
        await _know(fleet, decode)
        reader = await fleet.serve(_REQUEST)
        await fleet.pipeline.cancels.settle()
        assert reader.tokens[0] == answer(_REQUEST, 0)
        assert not reader.losses
        assert len(reader.decisions) == 1
        assert [job.ticket_id for job in prefill.cancels] == [decode.loans[0].ticket_id]
        assert _pulls(fleet, error.code) == 1
        (lender,) = [entry for entry in fleet.table.entries() if entry.ref == decode.ref]
        line = lender.rates.handoffs[prefill.ref.worker_id]
        num_bytes = _NUM_BLOCKS * LAYOUT.block_bytes
        assert line.fixed + line.per_byte * num_bytes > fleet.config.assumed_handoff_ms, "its price has risen"


async def test_a_pull_that_takes_too_long_is_given_up() -> None:
    prefill, decode = _p(), _holder()
    decode.hold_loans = asyncio.Event()
    async with Fleet(prefill, decode, pull_timeout_s=0.05, **REMOTE) as fleet:
        await _know(fleet, decode)
        reader = await fleet.serve(_REQUEST)
        assert reader.tokens[0] == answer(_REQUEST, 0)
        assert decode.num_open_calls == 0, "the lender is not waited for any more"
        assert _pulls(fleet, "transfer_timeout") == 1


@pytest.mark.parametrize("cause", ["client", "deadline", "lender"])
async def test_an_end_during_a_pull_reaches_both_workers(cause: str) -> None:
    prefill, decode, other = _p(), _holder(), _d("other")
    decode.hold_loans = asyncio.Event()
    async with Fleet(prefill, decode, other, **REMOTE) as fleet:
        await _know(fleet, decode)
        task, reader = fleet.begin(_REQUEST, timeout_s=1.0)
        await settle()
        (loan,) = decode.loans
        if cause == "client":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif cause == "deadline":
            await fleet.pass_by(1.1)
            with pytest.raises(DeadlineExceeded):
                await task
        else:
            decode.die()
            await settle()
            await task
            assert reader.tokens[0] == answer(_REQUEST, 0)
        await fleet.pipeline.cancels.settle()
        assert decode.num_open_calls == 0
        assert loan.ticket_id in [job.ticket_id for job in prefill.cancels]
        assert bool(prefill.prefills) == (cause == "lender")


async def test_a_resumed_request_pulls_what_a_survivor_has_cached() -> None:
    """Both of its workers die; another decode worker has read the same beginning for somebody else."""
    prefill, dying, survivor = _p(), _d("dying"), _holder()
    other = _p("other", num_cached_tokens=_NUM_BLOCKS * LAYOUT.block_size)
    dying.pause_at = 3
    async with Fleet(prefill, dying, **REMOTE) as fleet:
        task, reader = fleet.begin(_REQUEST)
        await settle()
        fleet.join(survivor)
        fleet.join(other)
        await fleet.pass_by(1.0)
        await _know(fleet, survivor)
        prefill.die()
        dying.die()
        await settle()
        await fleet.pass_by(1.0)
        await task
        assert reader.tokens[0] == answer(_REQUEST, 0)
        assert [loan.to for loan in survivor.loans] == [other.ref]
        value = fleet.metrics.registry.get_sample_value
        (job,) = other.prefills
        num_tokens = _REQUEST.num_prompt_tokens + len(job.samples[0].emitted)
        assert value("baton_resumed_tokens_total", {"kind": "cached"}) == 80
        assert value("baton_resumed_tokens_total", {"kind": "recomputed"}) == num_tokens - 80


async def test_a_resumed_request_goes_back_to_the_prefill_worker_that_has_read_it() -> None:
    prefill, dying, survivor = _p(), _d("dying"), _d()
    dying.pause_at = 3
    async with Fleet(prefill, dying, **REMOTE) as fleet:
        task, reader = fleet.begin(_REQUEST)
        await settle()
        fleet.join(survivor)
        fleet.join(_p("other"))
        await fleet.pass_by(1.0)
        prefill.num_cached_tokens = 88
        dying.die()
        await settle()
        await fleet.pass_by(1.0)
        await task
        assert reader.tokens[0] == answer(_REQUEST, 0)
        assert len(prefill.prefills) == 2, "what it has read is still there, whoever has told so or not"


def test_the_time_of_a_pull_is_a_part_of_the_time_to_first_token() -> None:
    stamps = Stamps(10.0, 0.0)
    stamps.admitted(11.0)
    stamps.placed(12.0)
    stamps.pulled(15.0)
    stamps.token(0, None, 16.0)
    assert stamps.parts[TTFTPart.PULL] == 3.0
    assert stamps.parts[TTFTPart.FIRST_TOKEN] == 1.0
    assert sum(stamps.parts.values()) == stamps.ttft_s == 6.0
    stamps.pulled(20.0)
    assert stamps.parts[TTFTPart.PULL] == 3.0, "of a resume it is part of the stall"
