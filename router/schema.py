"""What both endpoints accept: sampling fields, and how a body that does not fit is told so.

Owns the rules of the wire: strict types, null means absent, an unknown field is refused by name, a known
field that is not supported is refused by name unless its value changes nothing. Limits that an operator sets
are checked in `api_call`. Pydantic stays inside the schema modules. Pure; used on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from core.errors import InvalidRequest

T = TypeVar("T", bound=BaseModel)

INERT_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "prompt_cache_key": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Fields that are known and not supported, with the values that ask for nothing and are therefore accepted.
"""


def parse(kind: type[T], body: object) -> T:
    """`body` as `kind`. Raises InvalidRequest that names the first field that does not fit."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None


def without_nulls(body: Any) -> Any:
    """An object without its null members: they mean the same as absent ones."""
    return (
        {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body
    )


def drop_inert(body: dict[str, Any], inert: Mapping[str, tuple[Any, ...]], path: str = "") -> dict[str, Any]:
    """`body` without those fields of `inert` that ask for nothing. Raises InvalidRequest for the others,
    named after `path`.
    """
    kept = {}
    for key, value in body.items():
        if key not in inert:
            kept[key] = value
        elif not any(type(value) is type(allowed) and value == allowed for allowed in inert[key]):
            raise InvalidRequest(f"{path}{key} is not supported", param=f"{path}{key}")
    return kept


class ApiModel(BaseModel):
    """An object of the wire."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Of several unknown fields the first is enough to say so: one error, not one for each of them."""
        if not isinstance(body, dict):
            return body
        body = without_nulls(body)
        for key in [key for key in body if key not in cls.model_fields][1:]:
            del body[key]
        return body


def _stops(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise ValueError("must be a string or a list of strings")
    if not all(values):
        raise ValueError("must not hold an empty string")
    return tuple(dict.fromkeys(values))


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("must be a list of token ids")
    return tuple(dict.fromkeys(value))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers")
    found: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError("keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("values must be numbers between -100 and 100")
        if int(key) in found:
            raise ValueError(f"token id {int(key)} is given twice")
        found[int(key)] = float(bias)
    return tuple(sorted(found.items()))


Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(ApiModel):
    """`include_obfuscation` pads OpenAI's events against traffic analysis; only "no" is supported."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(ApiModel):
    """Fields that both endpoints share. None: the client left it to us."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)] = ()
    user: str | None = None
    safety_identifier: str | None = None

    # extensions, named as other servers name them
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_token_ids)] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise InvalidRequest(
                "stream_options.include_obfuscation is not supported",
                param="stream_options.include_obfuscation",
            )
        return self

    @property
    def is_usage_included(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _first_problem(error: ValidationError) -> InvalidRequest:
    problem = error.errors(include_url=False, include_input=False)[0]
    param = _path(problem["loc"])
    if problem["type"] == "missing":
        message = f"{param} is required"
    elif problem["type"] == "extra_forbidden":
        message = f"{param} is not a known field"
    else:
        message = f"{param}: {problem['msg'].removeprefix('Value error, ')}"
    return InvalidRequest(message[:500], param=param[:200])


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
