"""Placement as other routers describe theirs, for comparison: written from their public descriptions.

`KvCostRouter`: NVIDIA Dynamo's KV router. Source: its documentation, "Routing Concepts" and "Configuration
and Tuning". `CacheAwareRouter`: the `cache_aware` policy of SGLang's model gateway. Source: its
documentation, "SGLang Model Gateway", and the description at the head of its policy. Each keeps its own
account of what it has sent where, as they do.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from core.block_hash import BlockHash
from core.ids import WorkerId
from router.decision import Candidate, Decision, Demand, Draw, Plan


@dataclass(slots=True)
class _Account:
    """What one request counts for: on the worker that reads it until its first token, on the one that
    decodes it until its end.
    """

    reader: WorkerId
    decoder: WorkerId
    prompt_blocks: float
    blocks: float
    is_read: bool = False


@dataclass(frozen=True, slots=True)
class KvCost:
    """The settings that are tuned. cost = scale × (prompt blocks that are being read + own blocks − credit ×
    cached ones) + blocks of running requests; the lowest wins, or by softmax at `temperature`. With
    `is_product` the cost is the product of the two sums. `decay` lowers the credit of a worker that has
    more to read than the least loaded one. `local_tokens`, `local_ratio`: a prompt of which fewer tokens, and
    a smaller share, are uncached on the decode worker is read there (0: never).
    """

    scale: float = 1.0
    credit: float = 1.0
    temperature: float = 0.0
    is_product: bool = False
    decay: float = 0.0
    local_tokens: int = 0
    local_ratio: float = 0.7


class KvCostRouter:
    """Prefill by what is cached and being read, decode by running blocks; or both on one worker where there
    are no prefill workers.
    """

    def __init__(self, cost: KvCost) -> None:
        self._cost = cost
        self._open: dict[int, _Account] = {}
        self._reading: defaultdict[WorkerId, float] = defaultdict(float)
        self._running: defaultdict[WorkerId, float] = defaultdict(float)

    def choose(
        self,
        names: Sequence[BlockHash],
        demand: Demand,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        draw: Draw,
    ) -> Decision | None:
        if not decodes:
            return None
        if not prefills:
            return Decision(Plan.LOCAL, None, self._pick(decodes, demand, draw, has_running=True))
        if demand.is_ended_by_prefill:
            return Decision(Plan.PREFILL_ONLY, self._pick(prefills, demand, draw, has_running=False), None)
        decode = self._lowest([(self._running[item.ref.worker_id], item) for item in decodes], draw)
        num_new = demand.num_tokens - decode.num_cached_tokens
        if num_new < self._cost.local_tokens and num_new < self._cost.local_ratio * demand.num_tokens:
            return Decision(Plan.LOCAL, None, decode)
        return Decision(Plan.REMOTE, self._pick(prefills, demand, draw, has_running=False), decode)

    def placed(self, number: int, names: Sequence[BlockHash], decision: Decision) -> None:
        reader = decision.reader
        decoder = decision.decode or reader
        size = reader.layout.block_size
        num_blocks = float(len(names) + 1)
        account = _Account(
            reader.ref.worker_id,
            decoder.ref.worker_id,
            max(0.0, num_blocks - reader.num_cached_tokens / size),
            num_blocks,
        )
        self._open[number] = account
        self._reading[account.reader] += account.prompt_blocks
        self._running[account.decoder] += account.blocks

    def read(self, number: int) -> None:
        account = self._open.get(number)
        if account is not None and not account.is_read:
            account.is_read = True
            self._reading[account.reader] -= account.prompt_blocks

    def ended(self, number: int) -> None:
        self.read(number)
        account = self._open.pop(number, None)
        if account is not None:
            self._running[account.decoder] -= account.blocks

    def _pick(
        self, candidates: Sequence[Candidate], demand: Demand, draw: Draw, has_running: bool
    ) -> Candidate:
        cost = self._cost
        size = candidates[0].layout.block_size
        own = demand.num_tokens / size
        least = min(self._reading[item.ref.worker_id] for item in candidates)
        priced = []
        for item in candidates:
            reading = self._reading[item.ref.worker_id]
            credit = cost.credit / (1.0 + cost.decay * max(0.0, reading - least) / max(1.0, own))
            prefill = cost.scale * max(0.0, reading + own - credit * item.num_cached_tokens / size)
            running = self._running[item.ref.worker_id] + own if has_running else 0.0
            priced.append((prefill * (running + 1.0) if cost.is_product else prefill + running, item))
        return self._lowest(priced, draw)

    def _lowest(self, priced: Sequence[tuple[float, Candidate]], draw: Draw) -> Candidate:
        lowest = min(price for price, _ in priced)
        if self._cost.temperature <= 0.0:
            return draw.chance.choice([item for price, item in priced if price == lowest])
        spread = max(price for price, _ in priced) - lowest or 1.0
        weights = [math.exp((lowest - price) / spread / self._cost.temperature) for price, _ in priced]
        return draw.chance.choices([item for _, item in priced], weights)[0]


@dataclass(frozen=True, slots=True)
class CacheAware:
    """The settings that are tuned. While the numbers of running requests differ by more than `abs_limit`, and
    by more than a factor `rel_limit`, the least loaded worker; else the one whose tree matches more than
    `threshold` of the prompt, or, if none does, the least loaded. `max_blocks`: size of a worker's tree.
    """

    threshold: float = 0.3
    abs_limit: int = 64
    rel_limit: float = 1.5
    max_blocks: int = 1 << 22
    is_decode_cache_aware: bool = False


class CacheAwareRouter:
    """A tree of what was sent where, for each role; workers tell nothing."""

    def __init__(self, settings: CacheAware) -> None:
        self._settings = settings
        self._trees: dict[WorkerId, OrderedDict[BlockHash, None]] = {}
        self._running: Counter[WorkerId] = Counter()
        self._open: dict[int, list[WorkerId]] = {}

    def choose(
        self,
        names: Sequence[BlockHash],
        demand: Demand,
        prefills: Sequence[Candidate],
        decodes: Sequence[Candidate],
        draw: Draw,
    ) -> Decision | None:
        if not decodes:
            return None
        if not prefills:
            return Decision(Plan.LOCAL, None, self._pick(decodes, names, draw))
        if demand.is_ended_by_prefill:
            return Decision(Plan.PREFILL_ONLY, self._pick(prefills, names, draw), None)
        if self._settings.is_decode_cache_aware:
            decode = self._pick(decodes, names, draw)
        else:
            decode = self._least(decodes, draw)
        return Decision(Plan.REMOTE, self._pick(prefills, names, draw), decode)

    def placed(self, number: int, names: Sequence[BlockHash], decision: Decision) -> None:
        held = [item.ref.worker_id for item in (decision.prefill, decision.decode) if item is not None]
        self._open[number] = held
        for worker_id in held:
            self._running[worker_id] += 1
            tree = self._trees.setdefault(worker_id, OrderedDict())
            for name in names:
                tree[name] = None
                tree.move_to_end(name)
            while len(tree) > self._settings.max_blocks:
                tree.popitem(last=False)

    def read(self, number: int) -> None:
        """The prefill worker has done its part."""
        held = self._open.get(number)
        if held is not None and len(held) > 1:
            self._running[held.pop(0)] -= 1

    def ended(self, number: int) -> None:
        for worker_id in self._open.pop(number, ()):
            self._running[worker_id] -= 1

    def _pick(self, candidates: Sequence[Candidate], names: Sequence[BlockHash], draw: Draw) -> Candidate:
        loads = [self._running[item.ref.worker_id] for item in candidates]
        low, high = min(loads), max(loads)
        settings = self._settings
        if high - low > settings.abs_limit and high > settings.rel_limit * low:
            return self._least(candidates, draw)
        matches = [self._match(item.ref.worker_id, names) for item in candidates]
        longest = max(matches)
        if names and longest / len(names) > settings.threshold:
            return draw.chance.choice(
                [item for item, length in zip(candidates, matches, strict=True) if length == longest]
            )
        return self._least(candidates, draw)

    def _match(self, worker_id: WorkerId, names: Sequence[BlockHash]) -> int:
        """A name stands for all before it; a tree that lost some still has what it can be reached by."""
        tree = self._trees.get(worker_id)
        if tree is None:
            return 0
        length = 0
        for name in names:
            if name not in tree:
                break
            length += 1
        return length

    def _least(self, candidates: Sequence[Candidate], draw: Draw) -> Candidate:
        low = min(self._running[item.ref.worker_id] for item in candidates)
        return draw.chance.choice([item for item in candidates if self._running[item.ref.worker_id] == low])
