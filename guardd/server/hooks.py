"""Stop hooks: a webhook or a command that is told of stops, doubts and runs that wait for a person (docs/hooks.md).

No rule lives here and nothing waits for a hook: what was told by the store is queued, bounded, and delivered beside the
answers. One daemon of a store tells: the one that marks the run or the record first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import msgspec
import structlog
from msgspec import Meta

from guardd.engine.core import Engine
from guardd.model.errors import BadArgument, GuardError, UnknownRun

log = structlog.get_logger()

QUEUE_MAX = 1000
DELIVERIES_AT_ONCE = 8
"""Of each hook: a receiver that hangs holds up its own deliveries only."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
VERSION = 1
KINDS = {"ended": "stop", "in_doubt": "in_doubt", "waiting": "human_required"}
"""What the scripts publish -> what a hook asks for."""
_TRY_AGAIN = frozenset({408, 425, 429})

Kind = Literal["stop", "in_doubt", "human_required"]


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[hooks.NAME]` of the settings file; either url or command.

    on:          what it is told of. run_prefix: only of runs that begin so.
    url:         gets a POST. secret_file: signs it, in the way of Standard Webhooks.
    command:     argument list, no shell; the payload is its standard input.
    timeout_ms:  one delivery. attempts: how often it is tried, with growing pauses.
    """

    on: tuple[Kind, ...] = ("stop", "in_doubt", "human_required")
    run_prefix: str = ""
    url: str = ""
    command: tuple[str, ...] = ()
    secret_file: str = ""
    timeout_ms: Annotated[int, Meta(ge=100, le=60_000)] = 5000
    attempts: Annotated[int, Meta(ge=1, le=20)] = 5


def parse_hooks(given: Mapping[str, Any]) -> dict[str, Hook]:
    """The hooks of the settings.

    Raises: BadArgument: names the hook, the member and what is allowed; a secret cannot be read.
    """
    hooks = {}
    for name, table in given.items():
        where = f"hooks.{name}"
        try:
            hook = msgspec.convert(table, Hook)
        except msgspec.ValidationError as error:
            raise BadArgument(f"the hook is malformed: {error}", field=where, value=table) from error
        if bool(hook.url) == bool(hook.command):
            raise BadArgument("a hook has a url or a command", field=where, value=table, limit="one of them")
        if hook.url and not _is_web_address(hook.url):
            raise BadArgument(
                "a hook's url is a web address",
                field=f"{where}.url",
                value=hook.url,
                limit="http:// or https://, a host",
            )
        _secret(hook, where)
        hooks[name] = hook
    return hooks


def _is_web_address(url: str) -> bool:
    """What the client would not even try is told at start."""
    try:
        read = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return read.scheme in ("http", "https") and bool(read.host) and read.port != 0 and (read.port or 1) < 65536


def _secret(hook: Hook, where: str) -> bytes:
    """The key that signs; b"": none. A `whsec_` secret is base64, anything else is taken as it is."""
    if not hook.secret_file:
        return b""
    try:
        text = Path(hook.secret_file).read_text(encoding="utf-8").strip()
        key = (
            base64.b64decode(text.removeprefix("whsec_"), validate=True) if text.startswith("whsec_") else text.encode()
        )
    except (OSError, ValueError, binascii.Error) as error:
        raise BadArgument(
            f"the secret cannot be read: {error}", field=f"{where}.secret_file", value=hook.secret_file
        ) from error
    if len(key) < 16:
        raise BadArgument(
            "the secret is too short", field=f"{where}.secret_file", value=f"{len(key)} bytes", limit="16 bytes"
        )
    return key


def sign(key: bytes, delivery: str, timestamp_s: int, body: bytes) -> str:
    """The `webhook-signature` of Standard Webhooks: HMAC-SHA256 over id, time and body."""
    digest = hmac.digest(key, f"{delivery}.{timestamp_s}.".encode() + body, hashlib.sha256)
    return f"v1,{base64.b64encode(digest).decode()}"


class GaveUp(Exception):
    """A delivery that no repeat would help."""


class Hooks:
    """The hooks of one daemon.

    Args: engine: reads what is told about. count: hears "delivered", "failed" or "dropped".
    """

    def __init__(self, hooks: Mapping[str, Hook], engine: Callable[[], Engine], count: Callable[[str], None]) -> None:
        self._hooks = hooks
        self._engine = engine
        self._count = count
        self._queue: asyncio.Queue[dict[str, str]] = asyncio.Queue(QUEUE_MAX)
        self._lanes: dict[str, asyncio.Queue[bytes]] = {name: asyncio.Queue(QUEUE_MAX) for name in hooks}
        self._tasks: list[asyncio.Task[None]] = []
        self._http = httpx.AsyncClient(follow_redirects=False, trust_env=False)

    def start(self) -> None:
        """Delivers from now on."""
        self._tasks = [
            asyncio.create_task(self._work(name, hook))
            for name, hook in self._hooks.items()
            for _ in range(DELIVERIES_AT_ONCE)
        ]
        self._tasks.append(asyncio.create_task(self._sort()))

    async def stop(self) -> None:
        """Delivers no more; what is queued is lost, and said."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if waiting := self._queue.qsize() + sum(lane.qsize() for lane in self._lanes.values()):
            log.warning("hook.dropped", why="the daemon stops", events=waiting)
        await self._http.aclose()

    def hear(self, event: Mapping[str, str]) -> None:
        """An event of the store; queued when a hook wants it."""
        if not self._wanting(event):
            return
        self._put(self._queue, dict(event))

    def _put(self, queue: asyncio.Queue[Any], waiting: object) -> None:
        try:
            queue.put_nowait(waiting)
        except asyncio.QueueFull:
            self._count("dropped")
            log.warning("hook.dropped", why=f"more than {QUEUE_MAX} wait", events=1)

    def _wanting(self, event: Mapping[str, str]) -> dict[str, Hook]:
        kind = KINDS.get(event.get("event", ""))
        run = event.get("run", "")
        return {name: hook for name, hook in self._hooks.items() if kind in hook.on and run.startswith(hook.run_prefix)}

    async def _sort(self) -> None:
        """Each event that is ours goes to the hooks that want it; only the store is waited for."""
        while True:
            event = await self._queue.get()
            try:
                if await self._is_ours(event):
                    payload = await self._payload(event)
                    for name in self._wanting(event):
                        self._put(self._lanes[name], payload)
            except GuardError as error:
                self._count("failed")
                log.warning("hook.failed", run=event.get("run"), why=error.message)

    async def _work(self, name: str, hook: Hook) -> None:
        while True:
            await self._deliver(name, hook, await self._lanes[name].get())

    async def _is_ours(self, event: Mapping[str, str]) -> bool:
        """Of all daemons that heard it one tells: whose mark is first. A resume, a new claim take the mark away."""
        context = self._engine().context
        is_effect = event["event"] == "in_doubt"
        key = event["key"] if is_effect else context.keys.run(event["run"])
        mark = ("HSETNX", key, f"stop_told_{event['event']}", str(time.time_ns() // 1_000_000))
        # A run may have been forgotten meanwhile; its mark must not stay for ever.
        expiry = () if is_effect else (("PEXPIRE", key, context.config.run_ttl_ms, "NX"),)
        is_first = (await context.link.execute(mark, *expiry))[0]
        return bool(is_first)

    async def _payload(self, event: Mapping[str, str]) -> bytes:
        """What is told: redacted as what operators read."""
        engine, run = self._engine(), event["run"]
        data: dict[str, Any] = {"run": run}
        if event["event"] == "in_doubt":
            data["effect"] = await engine.reader.effect(event["key"])
        else:
            with contextlib.suppress(UnknownRun):  # it was forgotten meanwhile
                state = await engine.reader.inspect(run, None)
                data |= {name: state[name] for name in ("status", "reason", "ended_by", "labels", "counters")}
                data["envelope"] = state.get("envelope", {})
        told = {
            "type": f"guardd.{KINDS[event['event']]}", "version": VERSION, "id": f"msg_{secrets.token_urlsafe(18)}",
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "data": data,
        }  # fmt: skip
        return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()

    async def _deliver(self, name: str, hook: Hook, payload: bytes) -> None:
        """Tries until it is taken; the same id each time, so that the receiver can tell a repeat."""
        delivery, pause_s, why = json.loads(payload)["id"], FIRST_PAUSE_S, ""
        for attempt in range(1, hook.attempts + 1):
            try:
                await (self._post(name, hook, delivery, payload) if hook.url else self._run(hook, payload))
            except (GaveUp, BadArgument) as error:  # BadArgument: the secret can be read no more
                why = str(error)
                break
            except (httpx.HTTPError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            else:
                self._count("delivered")
                return
            if attempt < hook.attempts:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        self._count("failed")
        log.warning("hook.failed", hook=name, delivery=delivery, attempts=attempt, why=why)

    async def _post(self, name: str, hook: Hook, delivery: str, payload: bytes) -> None:
        now_s = int(time.time())
        headers = {"Content-Type": "application/json", "webhook-id": delivery, "webhook-timestamp": str(now_s)}
        if key := _secret(hook, f"hooks.{name}"):
            headers["webhook-signature"] = sign(key, delivery, now_s, payload)
        async with asyncio.timeout(hook.timeout_ms / 1000):
            async with self._http.stream("POST", hook.url, content=payload, headers=headers, timeout=None) as response:
                status = response.status_code
        if status >= 500 or status in _TRY_AGAIN:
            raise httpx.HTTPError(f"the receiver answered {status}")
        if not 200 <= status < 300:
            raise GaveUp(f"the receiver answered {status}")

    @staticmethod
    async def _run(hook: Hook, payload: bytes) -> None:
        """A process group of its own, so that nothing of it outlives the time-out."""
        process = await asyncio.create_subprocess_exec(
            *hook.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(hook.timeout_ms / 1000):
                await process.communicate(payload)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode:
            raise OSError(f"the command ended with {process.returncode}")
