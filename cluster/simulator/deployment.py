"""Deployment: what is simulated: how many workers of which kind, at what prices. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.simulator.front import FrontPrice
from cluster.simulator.jitter import Jitter
from cluster.simulator.sharing import Sharing
from cluster.simulator.step_price import LinkPrice, StepPrice
from cluster.simulator.teller import Way
from core.kv_layout import KVLayout
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class Deployment:
    """`num_prefill` 0 is aggregated serving: each worker reads and decodes. `num_blocks` and `price` are of
    each worker; `timeout_s` the deadline of a request. `is_leaping`: decode steps that only
    repeat the last one are taken at once; the events are the same. `sharing`: all workers are on one host and
    share its cores; None: each has its own. `front`: what the router takes. `jitter`: how
    much steps differ from their price. `is_length_known`: clients say
    how long the answer will be.
    """

    layout: KVLayout
    num_blocks: int
    price: StepPrice
    link: LinkPrice
    num_prefill: int
    num_decode: int
    max_context: int = 131_072
    timeout_s: float = 600.0
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    router: RouterConfig = field(default_factory=lambda: RouterConfig(pull_timeout_s=0.0))
    way: Way = field(default_factory=Way)
    is_leaping: bool = True
    sharing: Sharing | None = None
    front: FrontPrice = field(default_factory=FrontPrice)
    jitter: Jitter = field(default_factory=Jitter)
    is_length_known: bool = False

    def __post_init__(self) -> None:
        if self.router.pull_timeout_s:
            raise ValueError("router.pull_timeout_s must be 0: pulling KV back is not simulated")
        if self.num_prefill < 0:
            raise ValueError("num_prefill must not be negative")
        for name in ("num_decode", "num_blocks", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if not self.timeout_s > 0.0:
            raise ValueError("timeout_s must be above 0")
