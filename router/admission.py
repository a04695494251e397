"""Admission: may this call enter, how long may it take, and how long may its answers get.

Owns the deadline, the priority, the context check with its true numbers, the seeds, and how many requests may
run at once (their order is the line's, a tenant's limits are the quotas').
Lives on the event loop.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from zlib import crc32

from core.clock import Clock, Deadline
from core.errors import ContextTooLong, InvalidRequest
from core.ids import RequestId, Role, new_request_id
from core.request import Request
from router.api_call import ApiCall, Prompt
from router.config import RouterConfig
from router.leases import Leases
from router.line import Line
from router.metrics import RouterMetrics
from router.quotas import CallCost
from router.served_model import ServedModel
from router.tenants import Tenant
from router.tenants_config import MAX_PRIORITY, NORMAL_PRIORITY
from router.worker_table import WorkerTable

_UNLIMITED_CONTEXT = 2**31 - 1
_DECIMAL = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)
_PRIORITY = re.compile(rf"[0-{MAX_PRIORITY}]", re.ASCII)
# what an answer of ordinary length costs in the fair order, however long it may get
_EXPECTED_OUTPUT_TOKENS = 256
# one more for each so many places is let run, so that none stays empty while the next prompt is read
_READING_MEANWHILE = 8
# so long may decode be without a worker, as when one steps in, before all that wait are let look for one
_GAP_S = 5.0
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
        leases: Leases,
    ) -> None:
        self._config = config
        self._model = model
        self._table = table
        self._clock = clock
        self._leases = leases
        self._places = 0
        self._places_at = -math.inf
        self._line = Line(
            config.max_queue,
            config.tenants.aging_s,
            clock,
            self._capacity,
            metrics.waiting,
            leases.promises,
        )
        metrics.watch_places(lambda: self._line.num_places)

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

    def priority(self, header: str | None, tenant: Tenant) -> int:
        """From X-Priority, 0 to 9, higher goes first, lowered to what the tenant may have. Raises
        InvalidRequest.
        """
        text = str(NORMAL_PRIORITY) if header is None else header.strip()
        if not _PRIORITY.fullmatch(text):
            message = f"X-Priority must be a whole number from 0 to {MAX_PRIORITY}"
            raise InvalidRequest(message, param="X-Priority")
        return min(int(text), tenant.limits.max_priority)

    def requests(self, call: ApiCall, call_id: str, tenant: Tenant, priority: int) -> list[Request]:
        """One request for each prompt. Raises ContextTooLong or InvalidRequest."""
        max_default = _max_default_tokens(call, tenant)
        max_context = self.max_context()
        requests = []
        for index, prompt in enumerate(call.prompts):
            seed = call.seed if call.seed is not None else secrets.randbits(31)
            sampling = replace(
                call.sampling, max_tokens=_max_tokens(call, prompt, max_context, max_default), seed=seed
            )
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
                    priority=priority,
                    is_prefix_cache_read=sampling.prompt_logprobs is None,
                )
            )
        return requests

    def place(
        self, request: Request, tenant: Tenant, deadline: Deadline
    ) -> AbstractAsyncContextManager[None]:
        """A place among those that run. Raises DeadlineExceeded, or Overloaded if it had to give way."""
        return self._line.place(tenant, request.priority, _expected_tokens(request), deadline)

    def check_room(self, requests: Sequence[Request], cost: CallCost, deadline: Deadline) -> None:
        """Raises Overloaded for a call that the line has no room for, or whose turn would come too late."""
        costs = [_expected_tokens(request) for request in requests]
        self._line.check(costs, requests[0].priority, cost.call, deadline)

    def _capacity(self) -> int:
        """How many requests this router lets run at once: its part of what the decode workers have places
        for, and some more. Where there are none, no line is kept: each call hears that by itself.
        """
        # a worker that has just come and has told nothing yet adds its places in a moment
        statuses = [entry.status for entry in self._table.usable(Role.DECODE)]
        places = sum(status.max_num_seqs for status in statuses if status is not None)
        now = self._clock.now()
        if places:
            self._places, self._places_at = places, now
        elif now < self._places_at + _GAP_S:
            places = self._places
        else:
            return self._config.max_concurrency
        places += places // _READING_MEANWHILE
        return min(self._config.max_concurrency, math.ceil(places / max(1, self._leases.num_replicas)))


def _expected_tokens(request: Request) -> int:
    return request.num_prompt_tokens + request.num_samples * min(
        request.sampling.max_tokens, _EXPECTED_OUTPUT_TOKENS
    )


def cost_of(requests: Sequence[Request]) -> CallCost:
    """What a call may take at most."""
    num_prompt = sum(request.num_prompt_tokens for request in requests)
    max_output = sum(request.num_samples * request.sampling.max_tokens for request in requests)
    first = requests[0]
    # the same on each router, which the hash of a text is not; tenants do not come in each other's place
    tenant = crc32(first.cache_salt.encode())
    prompts = tuple(request.prompt_token_ids for request in requests)
    call = hash((tenant, prompts, max_output, first.priority))
    return CallCost(num_prompt, max_output, call)


def call_id_for(endpoint: str) -> str:
    """A fresh id for a call, as OpenAI prefixes it."""
    return new_request_id("chatcmpl" if endpoint == "chat" else "cmpl")


def echoed_request_id(header: str | None, call_id: str) -> str:
    """The client's X-Request-Id if it is a plain short name, else ours."""
    return header if header is not None and _CLIENT_REQUEST_ID.fullmatch(header) else call_id


def _max_default_tokens(call: ApiCall, tenant: Tenant) -> int:
    """A sample's answer that does not say how long it may get: no longer than the tenant's limits allow."""
    limits = tenant.limits
    rooms = [limits.max_output_tokens_per_minute or _UNLIMITED_CONTEXT]
    if limits.max_concurrent_tokens is not None:
        num_prompt = sum(len(prompt.token_ids) for prompt in call.prompts)
        rooms.append(max(0, limits.max_concurrent_tokens - num_prompt))
    return max(1, min(rooms) // (call.n * len(call.prompts)))


def _max_tokens(call: ApiCall, prompt: Prompt, max_context: int, max_default: int) -> int:
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
        return min(room, max_default, call.default_max_tokens or room)
    if wanted > room:
        raise ContextTooLong(
            f"the maximum context length is {max_context} tokens, the request comes to {num_prompt + wanted} "
            f"({num_prompt} in the prompt, {wanted} for the answer)",
            param=call.param if room < 1 else "max_tokens",
            max_context=max_context,
            num_prompt_tokens=num_prompt,
        )
    return wanted
