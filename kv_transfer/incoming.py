"""IncomingTicket: what the receiver knows of one offered ticket, and all checks of its frames and commit.

No I/O and no payload is kept. Not thread-safe: lives on the IO loop.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace

from core.errors import ServingError, StaleEpoch, TicketExpired, TransferCorrupt
from core.handoff import HandoffTicket
from kv_transfer.codec import Frame
from kv_transfer.transport import CommitClaim, CommitReceipt, Fence


class IncomingTicket:
    """From the offer on. After `end` only the outcome stays, for repeated messages."""

    def __init__(self, ticket: HandoffTicket, time_left_s: float) -> None:
        self.ticket_id = ticket.ticket_id
        self.time_left_s = time_left_s
        self.offering: asyncio.Task[tuple[int, ...]] | None = None
        self.committing: asyncio.Task[CommitReceipt] | None = None
        self.error: ServingError | None = None
        self.transport = ""
        self.first_frame_at: float | None = None
        self.is_reserved = False
        self._ticket: HandoffTicket | None = ticket
        self._sender_epoch = ticket.prefill.epoch
        self._block_bytes = ticket.layout.block_bytes
        self._held: frozenset[int] = frozenset()
        self._runs: dict[int, Frame] = {}  # written or being written, by first index, without payload
        self._claimed: dict[int, int] = {}  # index in the ticket → first index of its run
        self._is_written: set[int] = set()  # first indexes
        self._num_written_blocks = 0

    def is_same_offer(self, ticket: HandoffTicket) -> bool:
        return self._ticket == ticket

    def check_sender(self, fence: Fence) -> None:
        if fence.sender_epoch != self._sender_epoch:
            raise StaleEpoch(
                "the ticket was offered by another incarnation of prefill",
                ticket_id=self.ticket_id,
                offered_by=self._sender_epoch,
                named=fence.sender_epoch,
            )

    def hold(self, indexes: tuple[int, ...]) -> None:
        self._held = frozenset(indexes)
        self.is_reserved = True

    def accept(self, frame: Frame) -> bool:
        """Check a frame; True when its payload is to be written, False for an exact repetition.

        Raises TransferCorrupt for a payload that is damaged or does not belong where the frame wants it. One
        that lies in staging memory is not looked at: what is written of it has to be checked.
        """
        assert self._ticket is not None
        frame.verify(self._block_bytes)
        end = frame.first_index + frame.num_blocks
        if frame.num_blocks < 1 or end > self._ticket.num_blocks:
            raise self._corrupt(frame, f"lies outside the {self._ticket.num_blocks} blocks of the ticket")
        known = self._runs.get(frame.first_index)
        if known is not None and known.num_blocks == frame.num_blocks:
            if known.is_on_device != frame.is_on_device:
                # sent again another way, which sums up differently; the sender claims the last one
                known = self._runs[frame.first_index] = replace(frame, payload=memoryview(b""), place=None)
            if known.checksum == frame.checksum:
                return frame.first_index not in self._is_written
        for index in range(frame.first_index, end):
            if index in self._held:
                raise self._corrupt(
                    frame, f"overwrites block {index}, which decode holds and others may read"
                )
            if index in self._claimed:
                raise self._corrupt(frame, f"overwrites block {index} with other content")
        for index in range(frame.first_index, end):
            self._claimed[index] = frame.first_index
        self._runs[frame.first_index] = replace(frame, payload=memoryview(b""), place=None)
        return True

    def note_written(self, first_index: int) -> int:
        """The run is in the pool; returns the payload bytes to count, 0 if they were counted before."""
        run = self._runs.get(first_index)
        if run is None or first_index in self._is_written:
            return 0
        self._is_written.add(first_index)
        self._num_written_blocks += run.num_blocks
        return run.num_blocks * self._block_bytes

    def check_commit(self, claim: CommitClaim) -> CommitReceipt:
        """Raises TransferCorrupt unless what is claimed is here and, with the held blocks, is all."""
        assert self._ticket is not None
        checksum = 0
        for first_index in self._is_written:
            checksum ^= self._runs[first_index].checksum
        found = (self._ticket.num_tokens, self._num_written_blocks, checksum)
        claimed = (claim.num_tokens, claim.num_pushed_blocks, claim.checksum)
        if found != claimed:
            raise TransferCorrupt(
                f"the commit claims (tokens, blocks, checksum) {claimed}, but {found} are here",
                ticket_id=self.ticket_id,
            )
        if self._num_written_blocks + len(self._held) != self._ticket.num_blocks:
            raise TransferCorrupt(
                f"{self._num_written_blocks} written and {len(self._held)} held blocks are not "
                f"the {self._ticket.num_blocks} of the ticket",
                ticket_id=self.ticket_id,
            )
        return CommitReceipt(self._num_written_blocks, self._num_written_blocks * self._block_bytes)

    def end(self, error: ServingError | None) -> None:
        """No further frame is taken; `error` is what later messages are answered, None after a commit."""
        # without its traceback, whose frames refer to payloads
        self.error = copy.copy(error)
        self._ticket = None
        self._runs.clear()
        self._claimed.clear()
        self._is_written.clear()

    def refusal(self) -> ServingError:
        """What a message that comes too late is answered."""
        if self.error is None:
            return TicketExpired("the ticket was committed before", ticket_id=self.ticket_id)
        return copy.copy(self.error)

    @property
    def is_open(self) -> bool:
        """Frames may still come."""
        return self._ticket is not None

    def _corrupt(self, frame: Frame, problem: str) -> TransferCorrupt:
        return TransferCorrupt(
            f"a frame of blocks {frame.first_index}..{frame.first_index + frame.num_blocks - 1} {problem}",
            ticket_id=self.ticket_id,
            first_index=frame.first_index,
            num_blocks=frame.num_blocks,
        )
