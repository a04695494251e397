"""Spans reach a collector over OTLP, and a collector that is away costs no answer."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from core.ids import Role
from router.tracing_config import SpanExporter, TracingConfig
from tests.unit.router.api import serving
from tests.unit.router.scripted import ScriptedWorker


class Collector:
    """Takes what is posted to it, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        taken = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                taken.append(ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.server.shutdown()
        self._thread.join(5.0)
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.stop()


def _workers() -> tuple[ScriptedWorker, ScriptedWorker]:
    return ScriptedWorker(Role.PREFILL, "p"), ScriptedWorker(Role.DECODE, "d")


async def test_spans_arrive_at_the_latest_when_the_router_stops(collector: Collector) -> None:
    tracing = TracingConfig(SpanExporter.OTLP, collector.endpoint, service_name="tested")
    async with serving(*_workers(), tracing=tracing) as api:
        await api.chat(max_tokens=3)
    (resource,) = [spans for request in collector.requests for spans in request.resource_spans]
    services = {
        item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
    }
    assert services == {"tested"}
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert {"chat toy", "baton.prefill", "baton.decode"} <= names


async def test_a_collector_that_is_away_costs_no_answer() -> None:
    tracing = TracingConfig(SpanExporter.OTLP, "http://127.0.0.1:9/v1/traces")
    async with serving(*_workers(), tracing=tracing) as api:
        for _ in range(3):
            assert (await api.chat(max_tokens=3)).status_code == 200
