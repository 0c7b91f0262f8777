"""OpenTelemetry: a daemon process that sends its spans to a collector (docs/tracing.md)."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest
from guardd_client import AsyncGuard, GuardRequestError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from tests.servers import Server
from tests.web import web


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.endpoint = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(headers["content-length"]))
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        told = ExportTraceServiceRequest.FromString(body)
        self.spans += [span for each in told.resource_spans for scope in each.scope_spans for span in scope.spans]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


def attributes(span: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in span.attributes}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield made
    server.close()


async def test_a_decision_is_a_span_under_its_callers(embedded: Server, prefix: str, collector: Collector) -> None:
    """Names by the conventions, the script inside, events for a stop, a doubt and a kill; no argument anywhere."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    tracer = TracerProvider().get_tracer("an agent")
    async with web(embedded.url, prefix, "--otel", env=env) as served, AsyncGuard(served.daemon.url) as guard:
        run = guard.run("r", agent="support", limits={"max_denied": 1, "max_no_progress": None})
        with tracer.start_as_current_span("agent step") as step:
            answer = await run.before("refund", {"order": "hunter2"}, idempotency_key="k")
        parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
        await served.ask("after", {"run": "r", "call": answer["call"], "status": "retryable"}, traceparent=parent)
        assert (await run.before("refund", {"order": "hunter2"}, idempotency_key="k")).reason == "in_doubt"
        await guard.call("kill", {"run": "r2", "reason": "incident_stop"})
        with pytest.raises(GuardRequestError):
            await guard.call("inspect", {"run": "nobody"})
        assert await served.daemon.stop() == 0
    first, second = collector.named("guardd before")
    assert first.trace_id.hex() == f"{step.get_span_context().trace_id:032x}"
    assert first.parent_span_id.hex() == f"{step.get_span_context().span_id:016x}"
    assert attributes(first) == {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "refund", "gen_ai.tool.call.id": answer["call"],
        "gen_ai.agent.name": "support", "guardd.run": "r", "guardd.action": "execute",
    }  # fmt: skip
    (script,) = [span for span in collector.named("script before") if span.parent_span_id == first.span_id]
    assert attributes(script)["guardd.script"] == "before"
    (after,) = collector.named("guardd after")
    assert (after.trace_id.hex(), after.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    assert [event.name for event in second.events] == ["guardd.stop"]
    assert second.parent_span_id == b""
    (kill,) = collector.named("guardd kill")
    assert [event.name for event in kill.events] == ["guardd.kill"]
    (inspect,) = collector.named("guardd inspect")
    assert attributes(inspect)["error.type"] == "unknown_run"
    assert "hunter2" not in str(collector.spans)
    assert {span.name.split()[0] for span in collector.spans} == {"guardd", "script"}, "none outside of an operation"


async def test_a_collector_that_is_away_is_in_nobodys_way(embedded: Server, prefix: str) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    async with web(embedded.url, prefix, "--otel", env=env) as served, AsyncGuard(served.daemon.url) as guard:
        run = guard.run("r", agent="a", limits={"max_no_progress": None})
        for number in range(20):
            assert (await run.before("look", {"n": number})).action == "execute"
        assert await served.daemon.stop() == 0
