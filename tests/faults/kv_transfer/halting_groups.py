"""Process groups that halt before they send a payload, which was announced: decode waits for it."""

from __future__ import annotations

import sys
from typing import Protocol

from engine.kv.pool import KVPool
from engine.pair_group import Keys, TorchGroups, TorchPairGroup
from kv_transfer.pair_group import Groups
from tests.integration.kv_transfer.ends import LAYOUT


class Tell(Protocol):
    def __call__(self, *, event: str) -> None: ...


def halting_groups(halts_at: int, tell: Tell) -> Groups:
    """Real ones; at the `halts_at`-th payload (0: none) they halt until a line comes on standard input."""

    class HaltingGroup(TorchPairGroup):
        num_sent = 0

        def send(self, offset: int, num_bytes: int) -> None:
            self.num_sent += 1
            if self.num_sent == halts_at:
                tell(event="halted")
                sys.stdin.readline()
                tell(event="went on")
            super().send(offset, num_bytes)

    class HaltingGroups(TorchGroups):
        def form(self, rank: int, keys: Keys, num_bytes: int, attach_s: float, op_s: float) -> TorchPairGroup:
            group = super().form(rank, keys, num_bytes, attach_s, op_s)
            group.__class__ = HaltingGroup
            return group

    return HaltingGroups(KVPool(LAYOUT, 1), "gloo", "127.0.0.1")
