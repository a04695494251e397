from __future__ import annotations

import pytest

from cluster.registry_table import LAPSE_S, Membership, MembershipView, RegistryTable
from core.awake import PERIOD_S, Awake
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from core.worker_status import Announcement

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32", model="m")


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def line(name: str, epoch: int = 1) -> Announcement:
    ref = WorkerRef(WorkerId(name), Role.DECODE, Epoch(epoch), f"127.0.0.1:{5000 + epoch}")
    return Announcement(ref, "m", LAYOUT, max_context=64, pid=1, node="n", home_pool="decode", num_blocks=4)


def names(membership: Membership) -> list[str]:
    return [str(item.ref.worker_id) for item in membership.announcements]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def table(clock: HandClock) -> RegistryTable:
    return RegistryTable(clock)


def test_a_silent_worker_lapses_and_an_announcing_one_stays(table: RegistryTable, clock: HandClock) -> None:
    table.announce(line("b"))
    table.announce(line("a"))
    assert names(table.membership()) == ["a", "b"]
    clock.time += LAPSE_S - 0.1
    table.announce(line("a"))
    clock.time += 0.2
    assert names(table.membership()) == ["a"]


def test_nobody_lapses_for_a_silence_in_which_the_registry_itself_was_stopped(clock: HandClock) -> None:
    awake = Awake(clock)
    table = RegistryTable(clock, awake=awake)
    awake.look()
    table.announce(line("a"))
    clock.time += 60.0
    assert names(table.membership()) == ["a"]
    awake.look()
    for _ in range(8):
        clock.time += PERIOD_S
        awake.look()
    assert names(table.membership()) == [], "it had the time to announce itself"


def test_a_new_incarnation_replaces_the_old_one(table: RegistryTable) -> None:
    table.announce(line("a", epoch=1))
    table.announce(line("a", epoch=2))
    assert [item.ref.epoch for item in table.membership().announcements] == [2]


def test_a_withdrawn_incarnation_is_gone_at_once_and_its_late_announcement_is_ignored(
    table: RegistryTable,
) -> None:
    table.announce(line("a"))
    table.withdraw(WorkerId("a"), Epoch(1))
    table.announce(line("a"))
    assert names(table.membership()) == []


def test_withdrawing_an_old_incarnation_leaves_the_new_one_alone(table: RegistryTable) -> None:
    table.announce(line("a", epoch=2))
    table.withdraw(WorkerId("a"), Epoch(1))
    assert names(table.membership()) == ["a"]


def test_a_young_registry_says_that_it_is_not_settled(table: RegistryTable, clock: HandClock) -> None:
    assert not table.membership().is_settled
    clock.time += LAPSE_S
    assert table.membership().is_settled


def test_a_reborn_registry_removes_nobody_from_a_routers_view() -> None:
    view = MembershipView()
    view.update(Membership((line("a"), line("b")), is_settled=True))
    view.update(Membership((), is_settled=False))
    view.update(Membership((line("b", epoch=2),), is_settled=False))
    assert [(item.ref.worker_id, item.ref.epoch) for item in view.announcements] == [("a", 1), ("b", 2)]


def test_a_settled_registry_removes_the_missing_from_a_routers_view() -> None:
    view = MembershipView()
    view.update(Membership((line("a"), line("b")), is_settled=True))
    view.update(Membership((line("b"),), is_settled=True))
    assert [item.ref.worker_id for item in view.announcements] == ["b"]


def test_the_end_of_the_service_is_told_with_the_time_that_is_left(
    table: RegistryTable, clock: HandClock
) -> None:
    assert table.membership().ends_in_s is None
    table.end_in(20.0)
    clock.time += 5.0
    assert table.membership().ends_in_s == 15.0
    clock.time += 60.0
    assert table.membership().ends_in_s == 0.0
