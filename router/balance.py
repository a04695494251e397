"""Balance: how many requests more than others of its role a worker may have.

Owns the bound and what goes beyond it; when it is asked, is the policy's. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.ids import Role
from core.kv_layout import KVLayout
from router.decision import Candidate, Demand

# requests that a worker may have beyond the least busy one's: half of the mean, so many at least
_LEAD = 0.5
_LEAST_LEAD = 3
# a cached prefix that saves so much time lets its holder lead twice as far
_WORTH_MS = 500.0


class Balance:
    """Among the candidates of one placement."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        numbers: dict[Role, list[int]] = {role: [] for role in Role}
        for worker in candidates:
            numbers[worker.ref.role].append(worker.num_seqs)
        self._least = {role: min(found, default=0) for role, found in numbers.items()}
        self._lead = {
            role: max(_LEAST_LEAD, _LEAD * sum(found) / max(1, len(found))) for role, found in numbers.items()
        }

    def is_broken_by(self, worker: Candidate) -> bool:
        """Whether it has many more requests than another one of its role that could take this one."""
        role = worker.ref.role
        return worker.num_seqs > self._least[role] + self._lead[role]

    def kept(
        self, decodes: Sequence[Candidate], demand: Demand, saved_ms: Callable[[Candidate], float]
    ) -> Sequence[Candidate]:
        """`decodes` without those that lead too far on cores that they share with others. There reading takes
        from all alike, so that by the prices a burst is best read by one worker, one prompt behind the other,
        while all others stay idle: they would be of no use, and all streams would stop with one process. The
        more time its cached prefix saves (`saved_ms`), the further a worker may lead. One that could take the
        demand as well is always left.
        """
        if not any(worker.shares_cores for worker in decodes):
            return decodes
        least: dict[KVLayout, int] = {}
        for worker in decodes:
            if worker.is_handoff_target and worker.has_room(demand):
                least[worker.layout] = min(worker.num_seqs, least.get(worker.layout, worker.num_seqs))
        lead = self._lead[Role.DECODE]
        return [
            worker
            for worker in decodes
            if not worker.shares_cores
            or worker.layout not in least
            or worker.num_seqs <= least[worker.layout] + lead * (1.0 + saved_ms(worker) / _WORTH_MS)
        ]
