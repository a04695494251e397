"""DecodeSite: a decode worker in virtual time: the real loop, and where its tokens go.

Owns what `decode_worker.worker` owns of a real one, but streams: a token's moment is noted where it is
made, and the router hears of first tokens and ends only. One thread.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Protocol, cast

from prometheus_client import CollectorRegistry

from cluster.simulator.events import Events, SiteClock
from cluster.simulator.handoff import Port
from cluster.simulator.leap import Leap
from cluster.simulator.quiet_metrics import QuietMetrics
from cluster.simulator.site_runner import SiteRunner
from cluster.simulator.site_steps import SiteSteps
from cluster.simulator.step_price import LinkPrice
from cluster.simulator.teller import Teller
from core.clock import Deadline
from core.errors import ServingError
from core.ids import WorkerRef
from core.jobs import CancelJob, GenerateJob
from decode_worker.config import DecodeConfig
from decode_worker.decode_loop import DecodeLoop
from decode_worker.metrics import TicketMetrics
from decode_worker.step_tokens import StepTokens
from decode_worker.stream import Delivery, Stream
from engine.runner import ModelRunner
from kv_transfer.load_news import LoadNews


class Follower(Protocol):
    """Whoever called Generate. `token_times` gets the moment at which each token has come back."""

    token_times: MutableSequence[float]

    def generated(self, num_cached_tokens: int) -> None:
        """The first tokens of this call have come."""
        ...

    def ended(self, error: ServingError | None) -> None: ...


class SiteStream(Stream):
    """A job's stream: for the loop a name, here the way back to who follows it."""

    def __init__(self, job: GenerateJob, follower: Follower) -> None:
        super().__init__(job)
        self.follower = follower
        self.is_heard = False


class DecodeSite:
    """One decode worker. `is_leaping`: steps that only repeat the last one are taken at once."""

    def __init__(
        self,
        ref: WorkerRef,
        runner: SiteRunner,
        clock: SiteClock,
        config: DecodeConfig,
        events: Events,
        teller: Teller,
        link: LinkPrice,
        is_leaping: bool = True,
    ) -> None:
        self.ref = ref
        self.runner = runner
        self.clock = clock
        self.teller = teller
        self.inward = Port()
        metrics = QuietMetrics(CollectorRegistry(), ref.role)
        self.loop = DecodeLoop(
            cast(ModelRunner, runner),
            config,
            ref,
            clock,
            self._deliver,
            metrics,
            TicketMetrics(CollectorRegistry()),
        )
        self._leap = Leap(self.loop, runner, metrics)
        self._is_leaping = is_leaping
        self._followers: list[Follower] = []  # of the streams of the last step
        self.steps = SiteSteps(events, clock, self, is_waiting=runner.is_shared)
        self._events = events
        self._link = link
        self._load_news = LoadNews(config.status_period_s)
        runner.listen(teller.note)

    # ------------------------------------------------------------ calls, at the moment they come

    def generate(self, job: GenerateJob, follower: Follower) -> None:
        """A call comes in."""
        now = self._events.now()
        num_tokens = job.request.num_prompt_tokens if job.ticket_id is None else 0
        self.teller.arrived(num_tokens, len(job.samples), self.runner.layout.num_blocks(num_tokens))
        deadline = Deadline(now + job.time_left_s)
        self.steps.post(now, self._begin, job, SiteStream(job, follower), deadline)

    def cancel(self, job: CancelJob) -> None:
        """The caller gave up."""
        self.steps.post(self._events.now(), self.loop.cancel, job)

    def drain(self) -> None:
        """Take no new work from now on, and tell."""
        self.steps.post(self._events.now(), self._drain)

    # ------------------------------------------------------------ the step thread

    def step(self) -> bool:
        return self.loop.step()

    def tick(self) -> None:
        self.loop.tick()
        if self._load_news.is_due(self.clock.at, *self.loop.num_seqs):
            self._publish()

    def tell_load(self) -> None:
        if self._load_news.has_news(*self.loop.num_seqs):
            self._publish()

    def turned(self) -> None:
        self.teller.tell(self.clock.at)
        self.tell_load()

    def following(self, limit_at: float) -> list[float]:
        return self._leap.ends(self.clock.at, limit_at) if self._is_leaping else []

    def repeat(self, num_steps: int) -> None:
        """Each stream gets a token at the end of each of them."""
        times = [end + self._link.latency_s for end in self._leap.take(num_steps)]
        for follower in self._followers:
            follower.token_times.extend(times)

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def _publish(self) -> None:
        self._load_news.told(self.clock.at, *self.loop.num_seqs)
        self.teller.publish(self.clock.at, self.loop.status())

    def _begin(self, job: GenerateJob, stream: SiteStream, deadline: Deadline) -> None:
        self._load_news.arrived()
        self.loop.begin(job, stream, deadline)

    def _drain(self) -> None:
        self.loop.is_draining = True
        self._publish()

    def _deliver(self, deliveries: Sequence[Delivery], tokens: Sequence[StepTokens]) -> None:
        """What a step brought, at the moment it ended; it is on its way back for `latency_s`."""
        when = self.clock.at + self._link.latency_s
        for step in tokens:
            self._followers.clear()
            for stream, num_cached in zip(step.streams, step.num_cached_tokens, strict=True):
                assert isinstance(stream, SiteStream)
                stream.follower.token_times.append(when)
                self._followers.append(stream.follower)
                if not stream.is_heard:
                    self._hear(stream, when, num_cached)
        for delivery in deliveries:
            stream = delivery.stream
            assert isinstance(stream, SiteStream)
            for event in delivery.events:
                stream.follower.token_times.extend([when] * len(event.delta.token_ids))
                if event.delta.token_ids and not stream.is_heard:
                    self._hear(stream, when, event.delta.num_cached_tokens)
            if delivery.is_end or delivery.error is not None:
                self._events.at(when, stream.follower.ended, delivery.error)

    def _hear(self, stream: SiteStream, when: float, num_cached_tokens: int) -> None:
        stream.is_heard = True
        self._events.at(when, stream.follower.generated, num_cached_tokens)
