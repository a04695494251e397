"""TracingConfig: the section `router.tracing`. Owns its defaults; values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SpanExporter(StrEnum):
    """Where spans go. (The word for nowhere is not "off": an unquoted `off` in a YAML file is no text.)"""

    NONE = "none"
    OTLP = "otlp"


@dataclass(frozen=True, slots=True)
class TracingConfig:
    """OpenTelemetry spans of calls. They never hold what was asked or answered.

    `endpoint`: an OTLP collector's URL for traces (HTTP). `sample_ratio`: of the calls whose caller has not
    decided by a `traceparent` header.
    """

    exporter: SpanExporter = SpanExporter.NONE
    endpoint: str = "http://127.0.0.1:4318/v1/traces"
    service_name: str = "baton"
    sample_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_ratio <= 1.0:
            raise ValueError("sample_ratio must lie between 0 and 1")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must be an http:// or https:// URL")
