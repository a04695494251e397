"""Spans: a call's way as OpenTelemetry has it, in the words of its conventions, without content."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from core.clock import MonotonicClock
from core.errors import InvalidConfig
from core.ids import Role
from router import app as router_app
from router.config import RouterConfig
from router.tracing import OpenTelemetryTracing
from router.tracing_config import TracingConfig
from tests.unit.router.api import serving
from tests.unit.router.scripted import ScriptedWorker

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "the treasure lies under the oak"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the application's spans go."""
    exporter = InMemorySpanExporter()

    def tracing_of(config: TracingConfig, clock: MonotonicClock) -> OpenTelemetryTracing:
        return OpenTelemetryTracing(config, clock, SimpleSpanProcessor(exporter))

    monkeypatch.setattr(router_app, "tracing_of", tracing_of)
    return exporter


def _workers() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def _attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_call_is_a_span_of_the_conventions_and_its_parts_lie_end_to_end_in_it(
    spans: InMemorySpanExporter,
) -> None:
    async with serving(*_workers(), plan="remote") as api:
        body = await api.chat(SECRET, max_tokens=5, temperature=0.5, seed=7, stop=["oak"])
    found = _by_name(spans)
    root = found.pop("chat toy")
    told = _attributes(root)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "toy"
    assert told["gen_ai.response.id"] == body.json()["id"]
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.input_tokens"] == body.json()["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    decode = found.pop("baton.decode")
    parts = sorted(found.values(), key=lambda span: span.start_time or 0)
    assert {"baton.tokenize", "baton.place", "baton.queue", "baton.prefill"} <= found.keys()
    assert parts[0].start_time == root.start_time
    for part, following in zip(parts, [*parts[1:], decode], strict=True):
        assert part.end_time is not None
        assert following.start_time is not None
        assert abs(part.end_time - following.start_time) <= 1000, "nanoseconds between two parts"
    for span in (*parts, decode):
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert _attributes(span)["baton.plan"] == "remote"
    assert decode.end_time == root.end_time


async def test_nothing_of_what_was_asked_or_answered_is_in_a_span(spans: InMemorySpanExporter) -> None:
    async with serving(*_workers()) as api:
        answer = (await api.complete(prompt=SECRET, max_tokens=8, stop=["treasure"], user="someone")).json()
        await api.complete(prompt=SECRET, temperature=9)
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert spans.get_finished_spans()
    for content in (*SECRET.split()[1:], answer["choices"][0]["text"], "someone"):
        assert content not in told


async def test_a_callers_trace_goes_on(spans: InMemorySpanExporter) -> None:
    async with serving(*_workers()) as api:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await api.post("/v1/completions", headers, prompt="the", max_tokens=2)
    (root,) = [span for span in spans.get_finished_spans() if span.name.startswith("text_completion")]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT


async def test_a_caller_that_does_not_want_its_trace_kept_leaves_no_span(
    spans: InMemorySpanExporter,
) -> None:
    async with serving(*_workers()) as api:
        await api.post("/v1/completions", {"traceparent": f"00-{TRACE}-{PARENT}-00"}, prompt="the")
    assert not spans.get_finished_spans()


async def test_a_refused_call_is_a_span_with_the_errors_code(spans: InMemorySpanExporter) -> None:
    async with serving(*_workers()) as api:
        await api.complete(prompt="the", temperature=9)
    (root,) = spans.get_finished_spans()
    assert root.status.status_code is StatusCode.ERROR
    assert _attributes(root)["error.type"] == "invalid_value"


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="sample_ratio"):
        TracingConfig(sample_ratio=1.5)
    with pytest.raises(ValueError, match="endpoint"):
        TracingConfig(endpoint="collector:4318")
    assert RouterConfig().tracing.exporter.value == "none"


def test_spans_that_are_wanted_without_the_library_are_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    from router.tracing import tracing_of
    from router.tracing_config import SpanExporter

    with pytest.raises(InvalidConfig, match=r"baton\[tracing\]"):
        tracing_of(TracingConfig(exporter=SpanExporter.OTLP), MonotonicClock())
