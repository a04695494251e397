"""PrefillSite: a prefill worker in virtual time: the real loop, its calls and its tickets.

Owns what `prefill_worker.worker` and `prefill_worker.call` own of a real one: a call's reply goes out when
its tokens are sampled and decode has granted room. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry

from cluster.simulator.events import Events, SiteClock
from cluster.simulator.handoff import Handoff, Port, Receiving
from cluster.simulator.quiet_metrics import QuietMetrics
from cluster.simulator.site_runner import VOCAB_SIZE, SiteRunner
from cluster.simulator.site_steps import SiteSteps
from cluster.simulator.step_price import LinkPrice
from cluster.simulator.teller import Teller
from core.errors import ServingError, WorkerDraining
from core.handoff import HandoffTicket, TicketState
from core.ids import TicketId, WorkerId, WorkerRef
from core.jobs import PrefillJob, PrefillResult
from engine.runner import ModelRunner
from kv_transfer.load_news import LoadNews
from prefill_worker.config import PrefillConfig
from prefill_worker.loop import PrefillLoop
from prefill_worker.metrics import TicketMetrics
from prefill_worker.prompt import Prompt, new_prompt

Answer = Callable[[PrefillResult | ServingError], None]


@dataclass(eq=False, slots=True)
class _Call:
    """A prompt, whoever waits for its first token, and its handoff."""

    site: PrefillSite
    prompt: Prompt
    answer: Answer
    handoff: Handoff | None = None
    result: PrefillResult | None = None
    is_granted: bool = False
    is_answered: bool = False
    is_closed: bool = False

    def reply(self, outcome: PrefillResult | ServingError) -> None:
        if not self.is_answered:
            self.is_answered = True
            self.site.send(self.answer, outcome)

    def reply_if_granted(self) -> None:
        if self.is_granted and self.result is not None:
            self.reply(self.result)

    # what the handoff tells

    def granted(self) -> None:
        self.is_granted = True
        self.site.post(self.site.loop.granted, self.prompt.job.ticket_id)
        self.reply_if_granted()

    def refused(self, error: ServingError) -> None:
        self.reply(error)

    def closed(self, state: TicketState) -> None:
        self.site.post(self.site.loop.closed, self.prompt.job.ticket_id, state)
        self.site.forget(self)


class PrefillSite:
    """`targets`: the decode workers by name."""

    def __init__(
        self,
        ref: WorkerRef,
        runner: SiteRunner,
        clock: SiteClock,
        config: PrefillConfig,
        events: Events,
        teller: Teller,
        link: LinkPrice,
        targets: Mapping[WorkerId, Receiving],
    ) -> None:
        self.ref = ref
        self.runner = runner
        self.clock = clock
        self.teller = teller
        self.outward = Port()
        registry = CollectorRegistry()
        self.loop = PrefillLoop(
            cast(ModelRunner, runner),
            config,
            ref,
            clock,
            self,
            QuietMetrics(registry, ref.role),
            TicketMetrics(registry),
        )
        self.steps = SiteSteps(events, clock, self, is_waiting=runner.is_shared)
        self._events = events
        self._link = link
        self._targets = targets
        self._calls: dict[Prompt, _Call] = {}
        self._by_ticket: dict[TicketId, _Call] = {}
        self._load_news = LoadNews(config.status_period_s)
        runner.listen(teller.note)

    # ------------------------------------------------------------ calls, at the moment they come

    def prefill(self, job: PrefillJob, answer: Answer) -> None:
        """A call comes in; `answer` hears of its outcome when the reply has got back."""
        if self.loop.is_draining:
            self.send(answer, WorkerDraining("this worker takes no new work", worker_id=self.ref.worker_id))
            return
        try:
            prompt = new_prompt(job, self.runner.max_context, VOCAB_SIZE, self._events.now())
        except ServingError as error:
            self.send(answer, error)
            return
        call = self._calls[prompt] = self._by_ticket[job.ticket_id] = _Call(self, prompt, answer)
        num_tokens = job.request.num_prompt_tokens
        self.teller.arrived(num_tokens, len(job.samples), self.runner.layout.num_blocks(num_tokens))
        self.post(self._admit, call)

    def cancel(self, ticket_id: TicketId, error: ServingError) -> None:
        """The caller gave up."""
        call = self._by_ticket.get(ticket_id)
        if call is not None:
            call.is_answered = True
            if call.handoff is not None:
                call.handoff.stop(error.code)
            self.post(self.loop.cancel, call.prompt, error)

    def drain(self) -> None:
        """Take no new work from now on, and tell."""
        self.loop.is_draining = True
        self.post(self._publish)

    def post(self, command: Callable[..., object], *arguments: object) -> None:
        """Something for the step thread, now."""
        self.steps.post(self._events.now(), command, *arguments)

    def send(self, answer: Answer, outcome: PrefillResult | ServingError) -> None:
        """A reply goes out."""
        self._events.after(self._link.latency_s, answer, outcome)

    def forget(self, call: _Call) -> None:
        """The call has ended, and so has its ticket."""
        call.is_closed = True
        call.handoff = None  # which knows the call: both would stay until a search for such circles
        self._calls.pop(call.prompt, None)
        self._by_ticket.pop(call.prompt.job.ticket_id, None)

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
        """Each step of a prompt is another one."""
        return []

    def repeat(self, num_steps: int) -> None:
        assert num_steps == 0

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def _publish(self) -> None:
        self._load_news.told(self.clock.at, *self.loop.num_seqs)
        self.teller.publish(self.clock.at, self.loop.status())

    def _admit(self, call: _Call) -> None:
        self._load_news.arrived()
        try:
            self.loop.admit(call.prompt)
        except ServingError as error:
            self._later(self._lost, call, error)

    # ------------------------------------------------------------ what the loop tells, by the worker's clock

    def started(self, prompt: Prompt, ticket: HandoffTicket) -> None:
        call, target = self._calls[prompt], self._targets[ticket.decode.worker_id]
        left_s = prompt.deadline_at - self.clock.at
        call.handoff = Handoff(ticket, left_s, call, self.outward, target, self._link, self._events)
        call.handoff.begin(self.clock.at)

    def blocks_ready(self, prompt: Prompt, first_index: int, block_ids: tuple[int, ...]) -> None:
        handoff = self._calls[prompt].handoff
        if handoff is not None:
            self._later(handoff.add_blocks, first_index, len(block_ids))

    def computed(self, prompt: Prompt, result: PrefillResult, is_finished: bool) -> None:
        call = self._calls[prompt]
        self._later(self._computed, call, result, is_finished)

    def failed(self, prompt: Prompt, error: ServingError) -> None:
        call = self._calls.get(prompt)
        if call is not None:
            self._later(self._lost, call, error)

    def expired(self, ticket_id: TicketId) -> None:
        call = self._by_ticket.get(ticket_id)
        if call is not None and call.handoff is not None:
            self._later(call.handoff.stop, "the deadline has passed")

    def _later(self, act: Callable[..., object], *arguments: object) -> None:
        self._events.at(self.clock.at, act, *arguments)

    def _computed(self, call: _Call, result: PrefillResult, is_finished: bool) -> None:
        call.result = result
        if (call.handoff is None and not call.is_closed) or is_finished:
            call.reply(result)
            if call.handoff is not None:
                call.handoff.stop("finished at the first token")
            else:
                self.forget(call)
            return
        if call.handoff is not None:
            call.handoff.finish()
        call.reply_if_granted()

    def _lost(self, call: _Call, error: ServingError) -> None:
        call.reply(error)
        if call.handoff is not None:
            call.handoff.stop(error.code)
        else:
            self.forget(call)
