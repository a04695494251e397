"""Who changes its role, and when: one worker for all who ask, back when the pool has settled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.registry_table import LAPSE_S, RegistryTable
from cluster.role_config import RoleConfig
from cluster.role_table import RoleTable
from core.errors import LastOfRole, UnknownWorker
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from core.role_change import RoleCause, RoleOrder
from core.worker_status import Announcement

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32", model="m")
CONFIG = RoleConfig(settle_s=5.0, first_wait_s=60.0, order_s=2.0)


class Fleet:
    """Workers that announce themselves once a second by hand."""

    def __init__(self, config: RoleConfig = CONFIG) -> None:
        self.time = 100.0
        self.table = RegistryTable(self)
        self.roles = RoleTable(config, self, self.table)
        self.lines: dict[str, Announcement] = {}

    def now(self) -> float:
        return self.time

    def add(self, name: str, role: Role, epoch: int = 1) -> WorkerRef:
        ref = WorkerRef(WorkerId(name), role, Epoch(epoch), "127.0.0.1:1")
        self.lines[name] = Announcement(ref, "m", LAYOUT, 64, 1, "n", role.value, 4, home_role=role)
        self.announce(name)
        return ref

    def announce(self, name: str) -> RoleOrder | None:
        self.table.announce(self.lines[name])
        return self.roles.heard(self.lines[name])

    def follow(self, order: RoleOrder) -> WorkerRef:
        """The worker does as it is told."""
        old = self.lines[order.worker.worker_id]
        ref = replace(old.ref, role=order.role, epoch=Epoch(old.ref.epoch + 1))
        self.lines[ref.worker_id] = replace(old, ref=ref, cause=order.cause)
        assert self.announce(ref.worker_id) is None
        return ref

    def wait(self, seconds: float) -> dict[str, RoleOrder]:
        """Everybody announces itself each second meanwhile; the orders that were heard."""
        orders: dict[str, RoleOrder] = {}
        for _ in range(round(seconds)):
            self.time += 1.0
            heard = {name: self.announce(name) for name in self.lines}
            orders |= {name: order for name, order in heard.items() if order is not None}
        return orders


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_two_routers_that_lack_decode_are_given_the_same_stand_in(fleet: Fleet) -> None:
    fleet.add("p1", Role.PREFILL)
    fleet.add("p0", Role.PREFILL)
    dead = fleet.add("d0", Role.DECODE)
    first = fleet.roles.fill(Role.DECODE, [dead])
    assert first is not None
    assert (first.worker.worker_id, first.role, first.cause) == ("p0", Role.DECODE, RoleCause.EMPTY_POOL)
    assert fleet.roles.fill(Role.DECODE, [dead]) == first
    assert fleet.roles.fill(Role.DECODE, []) is None, "this router still has a use for d0"
    fleet.follow(first)
    assert fleet.roles.fill(Role.DECODE, [dead]) is None, "the stand-in is there"


def test_an_order_is_repeated_with_each_announcement_until_it_is_followed(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    order = fleet.roles.fill(Role.DECODE, [fleet.add("d0", Role.DECODE)])
    assert order is not None
    assert fleet.announce("p0") == order
    assert fleet.announce("p0") == order
    fleet.follow(order)
    assert fleet.announce("p0") is None


def test_an_order_that_nobody_has_followed_is_void_once_the_pool_is_back(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    assert fleet.roles.fill(Role.DECODE, [fleet.add("d0", Role.DECODE)]) is not None
    fleet.add("d0", Role.DECODE, epoch=9)
    assert fleet.announce("p0") is None
    assert fleet.roles.fill(Role.DECODE, []) is None


def test_a_worker_that_does_not_follow_in_time_is_passed_over(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    fleet.add("p1", Role.PREFILL)
    dead = fleet.add("d0", Role.DECODE)
    first = fleet.roles.fill(Role.DECODE, [dead])
    assert first is not None
    fleet.time += 1.9
    assert fleet.roles.fill(Role.DECODE, [dead]) == first
    fleet.time += 0.2
    second = fleet.roles.fill(Role.DECODE, [dead])
    assert second is not None
    assert second.worker.worker_id == "p1"


def test_a_stand_in_goes_home_only_when_the_pool_has_settled(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    dead = fleet.add("d0", Role.DECODE)
    order = fleet.roles.fill(Role.DECODE, [dead])
    assert order is not None
    del fleet.lines["d0"]
    fleet.follow(order)
    assert fleet.wait(20) == {}, "the pool has not come back"
    fleet.add("d0", Role.DECODE, epoch=9)
    assert fleet.wait(4) == {}
    back = fleet.wait(1)["p0"]
    assert (back.role, back.cause) == (Role.PREFILL, RoleCause.POOL_BACK)


def test_a_pool_that_routers_cannot_use_is_not_back(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    frozen = fleet.add("d0", Role.DECODE)
    order = fleet.roles.fill(Role.DECODE, [frozen])
    assert order is not None
    fleet.follow(order)
    for _ in range(5):
        fleet.roles.fill(Role.DECODE, [frozen])
        assert fleet.wait(3) == {}
    assert set(fleet.wait(6)) == {"p0"}


def test_a_pool_that_is_only_starting_is_waited_for(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    assert fleet.roles.fill(Role.DECODE, []) is None
    fleet.wait(59)
    assert fleet.roles.fill(Role.DECODE, []) is None
    fleet.wait(1)
    assert fleet.roles.fill(Role.DECODE, []) is not None


def test_a_pool_that_was_lost_together_with_the_registry_is_not_taken_for_one_that_is_starting(
    fleet: Fleet,
) -> None:
    lost = WorkerRef(WorkerId("d0"), Role.DECODE, Epoch(3), "127.0.0.1:1")
    assert fleet.roles.fill(Role.DECODE, [lost]) is None, "nobody is known to the new registry yet"
    fleet.add("p0", Role.PREFILL)
    order = fleet.roles.fill(Role.DECODE, [])
    assert order is not None
    assert order.worker.worker_id == "p0"


def test_nobody_stands_in_while_the_service_stops(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    dead = fleet.add("d0", Role.DECODE)
    fleet.table.end_in(20.0)
    assert fleet.roles.fill(Role.DECODE, [dead]) is None


def test_a_stand_in_stays_where_it_is_while_the_service_stops(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    order = fleet.roles.fill(Role.DECODE, [fleet.add("d0", Role.DECODE)])
    assert order is not None
    fleet.follow(order)
    fleet.table.end_in(20.0)
    assert fleet.wait(10) == {}, "the pool is back, but what runs has no time to move"


def test_nobody_stands_in_where_that_is_switched_off() -> None:
    fleet = Fleet(RoleConfig(is_standing_in=False))
    fleet.add("p0", Role.PREFILL)
    assert fleet.roles.fill(Role.DECODE, [fleet.add("d0", Role.DECODE)]) is None


def test_a_registry_that_was_born_again_still_sends_a_stand_in_home(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    order = fleet.roles.fill(Role.DECODE, [fleet.add("d0", Role.DECODE)])
    assert order is not None
    fleet.follow(order)
    born_again = Fleet()
    born_again.lines = fleet.lines
    assert set(born_again.wait(7)) == {"p0"}


def test_an_operators_order_is_kept_and_does_not_go_home(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    fleet.add("p1", Role.PREFILL)
    fleet.add("d0", Role.DECODE)
    order = fleet.roles.order(WorkerId("p0"), Role.DECODE, RoleCause.OPERATOR)
    assert order is not None
    assert fleet.announce("p0") == order
    fleet.follow(order)
    assert fleet.wait(30) == {}
    assert fleet.roles.order(WorkerId("p0"), Role.DECODE, RoleCause.OPERATOR) is None


def test_the_last_worker_of_a_role_leaves_it_only_by_force(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    fleet.add("p1", Role.PREFILL)
    fleet.add("d0", Role.DECODE)
    with pytest.raises(LastOfRole, match="d0 is the last decode worker"):
        fleet.roles.order(WorkerId("d0"), Role.PREFILL, RoleCause.OPERATOR)
    assert fleet.roles.order(WorkerId("p0"), Role.DECODE, RoleCause.AUTOSCALER) is not None
    with pytest.raises(LastOfRole, match="p1"):
        fleet.roles.order(WorkerId("p1"), Role.DECODE, RoleCause.AUTOSCALER)
    assert fleet.roles.order(WorkerId("d0"), Role.PREFILL, RoleCause.OPERATOR, is_forced=True) is not None


def test_an_unknown_worker_is_refused_with_the_names_that_are_known(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    fleet.add("d0", Role.DECODE)
    with pytest.raises(UnknownWorker, match=r"'p9'; known are: d0, p0"):
        fleet.roles.order(WorkerId("p9"), Role.DECODE, RoleCause.OPERATOR)
    fleet.time += LAPSE_S + 0.1
    with pytest.raises(UnknownWorker, match="known are: none"):
        fleet.roles.order(WorkerId("p0"), Role.DECODE, RoleCause.OPERATOR)


def test_an_order_for_a_process_that_is_gone_is_not_given_to_its_successor(fleet: Fleet) -> None:
    fleet.add("p0", Role.PREFILL)
    order = fleet.roles.fill(Role.DECODE, [fleet.add("d0", Role.DECODE)])
    assert order is not None
    fleet.add("p0", Role.PREFILL, epoch=50)
    assert fleet.announce("p0") is None
