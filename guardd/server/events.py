"""What watchers hear: stops, freezes and resumes, as the scripts publish them.

Publishing is fire and forget; it only shortens the way. The flags themselves
are read by every script.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import structlog
from redis import exceptions as driver
from redis.asyncio import Redis

from guardd.store.base import Store

log = structlog.get_logger()

RECONNECT_S = 0.2
QUIET_S = 10.0


class Watcher(Protocol):
    """Somebody who listens."""

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Hears one event."""


class Events:
    """One subscription to the store, many watchers."""

    def __init__(self, store: Store, channel: str) -> None:
        self._store = store
        self._channel = channel
        self._watchers: dict[str, dict[Watcher, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self.is_listening = asyncio.Event()
        self.on_settled: Callable[[str], None] = lambda _: None
        self.on_event: Callable[[dict[str, str]], None] = lambda _: None

    async def start(self) -> None:
        """Listens from now on; a fake store publishes nothing."""
        if self._store.event_pool() is not None:
            self._task = asyncio.create_task(self._listen())
            await self.is_listening.wait()

    def watch(self, watcher: Watcher, run: str, prefix: str = "") -> None:
        """Tells a watcher of this run, its sub-runs and its ancestors; "": of all runs that begin with the prefix."""
        self._watchers.setdefault(run, {})[watcher] = prefix

    def forget(self, watcher: Watcher) -> None:
        """Tells a watcher nothing more."""
        for run, watchers in list(self._watchers.items()):
            watchers.pop(watcher, None)
            if not watchers:
                del self._watchers[run]

    def hear(self, event: dict[str, str]) -> None:
        """Takes what a script published: a settled effect wakes who waits for it, the rest is for watchers."""
        if event.get("event") == "settled":
            self.on_settled(event.get("key", ""))
        else:
            self.on_event(event)
            self.publish(event)

    def publish(self, event: dict[str, str]) -> None:
        """Tells everybody whom an event concerns: a kill of a run ends its sub-runs too."""
        ended = event.get("run", "")
        heard: set[Watcher] = set()
        for run, watchers in self._watchers.items():
            if not run or run == ended or run.startswith(f"{ended}/") or ended.startswith(f"{run}/"):
                heard |= {watcher for watcher, prefix in watchers.items() if ended.startswith(prefix)}
        for watcher in heard:
            watcher.notify("event", {**event, "published_ms": time.time_ns() // 1_000_000})

    async def _listen(self) -> None:
        while True:
            client: Any = Redis(connection_pool=self._store.event_pool())
            subscription = client.pubsub()
            try:
                await subscription.subscribe(self._channel)
                self.is_listening.set()
                is_asked = False
                while True:
                    message = await subscription.get_message(timeout=QUIET_S)
                    if message is None:
                        # A server that is cut off sends nothing, not even an end: it has to answer a ping.
                        if is_asked:
                            raise driver.ConnectionError("the server of the subscription answers no more")
                        await subscription.ping()
                    elif message["type"] == "message":
                        self.hear(dict(part.split("=", 1) for part in message["data"].decode().split()))
                    is_asked = message is None
            except (driver.RedisError, OSError) as error:
                log.warning("events.lost", error=str(error))
            finally:
                await subscription.aclose()
            await asyncio.sleep(RECONNECT_S)

    async def stop(self) -> None:
        """Listens no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
