"""A pass asks for each part until a page tells it that holds all that was lost."""

from __future__ import annotations

from core.block_hash import NUM_PARTS, BlockHash
from core.jobs import SnapshotJob
from core.worker_status import BlockEvent, BlockEventKind
from router.repair_pass import RepairPass

KNOWN = list(range(NUM_PARTS))


def _event() -> BlockEvent:
    return BlockEvent(BlockEventKind.STORED, BlockHash(bytes(16)))


def test_of_what_is_known_each_page_says_what_it_knows_and_no_page_asks_further() -> None:
    repair, jobs = RepairPass(0), []
    while not repair.is_done:
        job = repair.ask(KNOWN)
        assert job.known == tuple(range(job.first_part, job.end_part))
        assert repair.arrived(1)
        for part in range(job.first_part, job.end_part):
            repair.done(part)
        jobs.append((job.first_part, job.end_part))
    assert jobs == [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)]


def test_who_knows_nothing_asks_for_all_and_gets_as_much_as_fits() -> None:
    repair = RepairPass(0)
    assert repair.ask([]) == SnapshotJob(0, NUM_PARTS)
    repair.arrived(1)
    for part in range(100):
        repair.done(part)
    assert repair.ask([]) == SnapshotJob(100, NUM_PARTS)
    assert repair.progress == 100 / NUM_PARTS


def test_a_part_that_changed_on_its_way_is_asked_for_whole_at_the_end() -> None:
    repair = RepairPass(0)
    repair.ask([])
    repair.arrived(1)
    for part in range(NUM_PARTS):
        (repair.retry if part in (7, 9) else repair.done)(part)
    assert not repair.is_done
    assert repair.ask(KNOWN) == SnapshotJob(7, 8)
    repair.arrived(2)
    repair.done(7)
    assert repair.ask(KNOWN) == SnapshotJob(9, 10)
    repair.arrived(3)
    repair.done(9)
    assert repair.is_done
    assert repair.covered == 1


def test_a_loss_begins_the_pass_anew_unless_its_pages_hold_what_was_lost() -> None:
    repair = RepairPass(0)
    repair.ask([])
    assert repair.arrived(10)
    repair.done(0)
    repair.miss(10)
    assert repair.ask([]).first_part == 1
    repair.miss(11)
    assert repair.ask([]).first_part == 0
    assert not repair.arrived(10), "this page was told before the loss"
    repair.ask([])
    assert repair.arrived(11)
    assert repair.covered == 11


def test_the_events_after_a_page_are_at_hand_and_those_before_it_are_let_go() -> None:
    repair = RepairPass(0)
    for number in range(1, 6):
        repair.note(number, _event())
    repair.ask([])
    assert repair.arrived(3)
    assert [number for number, _ in repair.later(3)] == [4, 5]
    assert [number for number, _ in repair.later(0)] == [4, 5]


def test_the_events_at_hand_are_bounded() -> None:
    repair = RepairPass(0)
    repair.ask([])
    assert repair.arrived(1)
    repair.done(0)
    for number in range(2, 65_540):
        repair.note(number, _event())
    assert len(list(repair.later(0))) < 65_536
    assert repair.ask([]).first_part == 0
    assert not repair.arrived(5)
    repair.ask([])
    assert repair.arrived(65_539)
