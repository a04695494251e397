"""EngineMetrics: what any worker counts about its engine, whatever its role.

Owns the Prometheus series of sequences, KV blocks, tokens and steps, and the running averages that a
WorkerStatus carries. It does not own the bridge's series (`kv_transfer.metrics`) nor a role's tickets.
Written on the step thread, `observe_generated` on any; scraped from any thread. Labels are `role` and the
configured `model`, never a value that a client can invent.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from core import telemetry
from core.ids import Role
from core.worker_status import WorkerStatus
from engine.model.weights import WeightBytes
from engine.sequence import Sequence

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BLOCK_STATES = ("free", "cached", "held", "quarantined")
_DECAY = 0.9

FINISH_REASONS = ("stop", "length", "cancelled", "error", "handed_over")


class EngineMetrics:
    """One worker's engine series, registered in `registry`.

    Gauges are set from a whole WorkerStatus at once, so none of them can be left behind by a path that forgot
    to count down.
    """

    def __init__(self, registry: CollectorRegistry, role: Role, model: str = "") -> None:
        names, values = ("role", "model"), (role.value, model)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, names, registry=registry).labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, names, registry=registry).labels(*values)

        self._running = gauge(telemetry.NUM_RUNNING, "Sequences that hold KV blocks and are being computed")
        self._waiting = gauge(telemetry.NUM_WAITING, "Sequences that wait to be started")
        self._waiting_tokens = gauge(
            telemetry.NUM_WAITING_TOKENS, "Uncached prompt tokens of waiting sequences"
        )
        self._utilization = gauge(
            telemetry.KV_UTILIZATION, "Share of the KV pool held or in quarantine, 0 to 1"
        )
        self._leak = gauge(
            telemetry.KV_LEAK_DIFFERENCE,
            "Block holders counted by the allocator minus those known; must be 0",
        )
        blocks = Gauge(telemetry.KV_BLOCKS, "KV blocks by state", (*names, "state"), registry=registry)
        self._blocks = {state: blocks.labels(*values, state) for state in _BLOCK_STATES}
        self._prefix_query = counter(
            telemetry.PREFIX_QUERY_TOKENS, "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hit = counter(telemetry.PREFIX_HIT_TOKENS, "Prompt tokens found in the prefix cache")
        self._preemptions = counter(telemetry.PREEMPTIONS, "Sequences whose blocks were taken back")
        self._prompt_tokens = counter(
            telemetry.PROMPT_TOKENS, "Prompt tokens of sequences started here, cached or not"
        )
        self._generated = counter(telemetry.GENERATED_TOKENS, "Tokens sampled here, without recomputed ones")
        self._steps = Histogram(
            telemetry.STEP_SECONDS,
            "Duration of one engine step",
            names,
            registry=registry,
            buckets=_STEP_BUCKETS,
        ).labels(*values)
        finished = Counter(
            telemetry.SEQUENCES_FINISHED,
            "Sequences that ended here, by reason",
            (*names, "reason"),
            registry=registry,
        )
        self._finished = {reason: finished.labels(*values, reason) for reason in FINISH_REASONS}
        slots = Counter(
            telemetry.KV_SLOT_TOKENS,
            "Token-seconds: slots of blocks held by sequences, and the computed tokens in them. "
            "1 - computed / held is the waste",
            (*names, "kind"),
            registry=registry,
        )
        weights = Gauge(
            telemetry.WEIGHT_BYTES,
            "Memory of the weights: this worker's own, mapped together with workers of its host, on its GPU",
            (*names, "kind"),
            registry=registry,
        )
        self._weights = {kind: weights.labels(*values, kind) for kind in ("private", "shared", "device")}
        self._slots_held = slots.labels(*values, "held")
        self._slots_computed = slots.labels(*values, "computed")
        self._slots_since: float | None = None
        self._num_slots = 0
        self._num_computed = 0
        self._step_tokens = 0.0
        self._step_seconds = 0.0
        self._step_count = 0.0
        self._prefill_seconds = 0.0

    def observe_status(self, status: WorkerStatus) -> None:
        """Set all load gauges. Called after each step and at each tick: they fall without new traffic."""
        self._running.set(status.num_running)
        self._waiting.set(status.num_waiting)
        self._waiting_tokens.set(status.num_waiting_tokens)
        self._utilization.set(status.kv_utilization)
        self._blocks["free"].set(status.num_free_blocks)
        self._blocks["cached"].set(status.num_cached_blocks)
        self._blocks["held"].set(status.num_held_blocks)
        self._blocks["quarantined"].set(status.num_quarantined_blocks)

    def observe_weights(self, weights: WeightBytes) -> None:
        """What the loaded model's weights take. Once, at start."""
        self._weights["private"].set(weights.private)
        self._weights["shared"].set(weights.shared)
        self._weights["device"].set(weights.device)

    def rest(self) -> None:
        """The worker has left this role: nothing of its load is here until it comes back. Counters stay."""
        for load in (
            self._running,
            self._waiting,
            self._waiting_tokens,
            self._utilization,
            *self._blocks.values(),
            *self._weights.values(),
        ):
            load.set(0)
        self._slots_since = None

    def observe_leak(self, difference: int) -> None:
        """The allocator's `leak_difference` over all tables; anything but 0 is a bug."""
        self._leak.set(difference)

    def observe_start(self, sequence: Sequence) -> None:
        """A sequence starts by reading its prompt. A restart after a preemption does not count again."""
        if sequence.num_preemptions:
            return
        self._prompt_tokens.inc(sequence.num_prompt_tokens)
        # prompt logprobs need each position computed, so the cache is not asked
        if sequence.request.is_prefix_cache_read and sequence.request.sampling.prompt_logprobs is None:
            self._prefix_query.inc(sequence.num_prompt_tokens)
            self._prefix_hit.inc(min(sequence.num_cached_tokens, sequence.num_prompt_tokens))

    def observe_generated(self, num_tokens: int) -> None:
        """Tokens sampled for a client; tokens that are recomputed or teacher-forced do not count."""
        self._generated.inc(num_tokens)

    def observe_preemption(self) -> None:
        self._preemptions.inc()

    def observe_finish(self, reason: str) -> None:
        """A sequence ended here; `reason` is one of FINISH_REASONS."""
        self._finished[reason].inc()

    def observe_step(self, seconds: float, num_prefill_tokens: int) -> None:
        """A step took `seconds` and computed `num_prefill_tokens` tokens of prompts, 0 if it only decoded."""
        self.observe_duration(seconds)
        self._step_count = self._step_count * _DECAY + 1.0
        self._step_seconds = self._step_seconds * _DECAY + seconds
        if num_prefill_tokens:
            self._step_tokens = self._step_tokens * _DECAY + num_prefill_tokens
            self._prefill_seconds = self._prefill_seconds * _DECAY + seconds

    def observe_duration(self, seconds: float) -> None:
        """One more step in the histogram."""
        self._steps.observe(seconds)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second over the last steps that read prompts; 0 before the first."""
        return self._step_tokens / self._prefill_seconds if self._prefill_seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of the last steps; 0 before the first."""
        return self._step_seconds / self._step_count if self._step_count > 0 else 0.0

    def observe_slots(self, num_held: int, num_computed: int, now: float) -> None:
        """Slots in the blocks that sequences hold from `now` (seconds) on, and the computed tokens in them;
        what was held since the last call is added to the integrals.

        A block shared by several sequences counts once for each of them, and so do the tokens in it.
        """
        if self._slots_since is not None:
            elapsed = max(0.0, now - self._slots_since)
            self._slots_held.inc(self._num_slots * elapsed)
            self._slots_computed.inc(self._num_computed * elapsed)
        self._slots_since = now
        self._num_slots, self._num_computed = num_held, num_computed
