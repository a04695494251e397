"""Network: calls and streams between processes that a seed delays, breaks, repeats and cuts off.

As gRPC has it: a reply that does not come is WorkerLost, a caller that goes away cancels the handler, a
connection that is silent for KEEPALIVE_S breaks. Everything is a task of one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from core.errors import ServingError, WorkerLost
from tests.simulation.process import Process

T = TypeVar("T")
Handler = Callable[[], Coroutine[Any, Any, T]]

KEEPALIVE_S = 3.0


@dataclass(frozen=True, slots=True)
class Weather:
    """How likely each message or call meets what; delays in seconds."""

    slow: float = 0.0  # a message takes up to `slow_s` instead of `fast_s`
    broken: float = 0.0  # the connection breaks under a call or before an item of a stream
    repeated: float = 0.0  # an idempotent call arrives once more, later
    corrupt: float = 0.0  # a byte of a KV frame is another
    fast_s: float = 0.002
    slow_s: float = 1.0


class Network:
    """`cut` and `heal` by the names of two processes."""

    def __init__(self, chance: random.Random, weather: Weather) -> None:
        self.chance = chance
        self.weather = weather
        self._cuts: set[frozenset[str]] = set()
        self._changed = asyncio.Event()
        self._late: set[asyncio.Task[None]] = set()

    def cut(self, a: Process, b: Process) -> None:
        self._cuts.add(frozenset((a.name, b.name)))

    def heal(self, a: Process, b: Process) -> None:
        self._cuts.discard(frozenset((a.name, b.name)))
        self.notice()

    def calm(self) -> None:
        """From now on everything arrives soon, once and whole."""
        self.weather = Weather()
        self._cuts.clear()
        self.notice()

    def notice(self) -> None:
        """A process or a cut has changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def happens(self, probability: float) -> bool:
        return self.chance.random() < probability

    async def carry(self, source: Process, target: Process) -> None:
        """A message's way. Raises WorkerLost when the target is dead or cannot be reached for too long."""
        weather = self.weather
        longest = weather.slow_s if self.happens(weather.slow) else weather.fast_s
        await asyncio.sleep(self.chance.random() * longest)
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + KEEPALIVE_S
        while True:
            if target.is_dead or source.is_dead:
                raise WorkerLost("the process is gone", worker_id=target.name)
            is_cut = frozenset((source.name, target.name)) in self._cuts
            if not is_cut and not target.is_stopped and not source.is_stopped:
                return
            if loop.time() >= give_up_at:
                raise WorkerLost("the connection is silent", worker_id=target.name)
            changed = self._changed
            try:
                async with asyncio.timeout_at(give_up_at):
                    await changed.wait()
            except TimeoutError:
                continue

    async def call(self, source: Process, target: Process, handler: Handler[T]) -> T:
        """Run `handler` in the target and bring back what it gives or raises."""
        await self.carry(source, target)
        task = target.spawn(_contained(handler()))
        try:
            if self.happens(self.weather.broken):
                await asyncio.sleep(self.chance.random() * 0.05)
                raise WorkerLost("the connection broke", worker_id=target.name)
            outcome = await self._until_lost(source, target, task)
        finally:
            if not task.done():
                self.later(task.cancel)
        await self.carry(target, source)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    async def idempotent(self, source: Process, target: Process, handler: Handler[T]) -> T:
        """`call`, which may arrive a second time when everybody has forgotten it."""
        if self.happens(self.weather.repeated):
            self._repeat(source, target, handler)
        return await self.call(source, target, handler)

    async def stream(
        self, source: Process, target: Process, open_stream: Callable[[], AsyncIterator[T]]
    ) -> AsyncGenerator[T, None]:
        """The target's items in order. Closing it closes the target's end, a little later."""
        await self.carry(source, target)
        items: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        pump = target.spawn(_pump(open_stream, items))
        try:
            while True:
                kind, item = await self._next(source, target, items)
                await self.carry(target, source)
                if self.happens(self.weather.broken):
                    raise WorkerLost("the connection broke", worker_id=target.name)
                if kind == "end":
                    return
                if kind == "error":
                    raise item
                yield item
        finally:
            if not pump.done():
                self.later(pump.cancel)

    def later(self, act: Callable[[], object]) -> None:
        """As long as a message takes."""
        asyncio.get_running_loop().call_later(self.chance.random() * self.weather.fast_s, act)

    def _repeat(self, source: Process, target: Process, handler: Handler[T]) -> None:
        async def again() -> None:
            await asyncio.sleep(self.chance.random() * self.chance.choice((0.01, 1.0, 8.0)))
            try:
                await self.carry(source, target)
            except WorkerLost:
                return
            target.spawn(_contained(handler()))

        task = asyncio.create_task(again())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _next(
        self, source: Process, target: Process, items: asyncio.Queue[tuple[str, Any]]
    ) -> tuple[str, Any]:
        getting = asyncio.create_task(items.get())
        try:
            return await self._until_lost(source, target, getting)
        finally:
            getting.cancel()

    async def _until_lost(self, source: Process, target: Process, work: asyncio.Task[T]) -> T:
        """What a task of the target gives; WorkerLost once it is dead, or silent for KEEPALIVE_S."""
        dying = asyncio.create_task(target.died.wait())
        try:
            while True:
                await asyncio.wait({work, dying}, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if target.is_dead:
                    await asyncio.sleep(self.chance.random() * 0.2)
                    raise WorkerLost("the process died", worker_id=target.name)
                if work.cancelled():
                    raise WorkerLost("the handler was cancelled", worker_id=target.name)
                if work.done():
                    return work.result()
                if target.is_stopped or source.is_stopped or self._is_cut(source, target):
                    raise WorkerLost("the connection is silent", worker_id=target.name)
        finally:
            dying.cancel()

    def _is_cut(self, a: Process, b: Process) -> bool:
        return frozenset((a.name, b.name)) in self._cuts


async def _contained(work: Coroutine[Any, Any, T]) -> T | Exception:
    """A handler's error is its answer."""
    try:
        return await work
    except ServingError as error:
        return error


async def _pump(open_stream: Callable[[], AsyncIterator[Any]], items: asyncio.Queue[tuple[str, Any]]) -> None:
    try:
        stream = open_stream()
        try:
            async for item in stream:
                items.put_nowait(("item", item))
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
    except ServingError as error:
        items.put_nowait(("error", error))
    else:
        items.put_nowait(("end", None))
