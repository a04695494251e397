"""ChatTemplate: messages to the text of a prompt, by the template that the model folder brings.

Owns the Jinja environment with the conventions of Hugging Face templates (sandboxed; `raise_exception`,
`tojson`, `strftime_now`, loop controls, `generation` blocks) and continuing a final message. Rendering is a
pure function; long conversations may be rendered on another thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from core.errors import InvalidConfig, InvalidRequest
from router.model_files import read_json_object

_RESERVED = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents"})

# ends in a space: a template that trims messages is told by the space it took away
_END_OF_PREFIX = "\ufdd0end-of-prefix\ufdd0 "


class ChatTemplate:
    """A compiled template. `named_tokens` (`bos_token`, …) are visible to it."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], origin: str) -> None:
        """Raises InvalidConfig naming `origin` and the line if `source` is not a valid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidConfig(
                f"chat template of {origin} is invalid in line {error.lineno}: {error.message}", key=origin
            ) from error
        self._named_tokens = dict(named_tokens)

    @classmethod
    def from_folder(cls, folder: Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """`chat_template.jinja`, else the (default) template of tokenizer_config.json, else None."""
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), named_tokens, path.name)
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidConfig(f"cannot read {path.name}: {error}", key=path.name) from error
        found = read_json_object(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(found, list):
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        return cls(found, named_tokens, "tokenizer_config.json") if isinstance(found, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends where the last message's content ends.

        Raises InvalidRequest if the template refuses the messages, or changes a final message it should leave
        open.
        """
        if taken := _RESERVED.union(self._named_tokens).intersection(variables or ()):
            raise InvalidRequest(f"{min(taken)} cannot be set", param=f"chat_template_kwargs.{min(taken)}")
        chat = [dict(message) for message in messages]
        if continue_final_message:
            chat[-1]["content"] += _END_OF_PREFIX
        try:
            text = self._template.render(
                messages=chat,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._named_tokens,
                **(variables or {}),
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses: {error.message}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template cannot render these messages: {type(error).__name__}", param="messages"
            ) from error
        return _cut_open(text) if continue_final_message else text


def _cut_open(text: str) -> str:
    mark = _END_OF_PREFIX.rstrip()
    if text.count(mark) != 1:
        raise InvalidRequest(
            "the chat template does not print the final message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    prefix, rest = text.split(mark)
    is_trimmed = not rest.startswith(" ")
    return prefix.rstrip() if is_trimmed else prefix


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it only prints
    them.
    """

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
