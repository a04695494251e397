"""A prefill worker's end of the bridge: the real engine and the real sender, without a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from core.block_hash import hash_blocks
from core.clock import Deadline, MonotonicClock
from core.handoff import HandoffTicket
from core.ids import TicketId, WorkerRef, new_ticket_id
from core.request import Request
from engine.runner import ModelRunner
from engine.sequence import Sequence, new_sequence
from engine.step import ScheduledSequence, StepPlan
from kv_transfer.sender import Sender
from kv_transfer.session import SendSession


@dataclass
class Handoff:
    """A prompt that was read, its first tokens, and its ticket under way."""

    ticket: HandoffTicket
    first_tokens: tuple[int, ...]
    sequence: Sequence
    session: SendSession

    @property
    def ticket_id(self) -> TicketId:
        return self.ticket.ticket_id

    async def finish(self) -> None:
        """Push what decode lacks, and commit."""
        self.session.add_blocks(0, self.sequence.block_table)
        await self.session.finish(self.ticket.num_tokens)


class PrefillEnd:
    """Reads prompts with the reference's arithmetic and offers them to one decode worker."""

    def __init__(self, runner: ModelRunner, sender: Sender, ref: WorkerRef, decode: WorkerRef) -> None:
        self._runner = runner
        self._sender = sender
        self._ref = ref
        self._decode = decode

    def read(self, request: Request, emitted: tuple[int, ...] = ()) -> tuple[Sequence, tuple[int, ...]]:
        """Compute the KV of prompt and `emitted` tokens, and the next token of each sample."""
        sequence = new_sequence(request, 0, emitted, self._runner.max_context)
        assert self._runner.cache.try_start(sequence)
        samples = tuple(range(request.num_samples)) if request.num_samples > 1 else ()
        item = ScheduledSequence(sequence, sequence.num_uncomputed_tokens, sample_indices=samples)
        output = self._runner.run(StepPlan((item,)))
        sequence.num_computed_tokens = sequence.num_tokens
        self._runner.cache.publish_full(sequence)
        return sequence, tuple(token.token_id for token in output.sampled[0])

    def offer(
        self, request: Request, emitted: tuple[int, ...] = (), *, num_growth_tokens: int = 16
    ) -> Handoff:
        """Read the prompt and offer its ticket; nothing is pushed yet."""
        sequence, first_tokens = self.read(request, emitted)
        root = self._runner.cache.hash_root(request)
        ticket = HandoffTicket(
            ticket_id=new_ticket_id(),
            request_id=request.request_id,
            prefill=self._ref,
            decode=self._decode,
            layout=self._runner.layout,
            num_tokens=sequence.num_tokens,
            block_hashes=tuple(hash_blocks(root, sequence.token_ids, self._runner.layout.block_size)),
            num_samples=request.num_samples,
            num_growth_tokens=num_growth_tokens,
            is_prefix_cache_read=request.is_prefix_cache_read,
        )
        session = self._sender.open(ticket, Deadline.after(30.0, MonotonicClock()))
        return Handoff(ticket, first_tokens, sequence, session)

    async def close(self) -> None:
        await self._sender.close()
