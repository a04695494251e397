"""Admission: may this call enter, how long may it take, and how long may its answers get.

Owns the deadline, the context check with its true numbers, the seeds, and the bounded line of requests.
Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from core.clock import Clock, Deadline
from core.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, Overloaded
from core.ids import RequestId, Role, new_request_id
from core.request import Request
from router.api_call import ApiCall, Prompt
from router.config import RouterConfig
from router.metrics import RouterMetrics
from router.served_model import ServedModel
from router.tenants import Tenant
from router.worker_table import WorkerTable

_UNLIMITED_CONTEXT = 2**31 - 1
_DECIMAL = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Admission:
    """One per router."""

    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        table: WorkerTable,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._model = model
        self._table = table
        self._metrics = metrics
        self._clock = clock
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._num_waiting = 0
        self._num_running = 0

    def deadline(self, timeout_header: str | None) -> Deadline:
        """From X-Request-Timeout (seconds), or the default. Raises InvalidRequest."""
        if timeout_header is None:
            return Deadline.after(self._config.default_timeout_s, self._clock)
        seconds = float(timeout_header) if _DECIMAL.fullmatch(timeout_header.strip()) else math.nan
        if not 0 < seconds <= self._config.max_timeout_s:
            raise InvalidRequest(
                f"X-Request-Timeout must be seconds, above 0 and up to {self._config.max_timeout_s:g}",
                param="X-Request-Timeout",
            )
        return Deadline.after(seconds, self._clock)

    def max_context(self) -> int:
        """Tokens of prompt and answer that one sample may have at most. While workers are being replaced,
        those of their kind that were here last stand for them.

        The smallest of what the operator, the model and the workers allow; a sample must also fit one
        decode worker's pool.
        """
        announced = self._table.announcements()
        contexts = [item.max_context for item in announced]
        pools = [
            item.num_blocks * item.layout.block_size for item in announced if item.ref.role is Role.DECODE
        ]
        limits = [min(contexts) if contexts else self._model.max_context, self._config.max_context]
        limits.append(max(pools) if pools else None)
        return min((limit for limit in limits if limit is not None), default=_UNLIMITED_CONTEXT)

    def requests(self, call: ApiCall, call_id: str, tenant: Tenant) -> list[Request]:
        """One request for each prompt. Raises ContextTooLong, InvalidRequest or Overloaded."""
        free = self._config.max_concurrency + self._config.max_queue - self._num_running - self._num_waiting
        if len(call.prompts) > free:
            raise Overloaded("too many requests are waiting", retry_after_s=1)
        max_context = self.max_context()
        requests = []
        for index, prompt in enumerate(call.prompts):
            seed = call.seed if call.seed is not None else secrets.randbits(31)
            sampling = replace(call.sampling, max_tokens=_max_tokens(call, prompt, max_context), seed=seed)
            if sampling.min_tokens > sampling.max_tokens:
                raise InvalidRequest(
                    f"min_tokens: {sampling.min_tokens} exceeds the answer's {sampling.max_tokens} tokens",
                    param="min_tokens",
                )
            requests.append(
                Request(
                    request_id=RequestId(f"{call_id}-{index}"),
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    model=self._model.name,
                    num_samples=call.n,
                    cache_salt=tenant.cache_salt,
                    is_prefix_cache_read=sampling.prompt_logprobs is None,
                )
            )
        return requests

    @asynccontextmanager
    async def place(self, deadline: Deadline) -> AsyncIterator[None]:
        """A place among the requests that run, in order of arrival. Raises DeadlineExceeded."""
        self._num_waiting += 1
        self._observe()
        try:
            async with asyncio.timeout(deadline.left_s(self._clock)):
                await self._places.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the request waited for its turn") from None
        finally:
            self._num_waiting -= 1
            self._observe()
        self._num_running += 1
        self._observe()
        try:
            yield
        finally:
            self._num_running -= 1
            self._places.release()
            self._observe()

    def _observe(self) -> None:
        self._metrics.waiting(self._num_waiting, self._num_running)


def call_id_for(endpoint: str) -> str:
    """A fresh id for a call, as OpenAI prefixes it."""
    return new_request_id("chatcmpl" if endpoint == "chat" else "cmpl")


def echoed_request_id(header: str | None, call_id: str) -> str:
    """The client's X-Request-Id if it is a plain short name, else ours."""
    return header if header is not None and _CLIENT_REQUEST_ID.fullmatch(header) else call_id


def _max_tokens(call: ApiCall, prompt: Prompt, max_context: int) -> int:
    num_prompt = len(prompt.token_ids)
    room = max_context - num_prompt
    wanted = call.max_tokens
    if wanted is None:
        if room < 1:
            raise ContextTooLong(
                f"the maximum context length is {max_context} tokens, "
                f"the prompt alone has {num_prompt} and leaves no room for an answer",
                param=call.param,
                max_context=max_context,
                num_prompt_tokens=num_prompt,
            )
        return room if call.default_max_tokens is None else min(room, call.default_max_tokens)
    if wanted > room:
        raise ContextTooLong(
            f"the maximum context length is {max_context} tokens, the request comes to {num_prompt + wanted} "
            f"({num_prompt} in the prompt, {wanted} for the answer)",
            param=call.param if room < 1 else "max_tokens",
            max_context=max_context,
            num_prompt_tokens=num_prompt,
        )
    return wanted
