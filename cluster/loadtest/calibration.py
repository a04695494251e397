"""Finding the words of one token for a server, by its own counts or by a tokenizer's file.

Owns the questions; which words and how they are tried belongs to `vocabulary`. Runs on the load test's event
loop.
"""

from __future__ import annotations

import asyncio

from tokenizers import Tokenizer

from cluster.loadtest.client import Client, NoAnswer
from cluster.loadtest.prompts import Ask, request_body
from cluster.loadtest.record import Outcome
from cluster.loadtest.settings import Target
from cluster.loadtest.vocabulary import Count, NoVocabulary, Vocabulary, calibrate
from core.errors import InvalidConfig

_MAX_TRIES = 20
_REFUSED_S = 0.5


async def find_vocabulary(target: Target, model: str, client: Client) -> Vocabulary:
    """Raises NoAnswer if the server does not answer, or its prompts cannot be given exact lengths."""
    count = _by_server(target, model, client) if target.tokenizer is None else _by_file(target)
    try:
        return await calibrate(count)
    except NoVocabulary as error:
        raise NoAnswer(f"prompts of exact lengths cannot be made: {error}") from error


def _by_server(target: Target, model: str, client: Client) -> Count:
    async def count(text: str) -> int:
        for _ in range(_MAX_TRIES):
            call = client.call(Ask(request_body(target, model, [text], 1), 0, 1), 0.0)
            record = await call.run()
            if record.outcome is not Outcome.REFUSED:
                break
            await asyncio.sleep(_REFUSED_S)  # it serves others: that passes
        if not record.is_completed:
            raise NoAnswer(f"a first request failed: {record.detail}")
        if "prompt_tokens" not in call.usage:
            raise NoAnswer("the server does not count prompt tokens: give its tokenizer.json by --tokenizer")
        return record.num_prompt_tokens

    return count


def _by_file(target: Target) -> Count:
    try:
        tokenizer = Tokenizer.from_file(str(target.tokenizer))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidConfig(f"{target.tokenizer} cannot be read: {error}", key="tokenizer") from error

    async def count(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    return count
