"""Pulls: cached blocks that a decode worker sends to a prefill worker before a prompt is read there.

Owns that call: its time limit, its cancel at the borrower, and what is learned of it. It never fails a
request: what does not come is read. Decides nothing. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from core.block_hash import BlockHash
from core.clock import Clock, Deadline
from core.errors import ServingError, TransferTimeout
from core.ids import RequestId, new_ticket_id
from core.jobs import LendJob, LendResult
from router.config import RouterConfig
from router.distance import Distances
from router.legs import Cancels, Leg, Legs
from router.reuse_metrics import ReuseMetrics
from router.worker_entry import WorkerEntry


@dataclass(frozen=True, slots=True)
class Loan:
    """What `source` is to send: the blocks of a prompt, from its first on."""

    source: WorkerEntry
    block_hashes: tuple[BlockHash, ...]


class Pulls:
    """One per router."""

    def __init__(
        self,
        config: RouterConfig,
        distances: Distances,
        metrics: ReuseMetrics,
        cancels: Cancels,
        clock: Clock,
    ) -> None:
        self._config = config
        self._distances = distances
        self._metrics = metrics
        self._cancels = cancels
        self._clock = clock

    async def pull(
        self, loan: Loan, to: WorkerEntry, request_id: RequestId, deadline: Deadline, legs: Legs
    ) -> int:
        """How many tokens of the prompt `to` has cached now, as far as that is known: 0 if it failed.

        Cancelling the call stops it at both workers: the lender by its broken call, the borrower by `legs`.
        """
        time_left_s = min(self._config.pull_timeout_s, deadline.left_s(self._clock))
        leg = Leg(to, new_ticket_id())
        assert leg.ticket_id is not None
        job = LendJob(request_id, leg.ticket_id, loan.block_hashes, to.ref, time_left_s)
        legs.open.append(leg)
        began_at = self._clock.now()
        try:
            async with asyncio.timeout(time_left_s):
                result = await loan.source.until_lost(loan.source.worker.lend(job))
        except (ServingError, TimeoutError) as error:
            legs.close(leg)
            # the lender tells it, too, unless it is lost
            self._cancels.later(leg, request_id, "the loan failed")
            code = error.code if isinstance(error, ServingError) else TransferTimeout.code
            self._metrics.pulled(code)
            # however soon it failed, it was worth nothing
            self._learn(loan, to, len(loan.block_hashes), self._config.pull_timeout_s)
            return 0
        legs.close(leg)
        layout = to.announcement.layout
        self._metrics.pulled("done", result.num_sent_blocks * layout.block_size)
        if result.num_sent_blocks:
            self._learn(loan, to, result.num_sent_blocks, self._clock.now() - began_at)
        return self._told(loan, result)

    def _learn(self, loan: Loan, to: WorkerEntry, num_blocks: int, seconds: float) -> None:
        loan.source.rates.observe_handoff(
            to.ref.worker_id,
            num_blocks * to.announcement.layout.block_bytes,
            seconds * 1e3,
            self._distances.assumed(loan.source.announcement, to.announcement),
        )

    def _told(self, loan: Loan, result: LendResult) -> int:
        """Also of a lender that had less than was thought the credit is corrected."""
        num_wanted = len(loan.block_hashes) * loan.source.announcement.layout.block_size
        loan.source.rates.observe_hit(num_wanted, result.num_tokens)
        return result.num_tokens
