"""Reader: whom the pipeline gives a request's tokens to. A Protocol only."""

from __future__ import annotations

from typing import Protocol

from core.jobs import GenerateEvent
from router.decision import Decision


class Reader(Protocol):
    """Whoever asked. Called on the event loop, in order, without gaps or repetitions."""

    def placed(self, decision: Decision) -> None:
        """The request goes to these workers now; called again after each failure."""
        ...

    def read(self, event: GenerateEvent) -> bool:
        """New tokens of one sample, and once the prompt's logprobs. True: this sample needs no more."""
        ...
