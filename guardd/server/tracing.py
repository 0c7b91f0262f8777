"""OpenTelemetry: a span an operation, one a script within it, events for stops and doubts (docs/tracing.md). Needs `guardd[otel]`.

Attributes follow the GenAI semantic conventions where they have a name for it. Arguments and results are in none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from guardd import __version__
from guardd.model.answers import Answer
from guardd.model.errors import GuardError

_NAMED = {"tool": "gen_ai.tool.name", "call": "gen_ai.tool.call.id", "agent": "gen_ai.agent.name", "run": "guardd.run"}
_TOOL_CALLS = frozenset({"before", "after", "renew"})


class Tracing:
    """Makes spans. provider: None: sends them by OTLP over HTTP, as the OTEL_* variables say."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        if provider is None:
            provider = TracerProvider(
                resource=Resource.create({"service.name": "guardd", "service.version": __version__})
            )
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._provider = provider
        self._tracer = provider.get_tracer("guardd", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def operation(self, method: str, params: Mapping[str, Any], parent: str) -> Iterator[Span]:
        """The span of one operation, under the caller's when `parent` is its W3C `traceparent`."""
        context = self._propagator.extract({"traceparent": parent}) if parent else None
        attributes = {name: value for key, name in _NAMED.items() if isinstance(value := params.get(key), str)}
        if method in _TOOL_CALLS:
            attributes["gen_ai.operation.name"] = "execute_tool"
        with self._tracer.start_as_current_span(
            f"guardd {method}",
            context,
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except GuardError as error:
                span.set_attribute("error.type", error.name)
                span.set_status(StatusCode.ERROR, error.name)
                raise

    @staticmethod
    def answered(span: Span, method: str, answer: Any) -> None:
        """What came of it; a stop, a doubt and a kill are events, too."""
        if not isinstance(answer, Answer):
            return
        span.set_attribute("guardd.action", answer.action)
        if answer.reason:
            span.set_attribute("guardd.reason", answer.reason)
        if method == "kill":
            span.add_event("guardd.kill", {"guardd.reason": answer.reason})
        elif answer.action == "stop":
            span.add_event("guardd.stop", {"guardd.reason": answer.reason})
        elif answer.reason == "in_doubt":
            span.add_event("guardd.in_doubt")

    @contextmanager
    def script(self, name: str) -> Iterator[None]:
        """One script, to the store and back; outside of an operation none is made."""
        if not trace.get_current_span().get_span_context().is_valid:
            yield
            return
        attributes = {"db.system.name": "redis", "db.operation.name": "EVALSHA", "guardd.script": name}
        with self._tracer.start_as_current_span(f"script {name}", kind=SpanKind.CLIENT, attributes=attributes):
            yield

    def stop(self) -> None:
        """Sends what waits."""
        self._provider.shutdown()
