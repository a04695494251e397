"""Workers come by announcement, die by a broken Watch, and are suspected when silent."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from core.block_hash import BlockHash, digest_part
from core.errors import WorkerLost
from core.ids import Role
from core.jobs import BlockPage, SnapshotJob, WatchEvent
from core.worker_status import BlockEvent, BlockEventKind
from router.worker_entry import WorkerState
from tests.doubles import settle
from tests.unit.router.scripted import Fleet, ScriptedWorker, new_status

_HASH = BlockHash(hashlib.blake2b(b"x", digest_size=16).digest())
_OTHER = BlockHash(hashlib.blake2b(b"y", digest_size=16).digest())


def _d(name: str = "d", **script: object) -> ScriptedWorker:
    return ScriptedWorker(Role.DECODE, name, **script)  # type: ignore[arg-type]


def _states(fleet: Fleet) -> dict[str, WorkerState]:
    return {entry.ref.worker_id: entry.state for entry in fleet.table.entries()}


async def test_a_listed_worker_is_usable_once_it_is_heard_of() -> None:
    async with Fleet(_d()) as fleet:
        assert _states(fleet) == {"d": WorkerState.ALIVE}
        assert [entry.ref.worker_id for entry in fleet.table.usable(Role.DECODE)] == ["d"]
        assert fleet.table.usable(Role.PREFILL) == []


async def test_a_listed_worker_that_cannot_be_reached_is_not_usable() -> None:
    worker = _d(is_dead=True)
    async with Fleet(worker) as fleet:
        assert fleet.table.usable(Role.DECODE) == []


async def test_a_broken_watch_is_death_at_once() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        worker.die()
        await settle()
        assert _states(fleet) == {"d": WorkerState.DEAD}
        assert fleet.table.usable(Role.DECODE) == []


async def test_a_dead_worker_that_leaves_the_list_is_forgotten_and_let_go_of() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        worker.die()
        fleet.listed = []
        await fleet.pass_by(0.6)
        assert _states(fleet) == {}
        assert worker.is_closed


async def test_a_connection_that_broke_and_heals_is_used_again() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        worker.die()
        await settle()
        worker.is_dead = False
        worker._death.clear()
        await fleet.pass_by(0.6)
        assert _states(fleet) == {"d": WorkerState.ALIVE}
        assert worker.num_watches == 2


async def test_a_new_incarnation_replaces_the_old_one() -> None:
    old = _d()
    async with Fleet(old) as fleet:
        lost: list[int] = []
        fleet.table.entries()[0].on_abandon(lambda: lost.append(1))
        fleet.join(_d(epoch=2))
        await fleet.pass_by(0.6)
        (entry,) = fleet.table.entries()
        assert entry.ref.epoch == 2
        assert fleet.table.entry(old.ref) is None
        assert lost == [1]


async def test_without_an_answer_from_the_registry_the_last_table_stands() -> None:
    async with Fleet(_d()) as fleet:
        fleet.is_membership_known = False
        await fleet.pass_by(20.0)
        assert _states(fleet) == {"d": WorkerState.ALIVE}


async def test_a_registry_that_lost_its_memory_takes_no_living_worker_away() -> None:
    async with Fleet(_d()) as fleet:
        fleet.listed = []
        await fleet.pass_by(20.0)
        assert _states(fleet) == {"d": WorkerState.ALIVE}


async def test_silence_makes_a_worker_suspect_and_a_sign_of_life_clears_it() -> None:
    worker = _d()
    async with Fleet(worker, suspect_after_s=3.0) as fleet:
        worker.is_silent = True
        await fleet.pass_by(2.9)
        assert _states(fleet) == {"d": WorkerState.ALIVE}
        await fleet.pass_by(0.7)
        assert _states(fleet) == {"d": WorkerState.SUSPECT}
        assert fleet.table.usable(Role.DECODE) == []
        worker.beat()
        await settle()
        assert _states(fleet) == {"d": WorkerState.ALIVE}


async def test_what_runs_on_a_silent_worker_is_given_up_only_if_another_can_take_it() -> None:
    worker = _d("d1")
    async with Fleet(worker) as fleet:
        lost: list[int] = []
        fleet.table.entries()[0].on_abandon(lambda: lost.append(1))
        worker.is_silent = True
        await fleet.pass_by(10.0)
        assert lost == []
        fleet.join(_d("d2"))
        await fleet.pass_by(0.6)
        assert lost == [1]


async def test_what_runs_on_a_silent_prefill_worker_is_given_up_when_decode_can_read_the_prompt() -> None:
    prefill = ScriptedWorker(Role.PREFILL, "p")
    async with Fleet(prefill, _d()) as fleet:
        lost: list[int] = []
        fleet.table.entries()[0].on_abandon(lambda: lost.append(1))
        prefill.is_silent = True
        await fleet.pass_by(10.0)
        assert lost == [1]


async def test_a_call_on_a_worker_that_is_given_up_already_fails_at_once_until_it_is_heard_of() -> None:
    worker = _d("d1")
    async with Fleet(worker, _d("d2")) as fleet:
        entry = fleet.table.entries()[0]
        worker.is_silent = True
        await fleet.pass_by(10.0)
        lost: list[int] = []
        entry.on_abandon(lambda: lost.append(1))
        assert lost == [1]
        worker.beat()
        await settle()
        entry.on_abandon(lambda: lost.append(2))
        assert lost == [1]
        fleet.listed = []
        worker.die()
        await fleet.pass_by(0.6)
        assert lost == [1, 2]
        entry.on_abandon(lambda: lost.append(3))
        assert lost == [1, 2, 3]


async def test_what_runs_on_a_silent_worker_is_given_up_once_another_takes_work_again() -> None:
    worker, other = _d("d1"), _d("d2")
    other.status = new_status(other.ref, is_draining=True)
    async with Fleet(worker, other) as fleet:
        lost: list[int] = []
        fleet.table.entries()[0].on_abandon(lambda: lost.append(1))
        worker.is_silent = True
        await fleet.pass_by(10.0)
        assert lost == []
        other.status = new_status(other.ref)
        await fleet.pass_by(1.1)
        assert lost == [1]


async def test_a_watch_that_ends_without_an_error_is_no_death() -> None:
    worker = _d(hashes=(_HASH,))
    async with Fleet(worker) as fleet:
        lost: list[int] = []
        fleet.table.entries()[0].on_abandon(lambda: lost.append(1))
        worker.end_watch()
        await settle()
        assert _states(fleet) == {"d": WorkerState.ALIVE}
        await fleet.pass_by(0.6)
        assert worker.num_watches == 2
        assert _states(fleet) == {"d": WorkerState.ALIVE}
        assert lost == []


async def test_a_draining_worker_that_ends_its_watch_is_gone() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        worker.tell(WatchEvent(0, status=new_status(worker.ref, is_draining=True)))
        worker.end_watch()
        await settle()
        assert _states(fleet) == {"d": WorkerState.DEAD}


async def test_a_worker_whose_watch_says_nothing_is_gone() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:

        async def closed() -> AsyncIterator[WatchEvent]:
            for event in ():
                yield event

        worker.watch = closed  # type: ignore[method-assign]
        worker.end_watch()
        await fleet.pass_by(0.6)
        assert _states(fleet) == {"d": WorkerState.DEAD}


async def test_the_last_worker_of_a_role_is_remembered_for_its_limits() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        fleet.listed = []
        worker.die()
        await fleet.pass_by(0.6)
        assert fleet.table.entries() == ()
        assert [item.ref for item in fleet.table.announcements()] == [worker.ref]
        other = _d("d2")
        fleet.join(other)
        await fleet.pass_by(0.6)
        assert [item.ref for item in fleet.table.announcements()] == [other.ref]


async def test_a_silent_worker_that_also_left_the_list_is_dead() -> None:
    worker = _d()
    async with Fleet(worker, suspect_after_s=3.0) as fleet:
        worker.is_silent = True
        fleet.listed = []
        await fleet.pass_by(5.0)
        assert _states(fleet) == {}


async def test_a_draining_worker_gets_nothing_new() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        worker.tell(WatchEvent(0, status=new_status(worker.ref, is_draining=True)))
        await settle()
        assert fleet.table.usable(Role.DECODE) == []
        assert _states(fleet) == {"d": WorkerState.ALIVE}


async def test_a_gap_in_the_events_is_mended_by_fetching_the_set_while_the_watch_goes_on() -> None:
    worker = _d()
    async with Fleet(worker) as fleet:
        worker.hashes, worker.number = (_HASH, _OTHER), 5
        worker.tell(WatchEvent(5, events=(BlockEvent(BlockEventKind.STORED, _OTHER),)))
        await settle()
        assert [job.first_part for job in worker.snapshots] == [0, 1024, 2048, 3072]
        assert worker.num_watches == 1
        assert fleet.table.index.match([_HASH, _OTHER]) == {"d": 2}
        assert fleet.table.index.confidence(worker.ref.worker_id) == 1.0
        assert _states(fleet) == {"d": WorkerState.ALIVE}


async def test_a_digest_that_does_not_fit_is_mended_by_fetching_the_set() -> None:
    worker = _d(hashes=(_HASH,))
    async with Fleet(worker) as fleet:
        worker.tell(WatchEvent(0, status=new_status(worker.ref), digest=(1, digest_part(_HASH))))
        await fleet.pass_by(0.6)
        assert len(worker.snapshots) == 1, "the first, when it came"
        worker.hashes = ()
        worker.tell(WatchEvent(0, status=new_status(worker.ref), digest=(0, 0)))
        await fleet.pass_by(0.6)
        assert len(worker.snapshots) > 1
        assert worker.num_watches == 1
        assert fleet.table.index.match([_HASH]) == {}


async def test_a_worker_that_cannot_tell_its_set_is_asked_again_and_works_on() -> None:
    worker = _d(hashes=(_HASH,))
    whole, calls = worker.snapshot, 0

    async def snapshot(job: SnapshotJob) -> BlockPage:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise WorkerLost("not now", worker_id="d")
        return await whole(job)

    worker.snapshot = snapshot  # type: ignore[method-assign]
    async with Fleet(worker) as fleet:
        assert fleet.table.usable(Role.DECODE)
        assert 0 < fleet.table.index.confidence(worker.ref.worker_id) < 1
        await fleet.pass_by(10.0)
        assert calls == 3
        assert fleet.table.repairs.num_failed == 2
        assert fleet.table.index.match([_HASH]) == {"d": 1}


async def test_a_stream_that_was_cut_costs_no_fetch_if_nothing_has_changed() -> None:
    worker = _d(hashes=(_HASH,))
    async with Fleet(worker) as fleet:
        worker.end_watch()
        await settle()
        assert fleet.table.index.confidence(worker.ref.worker_id) < 1
        assert fleet.table.index.match([_HASH]) == {"d": 1}
        await fleet.pass_by(0.6)
        assert worker.num_watches == 2
        assert len(worker.snapshots) == 1
        assert fleet.table.index.confidence(worker.ref.worker_id) == 1.0


async def test_what_a_worker_holds_is_forgotten_with_the_worker() -> None:
    worker = _d(hashes=(_HASH,))
    async with Fleet(worker) as fleet:
        assert fleet.table.index.match([_HASH]) == {"d": 1}
        worker.die()
        fleet.listed = []
        await fleet.pass_by(0.6)
        assert fleet.table.index.match([_HASH]) == {}
        fleet.join(_d(epoch=2))
        await fleet.pass_by(1.1)
        assert fleet.table.index.match([_HASH]) == {}
        assert fleet.table.index.confidence(worker.ref.worker_id) == 1.0


async def test_stopping_ends_all_watches_and_closes_all_connections() -> None:
    workers = [_d("d1"), _d("d2", is_dead=True)]
    async with Fleet(*workers) as fleet:
        pass
    assert fleet.table.entries() == ()
    assert all(worker.is_closed for worker in workers)


async def test_what_a_worker_holds_stays_known_when_it_changes_its_role() -> None:
    prefill = ScriptedWorker(Role.PREFILL, "w", hashes=(_HASH,), process_epoch=9)
    async with Fleet(prefill) as fleet:
        assert fleet.table.index.num_blocks(prefill.ref.worker_id) == 1
        decode = ScriptedWorker(Role.DECODE, "w", epoch=2, hashes=(_HASH,), process_epoch=9)
        fleet.join(decode)
        await fleet.table.refresh()
        assert fleet.table.index.num_blocks(decode.ref.worker_id) == 1, "before it was heard of"
        await settle()
        assert [entry.ref for entry in fleet.table.usable(Role.DECODE)] == [decode.ref]
        assert fleet.table.index.confidence(decode.ref.worker_id) == 1.0
        assert not decode.snapshots, "there was nothing to fetch"
