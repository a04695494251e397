"""ApiCall: what one HTTP request asks for, the same for both endpoints.

Owns the way from a validated body to token ids, sampling parameters and text settings, with the operator's
limits and the model's defaults. Does not know the workers: how long an answer may get is decided at
admission. Pure, so that large bodies may be read on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.errors import ContextTooLong, InvalidRequest
from core.request import SamplingParams
from router.chat_schema import ChatBody
from router.completion_schema import CompletionBody
from router.config import DefaultsSetting, RouterConfig
from router.schema import SamplingFields
from router.served_model import SamplingDefaults, ServedModel
from router.text import TextSettings

_DEFAULT_COMPLETION_TOKENS = 16
# of a text with more characters per token of context a part is looked at first; it may be enough to refuse it
_CHARS_PER_TOKEN = 16
# a text that is cut in the middle of a word may have so many tokens more than the whole has up to there
_CUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what echo returns, empty for ids that are not echoed. `has_added_bos`: the first id is not
    in that text.
    """

    token_ids: tuple[int, ...]
    text: str
    has_added_bos: bool = False


@dataclass(frozen=True, slots=True)
class ApiCall:
    """`sampling` holds everything but `max_tokens` and the seed, which are settled for each prompt.

    `max_tokens` None: up to `default_max_tokens`, and where that is None up to the end of the context.
    """

    prompts: tuple[Prompt, ...]
    param: str
    n: int
    sampling: SamplingParams
    seed: int | None
    max_tokens: int | None
    default_max_tokens: int | None
    text: TextSettings
    is_streamed: bool
    is_usage_included: bool
    is_echoed: bool = False
    are_token_ids_returned: bool = False


def completion_call(
    body: CompletionBody, model: ServedModel, config: RouterConfig, max_context: int
) -> ApiCall:
    """The call that a completions body means. Raises InvalidRequest or ContextTooLong."""
    _check_limits(body, model, config, body.logprobs, "logprobs")
    if len(body.prompt) > config.max_prompts:
        raise InvalidRequest(f"at most {config.max_prompts} prompts are allowed", param="prompt")
    return ApiCall(
        prompts=tuple(
            _prompt(
                item, model, max_context, body.echo, f"prompt[{index}]" if len(body.prompt) > 1 else "prompt"
            )
            for index, item in enumerate(body.prompt)
        ),
        param="prompt",
        n=body.n,
        sampling=_sampling(
            body, model, config, body.logprobs, prompt_logprobs=body.logprobs if body.echo else None
        ),
        seed=body.seed,
        max_tokens=body.max_tokens,
        default_max_tokens=max(_DEFAULT_COMPLETION_TOKENS, body.min_tokens),
        text=_text(body),
        is_streamed=body.stream,
        is_usage_included=body.is_usage_included,
        is_echoed=body.echo,
        are_token_ids_returned=body.return_token_ids,
    )


def chat_call(body: ChatBody, model: ServedModel, config: RouterConfig, max_context: int) -> ApiCall:
    """The call that a chat body means. Raises InvalidRequest or ContextTooLong."""
    num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    _check_limits(body, model, config, num_logprobs, "top_logprobs")
    template = model.chat_template
    if template is None:
        raise InvalidRequest(
            f"model {model.name} has no chat template; use /v1/completions", param="messages"
        )
    text = template.render(
        body.template_messages(),
        add_generation_prompt=body.is_generation_prompt_added,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
    prompt = Prompt(_encode(model.tokenizer.encode_rendered, text, max_context, "messages"), text)
    return ApiCall(
        prompts=(prompt,),
        param="messages",
        n=body.n,
        sampling=_sampling(body, model, config, num_logprobs),
        seed=body.seed,
        max_tokens=body.max_tokens if body.max_tokens is not None else body.max_completion_tokens,
        default_max_tokens=None,
        text=_text(body),
        is_streamed=body.stream,
        is_usage_included=body.is_usage_included,
        are_token_ids_returned=body.return_token_ids,
    )


def _prompt(
    item: str | tuple[int, ...], model: ServedModel, max_context: int, is_echoed: bool, param: str
) -> Prompt:
    tokenizer = model.tokenizer
    if isinstance(item, str):
        ids = _encode(tokenizer.encode_prompt, item, max_context, param)
        bos = tokenizer.bos_token_id
        has_bos = bos is not None and ids[:1] == (bos,)
        return Prompt(ids, item, has_bos and not item.startswith(tokenizer.named_tokens["bos_token"]))
    if len(item) > max_context:
        raise ContextTooLong(
            f"the maximum context length is {max_context} tokens, the prompt has {len(item)}",
            param=param,
            max_context=max_context,
            num_prompt_tokens=len(item),
        )
    if not 0 <= min(item) <= max(item) < model.vocab_size:
        raise InvalidRequest(f"{param}: token ids must lie in 0..{model.vocab_size - 1}", param=param)
    return Prompt(item, tokenizer.bytes.text(item) if is_echoed else "")


def _encode(encode: Callable[[str], list[int]], text: str, max_context: int, param: str) -> tuple[int, ...]:
    try:
        _refuse_by_part(encode, text, max_context, param)
        ids = tuple(encode(text))
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=param) from error
    if not ids:
        raise InvalidRequest(f"{param}: the prompt is empty, it has no tokens", param=param)
    return ids


