"""Who is drained: the process that was meant, until it is gone, and never the last of a role by mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.drain_table import DrainTable
from cluster.registry_table import RegistryTable
from core.errors import LastOfRole, UnknownWorker
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from core.worker_status import Announcement

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32", model="m")


class Site:
    """Workers that announce themselves by hand."""

    def __init__(self, *names: str) -> None:
        self.time = 100.0
        self.table = RegistryTable(self)
        self.drains = DrainTable(self, self.table)
        self.lines = {name: self.line(name) for name in names}
        for line in self.lines.values():
            self.table.announce(line)

    def now(self) -> float:
        return self.time

    @staticmethod
    def line(name: str, epoch: int = 1) -> Announcement:
        role = Role(name.split("-")[0])
        ref = WorkerRef(WorkerId(name), role, Epoch(epoch), "127.0.0.1:1")
        return Announcement(ref, "m", LAYOUT, 64, 1, "n", role.value, 4, process_epoch=Epoch(epoch))


def test_the_worker_that_is_meant_hears_it_until_it_has_gone_and_no_other_does() -> None:
    site = Site("decode-a", "decode-b", "prefill-c")
    order = site.drains.order(WorkerId("decode-a"), 7.0)
    assert (order.worker_id, order.process_epoch, order.within_s) == ("decode-a", 1, 7.0)
    assert [site.drains.heard(line) for line in site.lines.values()] == [order, None, None]
    assert site.drains.heard(site.lines["decode-a"]) == order, "the answer may have been lost"
    assert site.drains.order(WorkerId("decode-a"), 7.0) == order


def test_a_change_of_role_does_not_lose_the_order() -> None:
    site = Site("decode-a", "decode-b")
    order = site.drains.order(WorkerId("decode-a"), None)
    old = site.lines["decode-a"]
    changed = replace(old, ref=replace(old.ref, role=Role.PREFILL, epoch=Epoch(5)))
    assert site.drains.heard(changed) == order


def test_another_process_of_that_name_is_not_meant() -> None:
    site = Site("decode-a", "decode-b")
    site.drains.order(WorkerId("decode-a"), None)
    assert site.drains.heard(site.line("decode-a", epoch=2)) is None


def test_an_order_that_is_not_heard_lapses() -> None:
    site = Site("decode-a", "decode-b")
    site.drains.order(WorkerId("decode-a"), None)
    site.time += 60.0
    assert site.drains.heard(site.lines["decode-a"]) is None


def test_the_last_worker_of_a_role_goes_only_by_force() -> None:
    site = Site("decode-a", "decode-b", "prefill-c")
    with pytest.raises(LastOfRole, match="prefill-c is the last prefill worker"):
        site.drains.order(WorkerId("prefill-c"), None)
    site.drains.order(WorkerId("prefill-c"), None, is_forced=True)
    site.drains.order(WorkerId("decode-a"), None)
    with pytest.raises(LastOfRole, match="decode-b is the last decode worker"):
        site.drains.order(WorkerId("decode-b"), None)


def test_an_unknown_worker_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UnknownWorker, match="no worker 'decode-x'; known are: decode-a, decode-b"):
        Site("decode-b", "decode-a").drains.order(WorkerId("decode-x"), None)
