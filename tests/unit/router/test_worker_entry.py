"""Load is counted once: what this router placed exactly, what others placed by the worker's status."""

from __future__ import annotations

from core.ids import Role
from router.worker_entry import Reservation
from tests.doubles import settle
from tests.unit.router.scripted import Fleet, ScriptedWorker, new_status


def _d() -> ScriptedWorker:
    return ScriptedWorker(Role.DECODE, "d")


async def test_reserved_load_is_counted_once_whether_or_not_a_status_shows_it() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        (entry,) = fleet.table.entries()
        entry.reserve(Reservation(100, 2, fleet.time.now(), num_blocks=9))
        assert (entry.num_ahead_tokens, entry.num_seqs, entry.num_pending_blocks) == (100, 2, 9)
        worker.beat()  # on its way already, or seen from there: the sum is the same
        await settle()
        assert (entry.num_ahead_tokens, entry.num_seqs) == (100, 2)
        worker.status = new_status(worker.ref, num_waiting=3, num_running=1, num_waiting_tokens=160)
        worker.beat()
        await settle()
        assert (entry.num_ahead_tokens, entry.num_seqs) == (160, 4)  # others have placed the rest
        assert entry.num_pending_blocks == 0  # the status has seen who holds what


async def test_load_of_others_stays_when_our_own_is_released() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        (entry,) = fleet.table.entries()
        reservation = Reservation(100, 1, fleet.time.now())
        entry.reserve(reservation)
        worker.status = new_status(worker.ref, num_waiting=2, num_waiting_tokens=130)
        worker.beat()
        await settle()
        entry.begin_stream(reservation)
        assert (entry.num_ahead_tokens, entry.num_seqs, entry.num_streams) == (30, 2, 1)
        entry.release(reservation)
        entry.release(reservation)
        assert (entry.num_ahead_tokens, entry.num_seqs, entry.num_streams) == (30, 1, 0)
