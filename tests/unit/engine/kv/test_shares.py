"""One tenant's prompts push out its own cached blocks first, as soon as it has more than its share."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_hash import BlockHash, child_hash, root_hash
from engine.kv.allocator import BlockAllocator
from engine.kv.shares import KVShares

NUM_BLOCKS = 24
OWNERS = ("a", "b", "c")
PROMPTS = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=60
)


def names(owner: str, prompt: int, num: int) -> list[BlockHash]:
    parent, found = root_hash(owner, "layout"), []
    for index in range(num):
        parent = child_hash(parent, bytes([prompt, index]))
        found.append(parent)
    return found


def run(allocator: BlockAllocator, owner: str, prompt: int, num: int, is_owner_late: bool) -> list[int]:
    """A prompt of `num` blocks: reuse what is cached, compute and name the rest. Held until released."""
    chain = names(owner, prompt, num)
    shared = allocator.prefix_cache.match(chain)
    new = allocator.try_acquire(shared, num - len(shared), owner)
    assert new is not None
    table = shared + new
    for index in range(len(shared), num):
        parent = table[index - 1] if index else None
        allocator.publish(table[index], chain[index], parent, "" if is_owner_late else owner)
    if is_owner_late:
        allocator.own(table, owner)
    return table


@settings(deadline=None, max_examples=30)
@given(PROMPTS)
def test_nobody_within_its_share_loses_a_block_while_another_has_more_than_its_own(
    prompts: list[tuple[str, int, int, bool]],
) -> None:
    shares = {"a": 0.5, "b": 0.25, "c": 0.25}
    allocator = BlockAllocator(NUM_BLOCKS)
    allocator.use_shares(KVShares(shares))
    for owner, prompt, num, is_owner_late in prompts:
        before = {name: allocator.num_owned(name) for name in OWNERS}
        table = run(allocator, owner, prompt, num, is_owner_late)
        allocator.check([table])
        for other in OWNERS:
            if other != owner and before[other] <= shares[other] * NUM_BLOCKS:
                assert allocator.num_owned(other) == before[other], "pushed out within its share"
        allocator.release(table)
        allocator.check([])
        assert sum(allocator.num_owned(name) for name in OWNERS) == allocator.num_cached


@settings(deadline=None, max_examples=30)
@given(PROMPTS)
def test_with_late_owners_and_mixed_chains_children_still_go_before_their_parents(
    prompts: list[tuple[str, int, int, bool]],
) -> None:
    allocator = BlockAllocator(NUM_BLOCKS)
    for number, (_, prompt, num, is_late) in enumerate(prompts):
        table = run(allocator, "x", prompt % 2, num, False)
        if is_late:
            allocator.own(table[: num // 2], OWNERS[number % 3])
        allocator.check([table])
        allocator.release(table)
        allocator.check([])


def test_a_flood_of_one_tenant_leaves_the_others_equal_part_alone() -> None:
    allocator = BlockAllocator(NUM_BLOCKS)
    kept = run(allocator, "a", 0, 8, False)
    allocator.release(kept)
    for prompt in range(50):
        allocator.release(run(allocator, "b", prompt, 8, False))
    assert allocator.num_owned("a") == 8
    assert allocator.num_owned("b") == NUM_BLOCKS - 8


def test_a_share_that_nobody_else_needs_is_used() -> None:
    allocator = BlockAllocator(NUM_BLOCKS)
    allocator.use_shares(KVShares({"a": 0.5}))
    for prompt in range(3):
        allocator.release(run(allocator, "b", prompt, 8, False))
    assert allocator.num_owned("b") == NUM_BLOCKS
