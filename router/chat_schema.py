"""The body of /v1/chat/completions. Owns its fields and what a message may be; shared rules are in
`schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field, model_validator

from core.errors import InvalidRequest
from router.schema import INERT_FIELDS, ApiModel, SamplingFields, drop_inert, without_nulls

_INERT: Mapping[str, tuple[Any, ...]] = {
    **INERT_FIELDS,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
}
_INERT_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
    "tool_call_id": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def _role(value: Any) -> str:
    """Templates know no `developer`; it is the newer name of `system`."""
    if not isinstance(value, str) or value not in _ROLES:
        raise ValueError(f"must be one of {', '.join(_ROLES)}")
    return _ROLES[value]


def _content(value: Any) -> str:
    """Text, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} must be of type text, other content is not supported")
        if unknown := set(part) - {"type", "text"}:
            raise ValueError(f"part {index} has the unknown field {min(unknown)}")
        texts.append(part["text"])
    return "\n".join(texts)


def _without_inert_parts(index: int, message: Any) -> Any:
    """Here and not in `Message`, which does not know its place among the messages."""
    if not isinstance(message, dict):
        return message
    return drop_inert(without_nulls(message), _INERT_IN_MESSAGE, f"messages[{index}].")


class Message(ApiModel):
    """One turn. `name` is handed to the template, which decides whether to print it."""

    role: Annotated[str, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None


class ChatBody(SamplingFields):
    """A conversation; its next turn is answered `n` times, or its last one continued."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        body = drop_inert(without_nulls(body), _INERT)
        if isinstance(messages := body.get("messages"), list):
            body["messages"] = [_without_inert_parts(index, item) for index, item in enumerate(messages)]
        return body

    @model_validator(mode="after")
    def _is_consistent(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs is only allowed with logprobs", param="top_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant", param="continue_final_message"
            )
        return self

    @property
    def is_generation_prompt_added(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as a template sees them."""
        return [message.model_dump(exclude_none=True) for message in self.messages]
