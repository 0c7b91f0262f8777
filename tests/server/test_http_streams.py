"""What lasts over HTTP: events, slow peers, several workers, the end of the daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from guardd_client import AsyncGuard

from guardd.server.http import REQUEST_TIMEOUT_S
from guardd.server.streams import EVENTS_WAITING_MAX, Stream
from tests.servers import Server
from tests.web import Web, until, web


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[Web]:
    async with web(embedded.url, prefix) as it:
        yield it


async def heard(lines: AsyncIterator[str]) -> dict[str, Any]:
    """The next event."""
    async with asyncio.timeout(15):
        async for line in lines:
            if line.startswith("data: "):
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("the stream ended")


async def begun(lines: AsyncIterator[str]) -> None:
    async with asyncio.timeout(15):
        assert await anext(lines) == ": listening"


async def test_a_stream_hears_kills_freezes_and_resumes(served: Web) -> None:
    async with (
        AsyncGuard(served.daemon.url) as guard,
        served.http.stream("GET", "/v1/events") as everything,
        served.http.stream("GET", "/v1/events?run=b") as one,
    ):
        assert everything.headers["content-type"].startswith("text/event-stream")
        lines, own = everything.aiter_lines(), one.aiter_lines()
        await begun(lines)
        await begun(own)
        await guard.call("freeze", {"run": "a"})
        await guard.call("resume", {"run": "a", "change": "human_input"})
        await guard.call("kill", {"run": "b/deep", "reason": "incident_stop"})
        said = [await heard(lines) for _ in range(3)]
        assert [(each["event"], each["run"]) for each in said] == [
            ("frozen", "a"),
            ("resumed", "a"),
            ("ended", "b/deep"),
        ]
        event = await heard(own)
        assert (event["event"], event["reason"], event["by"]) == ("ended", "incident_stop", "kill")


async def test_a_stream_of_a_bound_caller_hears_its_prefix_only_and_ends_with_its_token(served: Web) -> None:
    async with AsyncGuard(served.daemon.url) as guard:
        made = await guard.call("token_new", {"role": "reader", "run_prefix": "team-a."})
        headers = {"Authorization": f"Bearer {made['token']}"}
        async with served.http.stream("GET", "/v1/events", headers=headers) as stream:
            lines = stream.aiter_lines()
            await begun(lines)
            await guard.call("kill", {"run": "team-b.1"})
            await guard.call("kill", {"run": "team-a.1"})
            assert (await heard(lines))["run"] == "team-a.1"
            await guard.call("token_revoke", {"id": made["id"]})
            async with asyncio.timeout(10):
                assert [line async for line in lines if line.startswith("data")] == []


def test_who_does_not_read_events_is_cut() -> None:
    """The queue of a listener is bounded; beyond it the connection ends, and only that one."""
    cuts: list[str] = []

    class Connection:
        def cut(self, what: str) -> None:
            cuts.append(what)

    stream = Stream(None, set(), Connection(), "", "", None)  # type: ignore[arg-type]
    for number in range(EVENTS_WAITING_MAX):
        stream.notify("event", {"event": "ended", "run": f"r{number}"})
    assert cuts == []
    stream.notify("event", {"event": "ended", "run": "one-more"})
    assert cuts == ["events are not read"]


async def test_a_request_that_drips_in_and_one_that_never_comes_are_cut_off(served: Web) -> None:
    """Ten seconds from the first byte, or from the connection, whatever drips in meanwhile."""
    host, port = served.base.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()

    async def ends(*, is_dripping: bool) -> float:
        reader, writer = await asyncio.open_connection(host, int(port))
        rest = iter(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 10_000)
        over = asyncio.create_task(reader.read())
        while not over.done():
            if is_dripping:
                writer.write(bytes([next(rest)]))
            await asyncio.wait([over], timeout=0.2)
        assert over.exception() is not None or over.result() == b""
        writer.close()
        return loop.time() - began

    began = loop.time()
    took = await asyncio.wait_for(asyncio.gather(ends(is_dripping=True), ends(is_dripping=False)), 25)
    assert all(REQUEST_TIMEOUT_S - 1 < each < REQUEST_TIMEOUT_S * 2 for each in took), took
    assert (await served.http.get("/healthz")).status_code == 200


async def test_what_is_no_http_is_told_so(served: Web) -> None:
    host, port = served.base.removeprefix("http://").split(":")
    for sent in (b"\x00\x00\x00\x05hello\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 40_000 + b"\r\n\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        said = await asyncio.wait_for(reader.read(), 10)
        assert said.startswith(b"HTTP/1.1 400") and b'"bad_argument"' in said
        writer.close()


async def test_sigterm_ends_streams_and_connections_at_once(served: Web) -> None:
    async with served.http.stream("GET", "/v1/events") as stream:
        lines = stream.aiter_lines()
        await begun(lines)
        loop = asyncio.get_running_loop()
        began = loop.time()
        code, rest = await asyncio.gather(served.daemon.stop(), _rest(lines))
        assert (code, rest) == (0, [""])
        assert loop.time() - began < 8  # drain_timeout_ms is 10 s
    with pytest.raises(httpx.ConnectError):
        await served.http.get("/healthz")


async def _rest(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


async def test_several_workers_serve_one_address_and_tell_their_sum(embedded: Server, prefix: str) -> None:
    """SIGHUP and the death of a worker included: what a dead one counted stays counted."""
    async with web(embedded.url, prefix, "--workers", "2") as served:

        async def steps() -> float:
            text = (await served.http.get("/metrics", headers={"Connection": "close"})).text
            return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("guardd_steps_total "))

        for number in range(20):
            async with httpx.AsyncClient(base_url=served.base, trust_env=False) as http:  # a connection of its own
                call = {"run": f"r{number}", "call": f"c{number}", "tool": "t"}
                said = await http.post("/v1/before", json=call, headers={"Guardd-Client": "c"})
                assert said.json()["action"] == "execute"
        for _ in range(6):
            assert await steps() == 20
        served.daemon.process.send_signal(signal.SIGHUP)

        async def reloaded() -> bool:
            return sum(event["event"] == "daemon.reloaded" for event in served.daemon.log()) == 2

        await until(reloaded, "both workers reload")
        os.kill(workers_of(served.daemon.process.pid)[0], signal.SIGKILL)

        async def is_replaced() -> bool:
            return sum(event["event"] == "daemon.started" for event in served.daemon.log()) == 3

        await until(is_replaced, "the third worker starts", 30)
        for _ in range(6):
            assert await steps() == 20


def workers_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    return [int(line) for line in listed.stdout.split()]
