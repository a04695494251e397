"""Warmer: makes pairs ready before the first request asks for them.

Owns which workers are met in the background, how many, and how often it is tried again. A pair that is ready
keeps its connection and its staging memory for as long as the other worker is a member. Lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterable

from core.errors import HandoffError, LayoutMismatch, ServingError
from core.ids import WorkerRef
from core.kv_layout import KVLayout
from kv_transfer.config import BridgeConfig
from kv_transfer.pair_book import PairBook
from kv_transfer.peers import Peers
from kv_transfer.reblocking import reblocked
from kv_transfer.transport import Pair, Transport

_log = logging.getLogger(__name__)

_MAX_AT_ONCE = 4
_AGAIN_MIN_S, _AGAIN_MAX_S = 0.5, 15.0


class Warmer:
    """`expect` says who the members are; at most `config.max_warm_pairs` of them are met."""

    def __init__(
        self, peers: Peers, own_ref: WorkerRef, layout: KVLayout, config: BridgeConfig, book: PairBook
    ) -> None:
        self._peers = peers
        self._ref = own_ref
        self._layout = layout
        self._config = config
        self._book = book
        self._tasks: dict[WorkerRef, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(_MAX_AT_ONCE)
        self._is_closed = False

    def expect(self, members: Iterable[WorkerRef]) -> None:
        """These are all there are at present; those that are gone are left. Does not wait."""
        if self._is_closed:
            return
        known = set(members)
        wanted = set(sorted(known, key=self._order)[: self._config.max_warm_pairs])
        for ref in set(self._tasks) - wanted:
            self._tasks.pop(ref).cancel()
            if ref not in known:
                self._book.forget(ref)
        for ref in wanted - set(self._tasks):
            self._tasks[ref] = asyncio.create_task(self._keep(ref), name=f"meet {ref.worker_id}")

    async def close(self) -> None:
        self._is_closed = True
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _order(self, ref: WorkerRef) -> bytes:
        """Another one for each worker, so that many of them do not all meet the same few."""
        name = f"{self._ref.worker_id} {ref.worker_id} {ref.epoch}"
        return hashlib.blake2b(name.encode(), digest_size=8).digest()

    async def _keep(self, ref: WorkerRef) -> None:
        """Meet it, again while that fails, and keep what was made ready until cancelled."""
        again_s = _AGAIN_MIN_S
        while True:
            try:
                async with self._peers.use(ref) as transport:
                    async with self._turns, asyncio.timeout(self._config.silence_s):
                        await self._meet(ref, transport)
                    self._book.warm(ref, transport.carriage.way)
                    try:
                        await asyncio.get_running_loop().create_future()
                    finally:
                        self._book.cool(ref)
            except LayoutMismatch as error:
                _log.warning("no KV can be handed to %s: %s", ref.worker_id, error.message)
                self._book.fail(ref, error.message)
                return
            except (ServingError, TimeoutError) as error:
                _log.info("worker %s was not met: %r", ref.worker_id, error)
                if isinstance(error, HandoffError):
                    self._book.fail(ref, error.message)
            except Exception:  # noqa: BLE001 - logged; the pair is tried again
                _log.exception("worker %s could not be met", ref.worker_id)
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _AGAIN_MAX_S)

    async def _meet(self, ref: WorkerRef, transport: Transport) -> None:
        """In blocks of the other's size, if it has another one that they can be handed over in."""
        try:
            await transport.meet(Pair(self._ref, ref, self._layout))
        except LayoutMismatch as error:
            block_size = error.details.get("block_size")
            wanted = reblocked(self._layout, block_size) if isinstance(block_size, int) else None
            if wanted is None:
                raise
            await transport.meet(Pair(self._ref, ref, wanted))
            self._peers.learn_layout(ref, wanted)
