"""Tracing: spans of ended calls, sent to an OpenTelemetry collector.

Owns the tie to OpenTelemetry's SDK, which is imported only if spans are wanted (`pip install
'baton[tracing]'`), and nothing global of it. Spans are handed over when their call has ended; a thread of
the SDK sends them in batches, and drops what a collector that is away does not take. Used on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from core.clock import Clock
from core.errors import InvalidConfig
from router.spans import Span
from router.tracing_config import SpanExporter, TracingConfig

_NS = 1_000_000_000
# all tries of one batch; a stop waits as long for the last one
_SEND_TIMEOUT_S = 2.0


class Tracing(Protocol):
    """Whoever takes spans. `headers` are the call's: a `traceparent` among them is its parent."""

    def record(self, span: Span, headers: Mapping[str, str]) -> None: ...

    def close(self) -> None:
        """Send what waits; blocks for some seconds at most."""
        ...


def tracing_of(config: TracingConfig, clock: Clock) -> Tracing | None:
    """As configured; None: nobody wants spans. Raises InvalidConfig if the SDK is not installed."""
    if config.exporter is SpanExporter.NONE:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidConfig(
            f"router.tracing.exporter is otlp, but {error.name} is missing: pip install 'baton[tracing]'",
            key="router.tracing.exporter",
        ) from error
    exporter = OTLPSpanExporter(config.endpoint, timeout=_SEND_TIMEOUT_S)
    return OpenTelemetryTracing(config, clock, BatchSpanProcessor(exporter))


class OpenTelemetryTracing:
    """`processor` is what the SDK hands ended spans to."""

    def __init__(self, config: TracingConfig, clock: Clock, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._clock = clock
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({"service.name": config.service_name}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, span: Span, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind

        # the clock's moments as the wall clock's, by one reading of both
        zero = time.time_ns() - int(self._clock.now() * _NS)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        self._send(span, self._propagator.extract(carrier), zero, SpanKind.SERVER)

    def close(self) -> None:
        self._provider.shutdown()

    def _send(self, span: Span, parent: Any, zero: int, kind: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        sent = self._tracer.start_span(
            span.name,
            context=parent,
            kind=kind,
            attributes=span.attributes,
            start_time=zero + int(span.start * _NS),
        )
        for event in span.events:
            sent.add_event(event.name, event.attributes, zero + int(event.at * _NS))
        if span.error is not None:
            sent.set_status(Status(StatusCode.ERROR, span.error))
        if sent.is_recording():
            within = set_span_in_context(sent, parent)
            for child in span.children:
                self._send(child, within, zero, SpanKind.INTERNAL)
        sent.end(zero + int(span.end * _NS))
