"""Dispatch: a simulated router: each request's way through the workers, as callbacks.

Owns what `router.pipeline` owns of a real one: place, prefill, generate, and again after a refusal.
Placement, reservations and setbacks are the real ones. One thread.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

from cluster.simulator.choosing import Chooser, SitePlacer, SiteSearch
from cluster.simulator.decode_site import DecodeSite
from cluster.simulator.events import Events
from cluster.simulator.fleet import Fleet
from cluster.simulator.front import Front, FrontPrice
from cluster.simulator.prefill_site import PrefillSite
from cluster.simulator.record import Record
from cluster.simulator.site_runner import EOS
from core.errors import DeadlineExceeded, ServingError
from core.ids import TicketId, WorkerId
from core.jobs import CancelJob, GenerateJob, PrefillJob, PrefillResult, SampleStart
from core.request import Request
from core.telemetry import TTFTPart
from router.config import RouterConfig
from router.decision import Plan
from router.placer import MAX_WOKEN, Chosen
from router.setbacks import Setbacks
from router.work_meter import WorkMeter


class Dispatch:
    """One router. `message_s`: a call's way to a worker."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        events: Events,
        chance: random.Random,
        message_s: float,
        chooser: Chooser | None = None,
        front: Front | None = None,
    ) -> None:
        self.config = config
        self.fleet = fleet
        self.events = events
        self.message_s = message_s
        self.chooser = chooser
        self.placer = SitePlacer(config, fleet, events, chance, chooser, self.freed)
        self.work = WorkMeter()
        self.prefills: dict[WorkerId, PrefillSite] = {}
        self.decodes: dict[WorkerId, DecodeSite] = {}
        self._open: dict[int, Run] = {}
        self._held: dict[Run, None] = {}
        self._is_asking = False
        self._front = front or Front(FrontPrice())

    def serve(self, request: Request, record: Record, timeout_s: float) -> None:
        """A request comes in now."""
        deadline_at = self.events.now() + timeout_s
        run = self._open[record.number] = Run(self, request, record, deadline_at)
        self.events.at(deadline_at, self._deadline, record.number)
        ready_at = self._front.ready_at(self.events.now(), request.num_prompt_tokens)
        if ready_at > self.events.now():
            self.events.at(ready_at, run.place)
        else:
            run.place()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def close(self, number: int) -> None:
        """The request of that number has ended. Nothing keeps its prompt until its deadline."""
        del self._open[number]

    def hold(self, run: Run) -> None:
        """Ask it again when a request leaves its workers."""
        self._held[run] = None

    def let_go(self, run: Run) -> None:
        self._held.pop(run, None)

    def _deadline(self, number: int) -> None:
        run = self._open.get(number)
        if run is not None:
            run.give_up()

    def add(self, site: PrefillSite | DecodeSite) -> None:
        """A worker can be called."""
        if isinstance(site, PrefillSite):
            self.prefills[site.ref.worker_id] = site
        else:
            self.decodes[site.ref.worker_id] = site

    def remove(self, site: PrefillSite | DecodeSite) -> None:
        """Nothing calls it any more."""
        del (self.prefills if isinstance(site, PrefillSite) else self.decodes)[site.ref.worker_id]

    def freed(self) -> None:
        """A request has left its workers, or a worker has come: ask those that are held."""
        if self._held and not self._is_asking:
            self._is_asking = True
            self.events.after(0.0, self._ask_again)

    def _ask_again(self) -> None:
        self._is_asking = False
        for run in list(islice(self._held, MAX_WOKEN)):
            del self._held[run]
            run.place()


