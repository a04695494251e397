"""The body of /v1/completions. Owns its fields and what a prompt may be; shared rules are in `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from core.errors import InvalidRequest
from router.schema import INERT_FIELDS, SamplingFields, drop_inert, without_nulls

_INERT: Mapping[str, tuple[Any, ...]] = {**INERT_FIELDS, "suffix": ("",), "prompt_logprobs": ()}

PromptInput = str | tuple[int, ...]


def _prompts(value: Any) -> tuple[PromptInput, ...]:
    """Text, ids, or a list of either; all of one kind."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if not value:
        raise ValueError("must not be an empty list")
    if all(type(item) is int for item in value):
        return (_ids(value),)
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) for item in value):
        return tuple(_ids(item) for item in value)
    raise ValueError("must be a string, a list of token ids, or a list of either, all of one kind")


def _ids(value: list[Any]) -> tuple[int, ...]:
    if not value:
        raise ValueError("must not hold an empty list of token ids")
    if not all(type(item) is int for item in value):
        raise ValueError("must hold token ids only")
    return tuple(value)


class CompletionBody(SamplingFields):
    """One or several prompts; each is answered `n` times."""

    prompt: Annotated[tuple[PromptInput, ...], BeforeValidator(_prompts)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        body = without_nulls(body)
        best_of = body.pop("best_of", None)
        if best_of is not None and (type(best_of) is not int or best_of != body.get("n", 1)):
            raise InvalidRequest("best_of is not supported unless it equals n", param="best_of")
        return drop_inert(body, _INERT)
