"""What a user of the `openai` package does, run in an environment of its own: `python openai_program.py URL`.

Prints `ok` at its end; imports nothing of this repository.
"""

import sys

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0, timeout=60)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the capital of France?"}]

chat = client.chat.completions.create(
    model=model,
    messages=messages,
    max_completion_tokens=12,
    temperature=0,
    seed=1,
    logprobs=True,
    top_logprobs=2,
)
assert chat.object == "chat.completion", chat
text = chat.choices[0].message.content
assert text, chat
assert chat.choices[0].message.role == "assistant", chat
assert chat.usage.completion_tokens <= 12, chat
assert chat.usage.prompt_tokens_details.cached_tokens >= 0, chat
assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2, chat

streamed, usage, finish = "", None, None
for chunk in client.chat.completions.create(
    model=model,
    messages=messages,
    max_completion_tokens=12,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
):
    if chunk.usage is not None:
        usage = chunk.usage
    for choice in chunk.choices:
        streamed += choice.delta.content or ""
        finish = choice.finish_reason or finish
assert streamed == text, (streamed, text)
assert finish == chat.choices[0].finish_reason, finish
assert usage.completion_tokens == chat.usage.completion_tokens, usage

completion = client.completions.create(
    model=model, prompt="The capital of France is", max_tokens=8, temperature=0, logprobs=1
)
text = completion.choices[0].text
assert text.startswith(" Paris"), completion
assert len(completion.choices[0].logprobs.tokens) == 8, completion
pieces = client.completions.create(
    model=model, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
)
assert "".join(piece.choices[0].text for piece in pieces) == text

two = client.completions.create(model=model, prompt=["A cat", "Two dogs"], n=2, max_tokens=4, seed=5)
assert [choice.index for choice in two.choices] == [0, 1, 2, 3], two

for wrong, kind in (
    ({"model": "no-such-model", "messages": messages}, openai.NotFoundError),
    ({"model": model, "messages": messages, "temperature": 9}, openai.BadRequestError),
    ({"model": model, "messages": []}, openai.BadRequestError),
):
    refusal = None
    try:
        client.chat.completions.create(**wrong)
    except kind as error:
        refusal = error
    assert refusal is not None, f"{wrong} was accepted"
    assert refusal.body["message"], refusal

print("ok")
