"""Running: the sequences that hold blocks, in order of arrival.

Owns who of them still reads and who is a stream, with a row among the columns of the next step; and the sums
over all of them. Decides nothing: who comes and goes is the scheduler's choice. Used on the step thread.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator

from engine.sequence import Sequence
from engine.stream_rows import StreamRows


class Running:
    """`arrival` gives a sequence's place in the order; those that share one are ordered as they came here.

    `reading` are the ones that have more than their last output token to compute. Readers of both lists must
    not change them.
    """

    def __init__(
        self, block_size: int, eos_token_ids: frozenset[int], arrival: Callable[[Sequence], int]
    ) -> None:
        self._block_size = block_size
        self._arrival = arrival
        self._all: list[Sequence] = []
        self.reading: list[Sequence] = []
        self.streams = StreamRows(block_size, eos_token_ids)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        """Oldest first."""
        return iter(self._all)

    @property
    def newest(self) -> Sequence:
        return self._all[-1]

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to compute before each has its next one sampled."""
        return len(self.streams) + sum(sequence.num_uncomputed_tokens for sequence in self.reading)

    @property
    def num_held_slots(self) -> int:
        """Token slots in their blocks; a shared block counts for each of them."""
        num_blocks = self.streams.num_blocks + sum(len(item.block_table) for item in self.reading)
        return num_blocks * self._block_size

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that those slots hold."""
        return self.streams.num_computed_tokens + sum(item.num_computed_tokens for item in self.reading)

    def enter(self, sequence: Sequence) -> None:
        """Take in a sequence, as a reader."""
        insort(self._all, sequence, key=self._arrival)
        insort(self.reading, sequence, key=self._arrival)

    def leave(self, sequence: Sequence) -> None:
        """Let a sequence go, while it still has its blocks."""
        self._all.remove(sequence)
        if sequence in self.streams:
            self.streams.remove(sequence)
        else:
            self.reading.remove(sequence)

    def settle_readers(self) -> None:
        """Readers that have come to their last output token are streams from here on."""
        for sequence in list(self.reading):
            if sequence.num_output_tokens > 0 and sequence.num_uncomputed_tokens == 1:
                self.reading.remove(sequence)
                index = bisect_right(self.streams.sequences, self._arrival(sequence), key=self._arrival)
                self.streams.insert(index, sequence)

    def check(self) -> None:
        """Assert that each one reads or has a row, and that the rows are right."""
        assert sorted(map(id, self._all)) == sorted(map(id, (*self.reading, *self.streams)))
        self.streams.check()
