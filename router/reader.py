"""Reader: whom the pipeline gives a request's tokens to. A Protocol only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from core.jobs import GenerateEvent
from router.decision import Decision


class Reader(Protocol):
    """Whoever asked. Called on the event loop, in order, without gaps or repetitions."""

    def placed(self, decision: Decision) -> None:
        """The request goes to these workers now; called again after each failure."""
        ...

    def pulled(self) -> None:
        """What a worker lends of the prompt has come, or will not come."""
        ...

    def lost(self, samples: Sequence[int]) -> None:
        """What ran for these samples ended before they did; they are placed again, if that can be."""
        ...

    def read(self, event: GenerateEvent) -> bool:
        """New tokens of one sample, and once the prompt's logprobs. True: this sample needs no more."""
        ...
