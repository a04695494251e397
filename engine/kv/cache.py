"""KVCache: paged KV as sequences and tickets see it.

Owns the rules that turn token counts into blocks: matching a cached prefix, growing, naming full blocks,
sharing between samples, reserving for a ticket. Both schedulers, prefill's outbox and decode's inbox go
through here. Touches no tensor but to copy a tail through the pool. Used on the step thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from core.block_hash import BlockHash, child_hash, hash_blocks, root_hash, token_bytes
from core.errors import TransferCorrupt
from core.kv_layout import KVLayout
from core.request import Request
from engine.kv.allocator import BlockAllocator
from engine.kv.pool import KVPool
from engine.kv.reservation import Reservation
from engine.sequence import Sequence


class KVCache:
    """Blocks for sequences, all or none: a method that returns False or None has changed nothing.

    `num_query_tokens` and `num_hit_tokens` count prompt tokens looked up and found at first starts.
    """

    def __init__(self, pool: KVPool, allocator: BlockAllocator, enable_prefix_cache: bool = True) -> None:
        assert pool.num_blocks == allocator.num_blocks
        self.layout: KVLayout = pool.layout
        self.pool = pool
        self.allocator = allocator
        self.enable_prefix_cache = enable_prefix_cache
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    # ------------------------------------------------------------ names

    def hash_root(self, request: Request) -> BlockHash:
        """The parent of the first block's name: salt, layout (with the model) and adapter."""
        return root_hash(request.cache_salt, self.layout.fingerprint, request.adapter)

    def match(self, block_hashes: Items[BlockHash]) -> list[int]:
        """Blocks of the longest cached prefix of a chain of names; not held, so valid until the next
        allocation.
        """
        return self.allocator.prefix_cache.match(block_hashes) if self.enable_prefix_cache else []

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """How many tokens `try_start` would find cached now; for estimates of the work that waits."""
        return len(self._match(sequence)[0]) * self.layout.block_size

    # ------------------------------------------------------------ sequences

    def try_start(self, sequence: Sequence, num_extra_tokens: int = 0) -> bool:
        """Give a sequence without blocks room for its tokens and `num_extra_tokens` more.

        Takes over the longest cached prefix in whole blocks, but leaves at least one token to compute. Sets
        `block_table`, `block_hashes`, `num_computed_tokens` and, at the first start, `num_cached_tokens`.
        """
        assert not sequence.block_table
        assert sequence.num_computed_tokens == 0
        shared, block_hashes = self._match(sequence)
        num_blocks = self.layout.num_blocks(sequence.num_tokens + num_extra_tokens)
        new = self.allocator.try_acquire(shared, num_blocks - len(shared), sequence.request.cache_salt)
        if new is None:
            return False
        # what was lent or handed over, and not claimed, does not say whose it is
        self.allocator.own(shared, sequence.request.cache_salt)
        sequence.block_table = shared + new
        sequence.block_hashes = block_hashes
        sequence.num_computed_tokens = len(shared) * self.layout.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_query_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
        return True

    def try_grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the table so that `num_tokens` tokens fit."""
        num_new = self.layout.num_blocks(num_tokens) - len(sequence.block_table)
        if num_new <= 0:
            return True
        new = self.allocator.try_allocate(num_new, sequence.request.cache_salt)
        if new is None:
            return False
        sequence.block_table += new
        return True

    def publish_full(self, sequence: Sequence) -> None:
        """Name each block that became full of computed tokens since the last call, prompt or generated, and
        make it findable.
        """
        size = self.layout.block_size
        block_hashes = sequence.block_hashes
        for index in range(len(block_hashes), sequence.num_computed_tokens // size):
            parent = block_hashes[-1] if block_hashes else self.hash_root(sequence.request)
            tokens = token_bytes(sequence.token_ids[index * size : (index + 1) * size])
            block_hashes.append(child_hash(parent, tokens))
            self._publish(sequence.block_table, index, block_hashes[-1], sequence.request.cache_salt)

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back (finished, cancelled or preempted); nothing of the sequence is computed any
        more.
        """
        self.allocator.release(sequence.block_table)
        sequence.block_table = []
        sequence.block_hashes = []
        sequence.num_computed_tokens = 0

    def fork(
        self,
        sequence: Sequence,
        sample_index: int,
        emitted: tuple[int, ...] | None = None,
        num_extra_tokens: int = 0,
    ) -> Sequence | None:
        """Another sample of the same request that starts from what `sequence` has computed.

        Full blocks are shared; a partly filled tail is copied into a block of its own, at once: a copy that
        waited for a later step could meet a source or target that has changed hands by then. `emitted` are
        the new sample's output tokens (default: those of `sequence`), which must agree as far as computed.
        """
        num_computed = sequence.num_computed_tokens
        prompt = sequence.request.prompt_token_ids
        token_ids = list(sequence.token_ids) if emitted is None else [*prompt, *emitted]
        assert token_ids[:num_computed] == sequence.token_ids[:num_computed], (
            "samples differ in what is computed"
        )
        num_full = num_computed // self.layout.block_size
        shared = sequence.block_table[:num_full]
        num_blocks = self.layout.num_blocks(len(token_ids) + num_extra_tokens)
        new = self.allocator.try_acquire(shared, num_blocks - num_full)
        if new is None:
            return None
        sample = Sequence(sequence.request, sample_index, token_ids, sequence.max_context, num_computed)
        sample.num_cached_tokens = sequence.num_cached_tokens
        sample.block_table = shared + new
        sample.block_hashes = sequence.block_hashes[:num_full]
        self._copy_tail(sequence.block_table, sample.block_table, num_computed)
        return sample

    # ------------------------------------------------------------ tickets

    def reserve(
        self,
        block_hashes: Items[BlockHash],
        num_tokens: int,
        num_growth_tokens: int = 0,
        num_samples: int = 1,
        is_read: bool = True,
    ) -> Reservation | None:
        """Blocks for a ticket, or None if it has to be refused.

        Cached blocks of the chain are held (none if not `is_read`), all others allocated, with room for
        `num_growth_tokens` for each sample. `block_hashes` names each full block of the `num_tokens` tokens.
        """
        num_full = num_tokens // self.layout.block_size
        assert len(block_hashes) == num_full
        shared = self.match(block_hashes) if is_read else []
        num_table = self.layout.num_blocks(num_tokens + num_growth_tokens)
        num_own = num_table - num_full
        new = self.allocator.try_acquire(shared, num_table - len(shared) + (num_samples - 1) * num_own)
        if new is None:
            return None
        num_first = num_table - len(shared)
        starts = [num_first + index * num_own for index in range(num_samples - 1)]
        return Reservation(
            num_tokens,
            tuple(block_hashes),
            (*shared, *new[:num_first]),
            tuple(tuple(new[start : start + num_own]) for start in starts),
            tuple(range(len(shared))),
        )

    def publish_reserved(self, reservation: Reservation) -> None:
        """After a verified commit: the full blocks become findable."""
        for index in range(len(reservation.held), len(reservation.block_hashes)):
            self._publish(reservation.table, index, reservation.block_hashes[index])

    def abandon(self, reservation: Reservation) -> None:
        """Give a reservation's blocks back; published ones stay cached."""
        self.allocator.release(reservation.block_ids)

    def claim(self, reservation: Reservation, sequences: Items[Sequence]) -> None:
        """Turn a committed reservation into the tables of its samples, at most as many as were reserved for.

        Samples after the first get their copy of the tail. Blocks of samples that do not come are given back.
        Raises TransferCorrupt, and leaves the reservation as it is, if its names are not those of the
        sequences' tokens.
        """
        num_full = len(reservation.block_hashes)
        assert sequences
        for sequence in sequences:
            self._check_names(reservation, sequence)
        # a ticket does not say whose it is; who claims it does
        self.allocator.own(reservation.table[:num_full], sequences[0].request.cache_salt)
        for index, sequence in enumerate(sequences):
            assert not sequence.block_table
            if index == 0:
                sequence.block_table = list(reservation.table)
            else:
                shared = reservation.table[:num_full]
                self.allocator.hold(shared)
                sequence.block_table = [*shared, *reservation.sample_tables[index - 1]]
                self._copy_tail(reservation.table, sequence.block_table, reservation.num_tokens)
            sequence.block_hashes = list(reservation.block_hashes)
            sequence.num_computed_tokens = reservation.num_tokens
        for own in reservation.sample_tables[len(sequences) - 1 :]:
            self.allocator.release(own)

    # ------------------------------------------------------------ inside

    def _match(self, sequence: Sequence) -> tuple[list[int], list[BlockHash]]:
        if not self.enable_prefix_cache or not _may_read(sequence.request):
            return [], []
        names: list[BlockHash] = []
        blocks = self.allocator.prefix_cache.match(self._chain(sequence, names))
        return blocks, names[: len(blocks)]

    def _chain(self, sequence: Sequence, names: list[BlockHash]) -> Iterator[BlockHash]:
        """Names of the full blocks before the last token, hashed only as far as they are asked for; each is
        appended to `names`.
        """
        size = self.layout.block_size
        parent = self.hash_root(sequence.request)
        for end in range(size, sequence.num_tokens, size):
            parent = child_hash(parent, token_bytes(sequence.token_ids[end - size : end]))
            names.append(parent)
            yield parent

    def _publish(self, table: Items[int], index: int, name: BlockHash, owner: str = "") -> None:
        if self.enable_prefix_cache:
            self.allocator.publish(table[index], name, table[index - 1] if index > 0 else None, owner)

    def _check_names(self, reservation: Reservation, sequence: Sequence) -> None:
        tokens = sequence.token_ids[: reservation.num_tokens]
        names = hash_blocks(self.hash_root(sequence.request), tokens, self.layout.block_size)
        if len(tokens) != reservation.num_tokens or tuple(names) != reservation.block_hashes:
            raise TransferCorrupt("the blocks that were handed over are not those of the request")

    def _copy_tail(self, source: Items[int], target: Items[int], num_tokens: int) -> None:
        num_full, num_tail = divmod(num_tokens, self.layout.block_size)
        if num_tail:
            assert self.allocator.is_writable(target[num_full])
            self.pool.copy_blocks([(source[num_full], target[num_full])])


def _may_read(request: Request) -> bool:
    """Prompt logprobs need the logits of each prompt token, so each has to be computed."""
    return request.is_prefix_cache_read and request.sampling.prompt_logprobs is None
