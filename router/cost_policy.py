"""The cost policy: the way to serve a request that delays everybody least, in milliseconds.

cost(remote) = pull(D', P) + queue(P) + prefill(P) + transfer(P, D) + handoff(P, D) + decode(D) + slowdown
cost(local)  = queue(D) + prefill(D) + decode(D) + slowdown + crowding
cost(wait)   = wait(D) + the cost of what is waited for

`prefill` follows from the worker's measured steps: their fixed part, the tokens, on D the streams beside.
`pull` is what it takes to have what a decode worker has cached sent to P first; without it more is to be
read. `slowdown` is what others lose: by the reading as many requests as a worker of that role has on average
(where prefill workers could read, streams count half: they have what they show already, others wait for a
first token), streams on D by longer steps, and the requests of all workers of a host whose cores the reading
takes. So remote reading is free for D's streams on another host, and is not on the same. `crowding`: where a
decode worker has many more requests than the least busy one, and that has no price, its cached prefix counts
for nothing, so that a popular beginning comes to be on all of them instead of drawing everyone to one; a
prefix that saves half a second and more than the answer takes always counts. Where workers share the cores
of a host even reading nothing twice is no reason for all to be on one of them: see `Balance.kept`. With a
target for first tokens only ways that meet it are compared, if there are any: see `ttft_target`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from operator import attrgetter
from typing import TypeVar

from core.ids import Role
from core.kv_layout import KVLayout
from core.worker_status import num_pairs
from router.balance import Balance
from router.config import PlanSetting, RouterConfig
from router.decision import Candidate, Decision, Demand, Draw, Plan
from router.distance import Distances
from router.speeds import Handoff, Speeds, assumed_speeds, measured_speeds
from router.ttft_target import give_way, time_left_ms

# the cheapest of each role that are looked at in pairs: what a pair adds differs less than workers do
_MAX_PAIRED = 8

# a cached prefix that saves so much time, and more than the answer takes, counts whatever the balance
_WORTH_MS = 500.0
# of a step, from which on what its streams add keeps the balance
_PRICED_SHARE = 0.1
# where prefill workers could read instead: a stream's moment, of one that a first token waits
_STREAM_WORTH = 0.5

_by_cost = attrgetter("cost")


@dataclass(slots=True)
class _Node:
    """Workers of a host that share its cores: how many compute, and how many requests' progress, in sum, is
    lost while one more does.
    """

    num_busy: int = 0
    num_lost: float = 0.0


@dataclass(slots=True)
class _Reading:
    """A prompt's way to its first token on one worker; `slowdown` is what others lose by it. `pull`: what it
    takes to get cached blocks from `source` first. `crowding`: what a cached prefix does not count for.
    """

    worker: Candidate
    queue: float
    prefill: float
    slowdown: float
    cost: float
    source: Candidate | None = None
    pull: float = 0.0
    crowding: float = 0.0


@dataclass(slots=True)
class _Decoding:
    """Its way from there on."""

    worker: Candidate
    decode: float
    slowdown: float
    wait: float
    num_missing_bytes: int
    cost: float


_Leg = TypeVar("_Leg", _Reading, _Decoding)


@dataclass(slots=True)
class _Option:
    """One way in whole. `reading` is on the decode worker itself for a local plan."""

    plan: Plan
    cost: float
    reading: _Reading
    decoding: _Decoding | None = None
    handoff: Handoff | None = None

    @property
    def first_token(self) -> float:
        """When it comes."""
        reading, decoding = self.reading, self.decoding
        wait = 0.0 if decoding is None else decoding.wait
        return wait + reading.pull + reading.queue + reading.prefill

    def decision(self) -> Decision:
        terms = {} if self.reading.source is None else {"pull": self.reading.pull}
        terms |= {"queue": self.reading.queue, "prefill": self.reading.prefill}
        slowdown = self.reading.slowdown
        decoding = self.decoding
        if decoding is not None:
            if self.plan is Plan.WAIT:
                terms["wait"] = decoding.wait
            if self.handoff is not None:
                terms["transfer"] = self.handoff.per_byte * decoding.num_missing_bytes
                terms["handoff"] = self.handoff.fixed
            terms["decode"] = decoding.decode
            slowdown += decoding.slowdown
        terms["slowdown"] = slowdown
        if self.reading.crowding > 0.0:
            terms["crowding"] = self.reading.crowding
        decode = None if decoding is None else decoding.worker
        prefill = None if self.reading.worker is decode else self.reading.worker
        return Decision(self.plan, prefill, decode, terms, pull_from=self.reading.source)


def cheapest(
    demand: Demand,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    config: RouterConfig,
    draw: Draw,
) -> Decision | None:
    """The cheapest decision, by chance among near ties; None if no worker can serve the demand at present.

    `config.plan` narrows the choice as long as it leaves one: remote needs a prefill worker, local none.
    """
    costs = _Costs(demand, config, draw, [*prefills, *decodes])
    decodings = [costs.decoding(worker) for worker in costs.balanced(decodes)]
    remote = costs.remote(prefills, decodings)
    local = [costs.local(decoding) for decoding in decodings]
    match config.plan:
        case PlanSetting.REMOTE:
            options = remote or local
        case PlanSetting.LOCAL:
            options = local or remote
        case PlanSetting.AUTO:
            options = [option for option in remote if not _is_all_cached(demand, option)] + local
    if not options:
        return None
    left = time_left_ms(demand, config)
    timely = options if left is None else [item for item in options if item.first_token <= left] or options
    limit = min(map(_by_cost, timely)) + config.tie_ms
    chosen = draw.chance.choice([option for option in timely if option.cost <= limit])
    best: dict[Plan, _Option] = {}
    for option in options:
        if option.plan is not chosen.plan and (
            option.plan not in best or option.cost < best[option.plan].cost
        ):
            best[option.plan] = option
    decision = chosen.decision()
    others = tuple(option.decision() for option in sorted(best.values(), key=_by_cost))
    if left is None:
        return replace(decision, others=others)
    quickest = min(option.reading.pull + option.reading.prefill for option in options)
    return give_way(replace(decision, others=others), quickest, demand, config)


class _Costs:
    """The prices of one demand among `candidates`."""

    def __init__(
        self, demand: Demand, config: RouterConfig, draw: Draw, candidates: Sequence[Candidate]
    ) -> None:
        self._demand = demand
        self._config = config
        self._draw = draw
        self._num_delayed = {role: _mean_active(candidates, role) for role in Role}
        if any(worker.ref.role is Role.PREFILL for worker in candidates):
            self._num_delayed[Role.DECODE] *= _STREAM_WORTH
        self._balance = Balance(candidates)
        self._assumed: Speeds | None = None
        self._statuses = [worker.status for worker in candidates if worker.speeds is None]
        self._distances = Distances(config)
        self._nodes: dict[str, _Node] = {}
        for worker in candidates:
            if worker.is_busy and worker.shares_cores:
                node = self._nodes.setdefault(worker.node, _Node())
                node.num_busy += 1
                node.num_lost += self._lost(worker)

    def balanced(self, decodes: Sequence[Candidate]) -> Sequence[Candidate]:
        """Without those that lead too far on shared cores."""
        return self._balance.kept(decodes, self._demand, self._saved_ms)

    def remote(self, prefills: Sequence[Candidate], decodings: Sequence[_Decoding]) -> list[_Option]:
        sources = self._sources(decodings)
        readings = [self._remote_reading(worker, sources.get(worker.layout)) for worker in prefills]
        if self._demand.is_ended_by_prefill:
            return [_Option(Plan.PREFILL_ONLY, reading.cost, reading) for reading in readings]
        by_layout: dict[KVLayout, list[_Decoding]] = {}
        for decoding in decodings:
            if decoding.worker.is_handoff_target:
                by_layout.setdefault(decoding.worker.layout, []).append(decoding)
        options = []
        for layout, targets in by_layout.items():
            fitting = {found: found.can_become(layout) for found in {item.worker.layout for item in readings}}
            paired = self._paired(targets)
            for reading in self._paired([item for item in readings if fitting[item.worker.layout]]):
                options += [self._pair(reading, target) for target in paired]
        return options

    def local(self, decoding: _Decoding) -> _Option:
        """Read in chunks between the steps of the streams, which wait for them."""
        worker = decoding.worker
        reading = self._local_reading(worker, worker.num_cached_tokens)
        if self._is_leading(worker):
            reading = _crowded(reading, self._local_reading(worker, 0), max(decoding.decode, _WORTH_MS))
        return _Option(self._plan(Plan.LOCAL, decoding), reading.cost + decoding.cost, reading, decoding)

    def _local_reading(self, worker: Candidate, num_cached_tokens: int) -> _Reading:
        speeds, lost = self._speeds(worker), self._lost_by(worker)
        speed = speeds.beside if self._is_crowded(worker) else speeds.alone
        num_streams = worker.num_streams
        chunk = self._chunk(worker, num_streams + worker.num_ahead_tokens > 0)
        of_streams = speed.stream * num_streams + (speed.kv * worker.num_kv_tokens if num_streams else 0.0)
        step = speed.prefill + of_streams
        num_uncached = max(1, self._demand.num_tokens - num_cached_tokens)
        queue = worker.num_ahead_tokens * (step / chunk + speed.token) + worker.num_ahead_pairs * speed.pair
        if num_streams:
            queue += (speed.decode + of_streams) / 2  # the step that runs
        num_steps = math.ceil(num_uncached / chunk)
        pairs = num_pairs(num_uncached, self._demand.num_tokens - num_uncached)
        of_prompt = num_uncached * speed.token + pairs * speed.pair
        prefill = num_steps * step + of_prompt
        # a step with a chunk in it is longer by the chunk; the tokens of the streams come with it
        added = num_steps * max(0.0, speed.prefill - speed.decode) + of_prompt
        return self._reading(worker, queue, prefill, added * (self._num_delayed[Role.DECODE] + lost))

    def decoding(self, worker: Candidate) -> _Decoding:
        """The answer's steps, and what it costs those who run there already."""
        demand, speed = self._demand, self._speeds(worker).alone
        num_others = max(worker.num_streams, worker.num_seqs)
        num_steps = demand.num_output_tokens
        num_own_kv = demand.num_samples * demand.num_tokens
        step = speed.decode_step(num_others, worker.num_kv_tokens)
        added = speed.stream * demand.num_samples + speed.kv * num_own_kv
        decode, slowdown = num_steps * (step + added), num_steps * added * num_others
        wait = 0.0 if worker.has_room(demand) else self._wait(worker, step)
        num_missing = max(0, demand.num_tokens - worker.num_cached_tokens)
        num_bytes = num_missing * worker.layout.bytes_per_token
        return _Decoding(worker, decode, slowdown, wait, num_bytes, decode + slowdown + wait)

    # ------------------------------------------------------------ inside

    def _sources(self, decodings: Sequence[_Decoding]) -> dict[KVLayout, Candidate]:
        """The decode worker that holds most of the prompt, for each layout."""
        found: dict[KVLayout, Candidate] = {}
        if self._config.pull_timeout_s > 0.0:
            for decoding in decodings:
                worker = decoding.worker
                best = found.get(worker.layout)
                if worker.num_told_tokens > (0 if best is None else best.num_told_tokens):
                    found[worker.layout] = worker
        return found

    def _remote_reading(self, worker: Candidate, source: Candidate | None) -> _Reading:
        """By itself, or with what `source` has sent first, whichever is cheaper."""
        alone = self._reading_of(worker, worker.num_cached_tokens)
        num_pulled = 0 if source is None else source.num_told_tokens - worker.num_cached_tokens
        if source is None or num_pulled <= 0:
            return alone
        handoff = self._distances.handoff(source, worker)
        pull = handoff.fixed + handoff.per_byte * num_pulled * worker.layout.bytes_per_token
        if pull >= alone.cost:
            return alone
        pulled = self._reading_of(worker, source.num_told_tokens)
        pulled.source, pulled.pull, pulled.cost = source, pull, pulled.cost + pull
        return min(alone, pulled, key=_by_cost)

    def _reading_of(self, worker: Candidate, num_cached_tokens: int) -> _Reading:
        speeds = self._speeds(worker)
        speed = speeds.beside if self._is_crowded(worker) else speeds.alone
        chunk = self._chunk(worker, False)
        num_uncached = max(1, self._demand.num_tokens - num_cached_tokens)
        queue = worker.num_ahead_tokens * (speed.prefill / chunk + speed.token)
        queue += worker.num_ahead_pairs * speed.pair
        pairs = num_pairs(num_uncached, self._demand.num_tokens - num_uncached)
        prefill = math.ceil(num_uncached / chunk) * speed.prefill + num_uncached * speed.token
        prefill += pairs * speed.pair
        num_delayed = self._num_delayed[Role.PREFILL] + self._lost_by(worker)
        return self._reading(worker, queue, prefill, prefill * num_delayed)

    def _reading(self, worker: Candidate, queue: float, prefill: float, slowdown: float) -> _Reading:
        queue, prefill = queue * worker.pace, prefill * worker.pace
        return _Reading(worker, queue, prefill, slowdown, queue + prefill + slowdown)

    def _pair(self, reading: _Reading, target: _Decoding) -> _Option:
        handoff = self._distances.handoff(reading.worker, target.worker)
        added = handoff.fixed + handoff.per_byte * target.num_missing_bytes
        plan = self._plan(Plan.REMOTE, target)
        return _Option(plan, reading.cost + target.cost + added, reading, target, handoff)

    def _is_leading(self, worker: Candidate) -> bool:
        """Whether it has many more requests than another one of its role that could take this one, and no
        price that tells.
        """
        if worker.num_cached_tokens == 0 or not self._balance.is_broken_by(worker):
            return False
        speed = self._speeds(worker).alone
        step = speed.decode_step(worker.num_streams, worker.num_kv_tokens)
        return worker.shares_cores or step - speed.decode < _PRICED_SHARE * step

    def _plan(self, plan: Plan, decoding: _Decoding) -> Plan:
        return Plan.WAIT if decoding.wait > 0.0 and self._demand.can_wait else plan

    def _saved_ms(self, worker: Candidate) -> float:
        return worker.num_cached_tokens * self._speeds(worker).alone.token

    def _wait(self, worker: Candidate, step: float) -> float:
        """Until one of the sequences there ends: they are spread evenly over their lengths."""
        return max(1.0, step * self._config.assumed_output_tokens / max(1, worker.num_seqs))

    def _paired(self, fitting: list[_Leg]) -> list[_Leg]:
        """The cheapest of those that fit; which of near ties are among them is left to chance."""
        if len(fitting) <= _MAX_PAIRED:
            return fitting
        tie_ms, chance = self._config.tie_ms, self._draw.chance.random
        return nsmallest(_MAX_PAIRED, fitting, key=lambda item: item.cost + tie_ms * chance())

    def _speeds(self, worker: Candidate) -> Speeds:
        if worker.speeds is not None:
            return worker.speeds
        if self._assumed is None:
            self._assumed = assumed_speeds(self._config, self._statuses)
        return measured_speeds(worker.status, self._assumed, self._config)

    def _chunk(self, worker: Candidate, is_beside_streams: bool) -> int:
        """Prompt tokens of one step."""
        status = worker.status
        whole = status.max_step_tokens if status is not None else 0
        part = status.max_chunk_tokens if status is not None and is_beside_streams else 0
        return part or whole or self._config.assumed_step_tokens

    def _lost(self, worker: Candidate) -> float:
        num_active = max(worker.num_active, worker.num_streams)
        return num_active * self._speeds(worker).lost_share(worker.num_streams)

    def _is_crowded(self, worker: Candidate) -> bool:
        """Whether others compute on its cores."""
        if not worker.shares_cores:
            return False
        node = self._nodes.get(worker.node)
        return node is not None and node.num_busy > worker.is_busy

    def _lost_by(self, worker: Candidate) -> float:
        """How many requests of other workers stand still, in sum, while this one computes."""
        if not worker.shares_cores:
            return 0.0
        node = self._nodes.get(worker.node)
        if node is None:
            return 0.0
        return max(0.0, node.num_lost - self._lost(worker)) if worker.is_busy else node.num_lost


def _mean_active(candidates: Sequence[Candidate], role: Role) -> float:
    """How many requests lose a moment by each moment that a worker of the role reads: those who are there,
    and who come while they are (as many, by Little's law) find it so much later. The mean, for the number of
    one worker would send every long prompt to the few that have few streams, one behind the other.
    """
    numbers = [max(worker.num_active, worker.num_streams) for worker in candidates if worker.ref.role is role]
    return sum(numbers) / len(numbers) if numbers else 0.0


def _crowded(reading: _Reading, uncached: _Reading, limit: float) -> _Reading:
    """`reading` at the price of one without a cached prefix, unless that saves more than `limit`."""
    if uncached.prefill - reading.prefill > limit:
        return reading
    crowding = max(0.0, uncached.cost - reading.cost)
    return replace(reading, crowding=crowding, cost=reading.cost + crowding)


def _is_all_cached(demand: Demand, option: _Option) -> bool:
    """Whether each full block is on the decode worker: then there is nothing to hand over but the tail."""
    if option.decoding is None:
        return False
    worker = option.decoding.worker
    num_full = demand.num_tokens - demand.num_tokens % worker.layout.block_size
    return 0 < num_full <= worker.num_cached_tokens
