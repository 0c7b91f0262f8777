"""Stop hooks: told once, signed, repeated, bounded, and never in anybody's way (docs/hooks.md)."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from guardd_client import AsyncGuard
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from guardd.model.errors import BadArgument
from guardd.server.hooks import Hooks, parse_hooks
from tests.daemons import DaemonProcess, daemon
from tests.servers import Server
from tests.web import web

FREE = {"max_no_progress": None, "max_same_call": None}
SECRET = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()


@dataclass
class Receiver:
    """A real HTTP server. answers: statuses, one a request, then 200; 0: it says nothing until it is closed."""

    url: str = ""
    answers: list[int] = field(default_factory=list)
    heard: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        original = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(headers["content-length"]))
        self.heard.append(({name.lower(): value for name, value in original.items()}, body))
        status = self.answers.pop(0) if self.answers else 200
        if status == 0:
            await self.release.wait()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        writer.close()

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.heard]

    async def until(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(60):
            while len(self.heard) < count:
                await asyncio.sleep(0.02)
        return self.told()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield made
    made.release.set()
    server.close()


@asynccontextmanager
async def served(
    embedded: Server, prefix: str, folder: Path, hooks: str, *options: str
) -> AsyncIterator[DaemonProcess]:
    config = folder / f"{secrets.token_hex(4)}.toml"
    config.write_text(hooks, encoding="utf-8")
    async with daemon(embedded.url, prefix, "--config", str(config), *options) as running:
        yield running


async def loop(guard: AsyncGuard, name: str) -> None:
    run = guard.run(name, agent="a", limits={"max_denied": 1, "max_no_progress": None}, labels={"team": "x"})
    for _ in range(9):
        answer = await run.before("look", {"q": "x", "password": "hunter2"})
        if answer.action == "stop":
            return
        await run.after(answer["call"], "progress", value=1)
    raise AssertionError("not stopped")


async def test_a_stop_is_told_once_and_signed(
    embedded: Server, prefix: str, tmp_path: Path, receiver: Receiver
) -> None:
    """By one of two daemons; verified by the reference library; a changed body is not."""
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    hooks = f'[hooks.pager]\nurl = "{receiver.url}"\nsecret_file = "{tmp_path}/secret"\non = ["stop"]\n'
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(served(embedded, prefix, tmp_path, hooks)) for _ in range(2)]
        guard, other = [await stack.enter_async_context(AsyncGuard(each.url)) for each in (one, two)]
        await loop(guard, "r1")
        await other.call("kill", {"run": "r2", "reason": "incident_stop"})
        await receiver.until(2)
        await loop(guard, "r3")
        told = await receiver.until(3)
    assert sorted((each["data"]["run"], each["data"]["reason"], each["data"]["ended_by"]) for each in told) == [
        ("r1", "same_call_repeat", "rule"), ("r2", "incident_stop", "kill"), ("r3", "same_call_repeat", "rule"),
    ]  # fmt: skip
    assert {each["type"] for each in told} == {"guardd.stop"}
    assert len({each["id"] for each in told}) == 3
    (first,) = [each for each in told if each["data"]["run"] == "r1"]
    assert first["data"]["labels"] == {"team": "x"}
    assert first["data"]["envelope"]["next_action"] == "resume_after_change"
    assert "hunter2" not in str(told)
    for headers, body in receiver.heard:
        assert Webhook(SECRET).verify(body, headers)["version"] == 1
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(body + b" ", headers)


async def test_a_resumed_run_that_stops_again_is_told_again(embedded: Server, prefix: str, tmp_path: Path, receiver: Receiver) -> None:  # fmt: skip
    async with (
        served(embedded, prefix, tmp_path, f'[hooks.a]\nurl = "{receiver.url}"\n') as it,
        AsyncGuard(it.url) as guard,
    ):
        await loop(guard, "r")
        await receiver.until(1)
        await guard.call("resume", {"run": "r", "change": "human_input"})
        await loop(guard, "r")
        assert len(await receiver.until(2)) == 2


async def test_doubts_and_runs_that_wait_are_told(
    embedded: Server, prefix: str, tmp_path: Path, receiver: Receiver
) -> None:
    """A doubt that a result made, one that a lease made, and a person who is needed; prefixes narrow it."""
    hooks = f'[hooks.a]\nurl = "{receiver.url}"\non = ["in_doubt", "human_required"]\nrun_prefix = "team-a/"\n'
    async with served(embedded, prefix, tmp_path, hooks) as it, AsyncGuard(it.url) as guard:
        for name in ("team-a/1", "team-b/1"):
            run = guard.run(name, agent="a", limits={**FREE, "claim_lease_ms": 500})
            answer = await run.before("pay", {"n": 1}, idempotency_key="by-result")
            await run.after(answer["call"], "retryable")
            await guard.call("before", {"run": name, "call": f"c-{name}", "tool": "pay", "args": {"n": 2}, "idempotency_key": "by-lease"})  # fmt: skip
            answer = await run.before("ask", {"n": 3})
            await run.after(answer["call"], "human_required")
        told = await receiver.until(3)
        await asyncio.sleep(2.5)  # the sweep goes round; nothing is told twice
        told = receiver.told()
    assert {each["data"]["run"] for each in told} == {"team-a/1"}
    keys = sorted(each["data"].get("effect", {}).get("key", "") for each in told)
    assert keys == ["", "by-lease", "by-result"]
    (waits,) = [each for each in told if each["type"] == "guardd.human_required"]
    assert waits["data"]["status"] == "waiting"


async def test_failures_are_repeated_under_one_id_and_given_up(embedded: Server, prefix: str, tmp_path: Path, receiver: Receiver) -> None:  # fmt: skip
    """500, 429, nobody: tried again; 400: not; after its attempts it is given up, logged and counted."""
    receiver.answers = [500, 429, 200]
    hooks = (
        f'[hooks.a]\nurl = "{receiver.url}"\nattempts = 3\n[hooks.nobody]\nurl = "http://127.0.0.1:9/"\nattempts = 2\n'
    )
    config = tmp_path / "hooks.toml"
    config.write_text(hooks, encoding="utf-8")
    async with web(embedded.url, prefix, "--config", str(config)) as it, AsyncGuard(it.daemon.url) as guard:
        await guard.call("kill", {"run": "r", "reason": "incident_stop"})
        told = await receiver.until(3)
        assert len({each["id"] for each in told}) == 1
        receiver.answers = [400]
        await guard.call("kill", {"run": "r2", "reason": "incident_stop"})
        await receiver.until(4)

        async def counted() -> dict[str, float]:
            lines = (await it.http.get("/metrics")).text.splitlines()
            return {
                line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith("guardd_hooks_total{")
            }

        async with asyncio.timeout(60):
            while await counted() != {"delivered": 1.0, "failed": 3.0}:
                await asyncio.sleep(0.05)
        assert len(receiver.heard) == 4
        failed = [event for event in it.daemon.log() if event["event"] == "hook.failed"]
        assert {(event["hook"], event["attempts"]) for event in failed} == {("a", 1), ("nobody", 2)}


async def test_a_receiver_that_hangs_is_in_nobodys_way(embedded: Server, prefix: str, tmp_path: Path, receiver: Receiver) -> None:  # fmt: skip
    """All deliveries hang; calls go on, and the daemon stops."""
    receiver.answers = [0] * 50
    hooks = f'[hooks.a]\nurl = "{receiver.url}"\ntimeout_ms = 60000\n'
    async with served(embedded, prefix, tmp_path, hooks) as it, AsyncGuard(it.url) as guard:
        for number in range(20):
            await guard.call("kill", {"run": f"k{number}", "reason": "incident_stop"})
        await receiver.until(8)
        run = guard.run("r", agent="a", limits=FREE)
        for number in range(15):
            assert (await run.before("look", {"n": number})).action == "execute"
        assert await it.stop() == 0
        assert any(event["event"] == "hook.dropped" and event["events"] == 12 for event in it.log())


async def test_a_receiver_that_hangs_is_not_in_the_way_of_another(embedded: Server, prefix: str, tmp_path: Path, receiver: Receiver) -> None:  # fmt: skip
    hanging = Receiver(answers=[0] * 50)
    server = await asyncio.start_server(hanging.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    hooks = f'[hooks.hangs]\nurl = "{url}"\ntimeout_ms = 60000\n[hooks.good]\nurl = "{receiver.url}"\n'
    try:
        async with served(embedded, prefix, tmp_path, hooks) as it, AsyncGuard(it.url) as guard:
            for number in range(20):
                await guard.call("kill", {"run": f"k{number}", "reason": "incident_stop"})
            await receiver.until(20)
            assert len(hanging.heard) == 8
    finally:
        hanging.release.set()
        server.close()


async def test_a_command_gets_the_payload_and_is_ended(embedded: Server, prefix: str, tmp_path: Path) -> None:
    """No shell; one that hangs is killed with its children."""
    out, pid = tmp_path / "out.json", tmp_path / "pid"
    hooks = (
        f'[hooks.file]\ncommand = ["tee", "{out}"]\non = ["stop"]\n'
        f'[hooks.slow]\ncommand = ["sh", "-c", "sleep 600 & echo $! > {pid}; wait"]\ntimeout_ms = 1000\nattempts = 1\n'
    )
    async with served(embedded, prefix, tmp_path, hooks) as it, AsyncGuard(it.url) as guard:
        await guard.call("kill", {"run": "r", "reason": "incident_stop"})
        async with asyncio.timeout(60):
            while not any(event["event"] == "hook.failed" and event["hook"] == "slow" for event in it.log()):
                await asyncio.sleep(0.05)
        assert json.loads(out.read_text(encoding="utf-8"))["data"]["reason"] == "incident_stop"
        child = Path(f"/proc/{pid.read_text().strip()}")
        async with asyncio.timeout(30):
            while child.exists() and "Z" not in (child / "stat").read_text().split(") ")[1][:1]:
                await asyncio.sleep(0.05)


async def test_too_many_events_are_dropped_and_counted() -> None:
    counted: list[str] = []
    hooks = Hooks(
        parse_hooks({"a": {"url": "http://127.0.0.1:9/"}}), lambda: pytest.fail("nobody asks"), counted.append
    )
    for number in range(1003):
        hooks.hear({"event": "ended", "run": f"r{number}"})
    hooks.hear({"event": "frozen", "run": "r"})
    assert counted == ["dropped"] * 3
    await hooks.stop()


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, "hooks.x"), ({"url": "http://a", "command": ["b"]}, "hooks.x"), ({"url": "ftp://a"}, "hooks.x.url"),
        ({"url": "http://"}, "hooks.x.url"), ({"url": "http://[::1"}, "hooks.x.url"), ({"url": "http://a:99999/"}, "hooks.x.url"),
        ({"url": "http://a", "on": ["start"]}, "hooks.x"), ({"url": "http://a", "attempts": 0}, "hooks.x"),
        ({"url": "http://a", "secret_file": "/nowhere"}, "hooks.x.secret_file"), ({"url": "http://a", "wrong": 1}, "hooks.x"),
        ("text", "hooks.x"),
    ],
)  # fmt: skip
def test_a_hook_that_is_wrong_is_named(table: Any, named: str) -> None:
    with pytest.raises(BadArgument) as raised:
        parse_hooks({"x": table})
    assert raised.value.field == named


@pytest.mark.parametrize("text", ["brief", "whsec_!!!", "whsec_c2hvcnQ="])
def test_a_secret_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(text, encoding="utf-8")
    with pytest.raises(BadArgument) as raised:
        parse_hooks({"x": {"url": "http://a", "secret_file": str(tmp_path / "secret")}})
    assert raised.value.field == "hooks.x.secret_file"
    assert text not in str(raised.value.as_dict())
