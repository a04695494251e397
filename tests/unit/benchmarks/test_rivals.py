"""The other routers' rules do what their descriptions say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.rivals import CacheAware, CacheAwareRouter, KvCost, KvCostRouter
from core.block_hash import BlockHash
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.kv_layout import KVLayout
from router.decision import Candidate, Decision, Demand, Draw, Plan

LAYOUT = KVLayout("m", 1, 1, 8, 16)
DRAW = Draw(random.Random(0))


def _worker(name: str, role: Role = Role.DECODE, num_cached_tokens: int = 0) -> Candidate:
    ref = WorkerRef(WorkerId(name), role, Epoch(1), "")
    return Candidate(ref, LAYOUT, num_cached_tokens=num_cached_tokens)


def _names(text: str) -> Sequence[BlockHash]:
    return [BlockHash(text[: end + 1].encode()) for end in range(len(text))]


def _on(name: str, role: Role = Role.DECODE) -> Decision:
    return Decision(Plan.LOCAL, None, _worker(name, role))


def _chosen(decision: Decision | None) -> tuple[str, str]:
    assert decision is not None
    assert decision.decode is not None
    return decision.reader.ref.worker_id, decision.decode.ref.worker_id


def test_kv_cost_weighs_what_is_cached_against_what_runs() -> None:
    router = KvCostRouter(KvCost())
    workers = [_worker("cold"), _worker("warm", num_cached_tokens=160)]
    assert _chosen(router.choose(_names("abc"), Demand(200), (), workers, DRAW))[0] == "warm"
    router.placed(1, _names("x" * 30), _on("warm"))
    assert _chosen(router.choose(_names("abc"), Demand(200), (), workers, DRAW))[0] == "cold"
    router.ended(1)
    assert _chosen(router.choose(_names("abc"), Demand(200), (), workers, DRAW))[0] == "warm"


def test_kv_cost_forgets_what_was_to_be_read_at_the_first_token() -> None:
    router = KvCostRouter(KvCost())
    prefills = [_worker("p1", Role.PREFILL), _worker("p2", Role.PREFILL)]
    decodes = [_worker("d")]
    remote = Decision(Plan.REMOTE, prefills[0], decodes[0])
    router.placed(1, _names("abcdefgh"), remote)
    for _ in range(8):
        assert _chosen(router.choose((), Demand(100), prefills, decodes, DRAW)) == ("p2", "d")
    router.read(1)
    found = {_chosen(router.choose((), Demand(100), prefills, decodes, DRAW))[0] for _ in range(40)}
    assert found == {"p1", "p2"}


def test_kv_cost_may_read_short_remainders_on_decode() -> None:
    router = KvCostRouter(KvCost(local_tokens=64))
    prefill, warm = _worker("p", Role.PREFILL), _worker("d", num_cached_tokens=160)
    assert _chosen(router.choose((), Demand(200), [prefill], [warm], DRAW)) == ("d", "d")
    cold = replace(warm, num_cached_tokens=0)
    assert _chosen(router.choose((), Demand(200), [prefill], [cold], DRAW)) == ("p", "d")


def test_cache_aware_follows_its_tree_until_loads_differ() -> None:
    router = CacheAwareRouter(CacheAware(threshold=0.3, abs_limit=2, rel_limit=1.5))
    workers = [_worker("a"), _worker("b")]
    router.placed(1, _names("hello"), _on("a"))
    router.ended(1)
    for _ in range(5):
        assert _chosen(router.choose(_names("hellos"), Demand(100), (), workers, DRAW))[0] == "a"
    for number in range(2, 5):
        router.placed(number, _names(f"{number}"), _on("a"))
    assert _chosen(router.choose(_names("hellos"), Demand(100), (), workers, DRAW))[0] == "b"


def test_cache_aware_takes_the_least_loaded_where_little_matches() -> None:
    router = CacheAwareRouter(CacheAware(threshold=0.5))
    workers = [_worker("a"), _worker("b")]
    router.placed(1, _names("ab"), _on("a"))
    assert _chosen(router.choose(_names("abxxxxxx"), Demand(100), (), workers, DRAW))[0] == "b"


def test_a_tree_keeps_no_more_blocks_than_it_may() -> None:
    router = CacheAwareRouter(CacheAware(threshold=0.1, max_blocks=4))
    workers = [_worker("a"), _worker("b")]
    router.placed(1, _names("wxyz"), _on("a"))
    router.placed(2, _names("klmn"), _on("a"))
    found = {_chosen(router.choose(_names("wxyz"), Demand(64), (), workers, DRAW))[0] for _ in range(30)}
    assert found == {"b"}
