"""RouterConfig: the section `router` of the configuration. Owns its defaults and their limits; values
only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from router.capture_config import CaptureConfig
from router.tenants_config import TenantsConfig
from router.tracing_config import TracingConfig


class PlanSetting(StrEnum):
    """Who reads prompts: the cheapest (`auto`), always a prefill worker if there is one (`remote`), always
    decode (`local`).
    """

    AUTO = "auto"
    REMOTE = "remote"
    LOCAL = "local"


class PolicySetting(StrEnum):
    """How workers are chosen: by cost in milliseconds, or, for comparison, by simpler rules."""

    COST = "cost"
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AFFINITY = "prefix_affinity"


class DefaultsSetting(StrEnum):
    """Sampling defaults of a request that leaves them out: the checkpoint's generation_config, or
    OpenAI's.
    """

    MODEL = "model"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of section `router`.

    `model_name`: the served name (None: the model folder's). `max_context`: a lower limit than the model's
    and the workers' (None: none). `default_timeout_s` is the deadline of a request without
    `X-Request-Timeout`, `max_timeout_s` the longest a client may ask for. `head_hold_s`: how long a
    streaming response waits for its first token before its status line is sent; an error before that has an
    HTTP status of its own.

    `explain`: answers say where they went and where their time went, in headers and in `usage`.

    `max_concurrency` requests (prompts count singly) run at once, `max_queue` more wait; beyond that 429.
    `worker_wait_s`: how long a new request waits for a worker when there is none, then 503. A request that
    has already been placed waits for a replacement until `give_up_before_s` before its deadline.
    `max_failures`: worker failures (not refusals) that one request survives.

    `suspect_after_s`: a worker that reports nothing for so long gets no new work. It reports between its
    steps, so this must exceed the longest step; a stopped process is noticed sooner, by its connection.

    `pull_timeout_s`: how long a decode worker may take to send cached blocks to a prefill worker before the
    prompt is read there without them; 0: it is never asked.

    Placement: `tie_ms` within which costs count as equal. A request is held back for at most `max_hold_s`
    while a worker that will have room soon is cheaper than all that have some. `ttft_target_s`: within which
    first tokens should come (None: no target). Then workers are preferred on which that is expected, and a
    prompt that takes longer to read, or has waited too long for it, waits in the router until little is ahead
    of it, so that others are in time: at most six times what its reading takes, and half of its time to the
    deadline. What is `assumed` counts until it is measured: `core_sharing` is how much longer a step takes
    beside another worker on the same cores, `output_tokens` the length of an answer, `handoff_ms` what a
    handoff adds beside its bytes, `bytes_per_s` how fast they travel within a node, `node_bytes_per_s`
    between nodes of a zone, `zone_bytes_per_s` between zones, where `zone_ms` more are lost.
    """

    model_name: str | None = None
    max_context: int | None = None
    sampling_defaults: DefaultsSetting = DefaultsSetting.MODEL
    plan: PlanSetting = PlanSetting.AUTO
    policy: PolicySetting = PolicySetting.COST
    explain: bool = True

    max_body_bytes: int = 4 * 1024 * 1024
    max_n: int = 16
    max_prompts: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024

    default_timeout_s: float = 300.0
    max_timeout_s: float = 3600.0
    head_hold_s: float = 15.0
    max_concurrency: int = 512
    max_queue: int = 1024

    worker_wait_s: float = 30.0
    give_up_before_s: float = 5.0
    max_failures: int = 6
    refusal_backoff_s: float = 0.05
    max_backoff_s: float = 1.0

    membership_poll_s: float = 0.5
    membership_timeout_s: float = 2.0
    suspect_after_s: float = 8.0
    reconnect_s: float = 0.5
    metrics_timeout_s: float = 0.5

    pull_timeout_s: float = 2.0
    tie_ms: float = 1.0
    max_hold_s: float = 2.0
    ttft_target_s: float | None = None
    assumed_prefill_tokens_per_s: float = 500.0
    assumed_step_s: float = 0.05
    assumed_step_tokens: int = 512
    assumed_core_sharing: float = 1.7
    assumed_output_tokens: int = 128
    assumed_handoff_ms: float = 5.0
    assumed_bytes_per_s: float = 1e9
    assumed_node_bytes_per_s: float = 5e8
    assumed_zone_bytes_per_s: float = 1e8
    assumed_zone_ms: float = 2.0

    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_n",
            "max_prompts",
            "max_concurrency",
            "max_failures",
            "assumed_step_tokens",
            "assumed_output_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in (
            "max_queue",
            "max_logprobs",
            "max_stop_strings",
            "max_stop_chars",
            "max_stop_token_ids",
            "max_logit_bias",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        for name in (
            "default_timeout_s",
            "max_timeout_s",
            "refusal_backoff_s",
            "max_backoff_s",
            "membership_poll_s",
            "membership_timeout_s",
            "suspect_after_s",
            "reconnect_s",
            "metrics_timeout_s",
            "assumed_core_sharing",
            "assumed_prefill_tokens_per_s",
            "assumed_step_s",
            "assumed_bytes_per_s",
            "assumed_node_bytes_per_s",
            "assumed_zone_bytes_per_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in (
            "head_hold_s",
            "worker_wait_s",
            "give_up_before_s",
            "pull_timeout_s",
            "tie_ms",
            "max_hold_s",
            "assumed_handoff_ms",
            "assumed_zone_ms",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if self.ttft_target_s is not None and not self.ttft_target_s > 0:
            raise ValueError("ttft_target_s must be above 0")
        if self.max_context is not None and self.max_context < 1:
            raise ValueError("max_context must be at least 1")
        if self.default_timeout_s > self.max_timeout_s:
            raise ValueError("default_timeout_s must not exceed max_timeout_s")