def _refuse_by_part(encode: Callable[[str], list[int]], text: str, max_context: int, param: str) -> None:
    """Raise ContextTooLong if a beginning of `text` is too long already, without encoding the rest."""
    num_chars = _CHARS_PER_TOKEN * max_context
    while num_chars < len(text):
        num_tokens = len(encode(text[:num_chars])) - _CUT_TOKENS
        if num_tokens > max_context:
            raise ContextTooLong(
                f"the maximum context length is {max_context} tokens, the prompt has at least {num_tokens}",
                param=param,
                max_context=max_context,
            )
        # where the limit is passed if the text goes on as densely, and a little further
        expected = num_chars * (max_context + _CUT_TOKENS) // max(1, num_tokens + _CUT_TOKENS)
        num_chars = max(2 * num_chars, expected + expected // 4)


def _check_limits(
    body: SamplingFields, model: ServedModel, config: RouterConfig, num_logprobs: int | None, param: str
) -> None:
    checks = (
        (body.n <= config.max_n, "n", f"at most {config.max_n} is allowed"),
        (
            len(body.stop) <= config.max_stop_strings,
            "stop",
            f"at most {config.max_stop_strings} strings are allowed",
        ),
        (
            all(len(stop) <= config.max_stop_chars for stop in body.stop),
            "stop",
            f"at most {config.max_stop_chars} characters are allowed",
        ),
        (
            len(body.stop_token_ids) <= config.max_stop_token_ids,
            "stop_token_ids",
            f"at most {config.max_stop_token_ids} ids are allowed",
        ),
        (
            all(token_id < model.vocab_size for token_id in body.stop_token_ids),
            "stop_token_ids",
            f"token ids must lie in 0..{model.vocab_size - 1}",
        ),
        (
            len(body.logit_bias) <= config.max_logit_bias,
            "logit_bias",
            f"at most {config.max_logit_bias} entries are allowed",
        ),
        (
            all(token_id < model.vocab_size for token_id, _ in body.logit_bias),
            "logit_bias",
            f"token ids must lie in 0..{model.vocab_size - 1}",
        ),
        (
            num_logprobs is None or num_logprobs <= config.max_logprobs,
            param,
            f"at most {config.max_logprobs} is allowed",
        ),
        (
            body.max_tokens is None or body.min_tokens <= body.max_tokens,
            "min_tokens",
            "must not exceed max_tokens",
        ),
    )
    for is_fine, name, problem in checks:
        if not is_fine:
            raise InvalidRequest(f"{name}: {problem}", param=name)


def _sampling(
    body: SamplingFields,
    model: ServedModel,
    config: RouterConfig,
    num_logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    uses_model = config.sampling_defaults is DefaultsSetting.MODEL
    defaults = model.defaults if uses_model else SamplingDefaults()
    top_k = defaults.top_k if body.top_k is None else body.top_k
    return SamplingParams(
        max_tokens=0,
        seed=0,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=0 if top_k < 1 else min(top_k, model.vocab_size),
        min_p=defaults.min_p if body.min_p is None else body.min_p,
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=body.stop_token_ids,
        logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _text(body: SamplingFields) -> TextSettings:
    return TextSettings(
        stops=body.stop,
        is_stop_included=body.include_stop_str_in_output,
        is_special_skipped=body.skip_special_tokens,
        min_tokens=body.min_tokens,
    )