class Run:
    """One request. A `Follower` of its Generate call."""

    def __init__(self, router: Dispatch, request: Request, record: Record, deadline_at: float) -> None:
        self._router = router
        self._events = router.events
        self._request = request
        self._record = record
        self._deadline_at = deadline_at
        self.token_times = record.token_times
        self._setbacks = Setbacks(router.config, router.events)
        self._search: SiteSearch | None = None
        self._chosen: Chosen | None = None
        self._ticket_id: TicketId | None = None
        self._asked_at = 0.0
        self._is_read = False
        self._is_over = False
        self._work = router.work.open(request.num_prompt_tokens, request.sampling.max_tokens)

    # ------------------------------------------------------------ placing

    def place(self) -> None:
        """Choose workers, or wait for some."""
        if self._is_over or self._chosen is not None:
            return
        router, now = self._router, self._events.now()
        if self._search is None:
            num_emitted = len(self.token_times)
            tokens: Sequence[int] = self._request.prompt_token_ids
            if num_emitted:
                tokens = (*tokens, *[EOS] * num_emitted)
            demand = router.placer.demand(self._request, num_emitted, 1)
            self._search = router.placer.seek(self._request, tokens, demand)
        chosen = self._search.choose(self._setbacks, now)
        if chosen is None:
            self._wait_for_worker(self._search, now)
        elif chosen.decision.plan is Plan.WAIT:
            if not chosen.decision.gives_way:
                router.hold(self)
            self._ask_at(now + self._search.hold_s(chosen.decision, now))
        else:
            router.let_go(self)
            self._go(chosen)

    def _wait_for_worker(self, search: SiteSearch, now: float) -> None:
        usable = search.usable_answerers()
        chance_at = self._setbacks.next_chance_at(usable, now)
        if chance_at >= self._deadline_at or self._setbacks.is_too_long_for(search.answerers()):
            self._end(self._setbacks.final_error(usable))
            return
        self._ask_at(chance_at)

    def _ask_at(self, when: float) -> None:
        self._asked_at = when
        self._events.at(when, self._asked, when)

    def _asked(self, when: float) -> None:
        if when == self._asked_at:
            self.place()

    def _go(self, chosen: Chosen) -> None:
        record, now, decision = self._record, self._events.now(), chosen.decision
        self._chosen = chosen
        self._work.placed()
        record.num_attempts += 1
        record.held_s = now - record.arrival_s
        record.plan = decision.plan.value
        record.reader = decision.reader.ref.worker_id
        record.decoder = decision.decode.ref.worker_id if decision.decode is not None else ""
        if self._router.chooser is not None:
            assert self._search is not None
            self._router.chooser.placed(record.number, self._search.names(), decision)
        if chosen.prefill is None:
            self._ticket_id = None
            self._generate(now)
            return
        self._ticket_id = TicketId(f"{record.number}.{record.num_attempts}")
        job = PrefillJob(
            self._request,
            self._samples(),
            self._ticket_id,
            None if chosen.decode is None else chosen.decode.ref,
            record.num_attempts,
            self._deadline_at - now,
        )
        site = self._router.prefills[chosen.prefill.ref.worker_id]
        self._events.after(self._router.message_s, site.prefill, job, self._prefilled)

    # ------------------------------------------------------------ what comes back

    def _prefilled(self, outcome: PrefillResult | ServingError) -> None:
        if self._is_over or self._chosen is None:
            return
        now, record = self._events.now(), self._record
        if isinstance(outcome, ServingError):
            self._fail(outcome)
            return
        assert self._chosen.placed is not None
        self._chosen.placed.heard(outcome.num_cached_tokens)
        self._note_read(outcome.num_cached_tokens)
        (delta,) = outcome.deltas
        record.token_times.extend([now] * len(delta.token_ids))
        if delta.finish_reason is not None:
            self._end(None)
        else:
            self._generate(now)

    def generated(self, num_cached_tokens: int) -> None:
        if self._is_over or self._chosen is None:
            return
        assert self._chosen.placed is not None
        self._chosen.placed.heard(num_cached_tokens)
        if self._chosen.prefill is None:
            self._note_read(num_cached_tokens)

    def ended(self, error: ServingError | None) -> None:
        if self._is_over or self._chosen is None:
            return
        if error is None:
            self._end(None)
        else:
            self._fail(error)

    # ------------------------------------------------------------ inside

    def _generate(self, now: float) -> None:
        assert self._chosen is not None
        assert self._chosen.decode is not None
        job = GenerateJob(
            self._request,
            self._samples(),
            self._ticket_id,
            self._record.num_attempts,
            self._deadline_at - now,
        )
        site = self._router.decodes[self._chosen.decode.ref.worker_id]
        self._events.after(self._router.message_s, site.generate, job, self)

    def _samples(self) -> tuple[SampleStart, ...]:
        return (SampleStart(0, (EOS,) * len(self.token_times)),)

    def _note_read(self, num_cached_tokens: int) -> None:
        if not self._is_read:
            self._is_read = True
            self._record.num_cached_tokens = num_cached_tokens
            self._work.first_token(num_cached_tokens, {TTFTPart.PLACE: self._record.held_s})
        if self._router.chooser is not None:
            self._router.chooser.read(self._record.number)

    def _fail(self, error: ServingError) -> None:
        """A call failed: a setback, or the end."""
        assert self._chosen is not None
        prefill, decode = self._chosen.prefill, self._chosen.decode
        callee = prefill if prefill is not None and not self.token_times else decode
        assert callee is not None
        target = decode if callee is prefill else None
        self._leave()
        self._work.lost()
        try:
            self._setbacks.note(error, callee.ref, None if target is None else target.ref)
        except ServingError as final:
            self._end(final)
            return
        self._search = None
        self.place()

    def _leave(self) -> None:
        chosen, self._chosen = self._chosen, None
        if chosen is None:
            return
        assert chosen.placed is not None
        chosen.placed.close()
        if self._router.chooser is not None:
            self._router.chooser.ended(self._record.number)

    def give_up(self) -> None:
        """The deadline has come."""
        chosen, late = self._chosen, self._router.message_s
        error = DeadlineExceeded("the deadline passed before the answer was complete")
        if chosen is not None and chosen.prefill is not None and self._ticket_id is not None:
            site = self._router.prefills[chosen.prefill.ref.worker_id]
            self._events.after(late, site.cancel, self._ticket_id, error)
        if chosen is not None and chosen.decode is not None:
            job = CancelJob(self._request.request_id, self._ticket_id, error.code)
            self._events.after(late, self._router.decodes[chosen.decode.ref.worker_id].cancel, job)
        self._end(error)

    def _end(self, error: ServingError | None) -> None:
        self._is_over = True
        self._record.ended_s = self._events.now()
        self._record.error = "" if error is None else error.code
        self._router.close(self._record.number)
        if len(self.token_times) > 1:
            self._work.next_tokens(len(self.token_times) - 1, self.token_times[-1] - self.token_times[0])
        self._work.close(len(self.token_times), None)
        self._router.let_go(self)
        self._leave()
