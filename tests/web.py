"""A daemon that serves HTTP: `async with web(...) as it: await it.http.get("/healthz")`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from guardd_client import AsyncGuard

from tests.daemons import DaemonProcess, daemon

JSON = {"Content-Type": "application/json"}


@dataclass
class Web:
    """A daemon and a client of its HTTP."""

    daemon: DaemonProcess
    http: httpx.AsyncClient
    base: str

    async def ask(
        self, method: str, params: Any = None, *, token: str = "", client: str = "web", **headers: str
    ) -> httpx.Response:
        """`POST /v1/<method>`."""
        given = JSON | ({"Authorization": f"Bearer {token}"} if token else {}) | {"Guardd-Client": client} | headers
        return await self.http.post(f"/v1/{method}", json={} if params is None else params, headers=given)

    async def token(self, role: str, url: str = "", **params: Any) -> str:
        """A new token, made by an operator on the socket."""
        async with AsyncGuard(url or self.daemon.url) as operator:
            made: dict[str, Any] = await operator.call("token_new", {"role": role, **params})
        return str(made["token"])


@contextlib.asynccontextmanager
async def web(store: str, prefix: str, *options: str, **more: Any) -> AsyncIterator[Web]:
    """Starts a daemon with HTTP on a free port of loopback."""
    async with daemon(store, prefix, "--http-listen", "tcp://127.0.0.1:0", *options, **more) as served:
        started = next(event for event in served.log() if event["event"] in ("daemon.started", "workers.started"))
        base = started["http"][0]
        async with httpx.AsyncClient(base_url=base, timeout=20, trust_env=False) as http:
            yield Web(served, http, base)


async def until(condition: Any, what: str, timeout_s: float = 15) -> Any:
    """Looks again until an async condition says something true, and returns that."""
    async with asyncio.timeout(timeout_s):
        while not (found := await condition()):
            await asyncio.sleep(0.02)
    return found
