"""One listener of `GET /v1/events`: events as they are published, comments in between, an end when it lags."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from guardd.server.events import Events
from guardd.server.gate import Caller

EVENTS_WAITING_MAX = 256
HEARTBEAT_S = 10.0
LOOK_S = 1.0
"""How often the token is looked at again."""


class Cuttable(Protocol):
    """A connection."""

    def cut(self, what: str) -> None:
        """Ends it at once."""


class Stream(Response):
    """A response that lasts.

    Args:
        streams:    all of the daemon; this one is in it while it runs.
        run:        whose events are wanted; "": of all runs.
        run_prefix: only of runs that begin so; "": all.
        look_again: who listens; None: nobody who may, any more.
    """

    def __init__(
        self,
        events: Events,
        streams: set[Stream],
        connection: Cuttable,
        run: str,
        run_prefix: str,
        look_again: Callable[[], Awaitable[Caller | None]],
    ) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._streams, self._connection = events, streams, connection
        self._run, self._run_prefix, self._look_again = run, run_prefix, look_again
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(EVENTS_WAITING_MAX)
        self._ended = asyncio.Event()

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """See Watcher. Who does not keep up is cut: it connects again and reads the state anew."""
        line = f"event: {params.get('event', method)}\ndata: {json.dumps(params)}\n\n"
        try:
            self._waiting.put_nowait(line.encode())
        except asyncio.QueueFull:
            self.end()
            self._connection.cut("events are not read")

    def end(self) -> None:
        """Says no more."""
        self._ended.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        self._streams.add(self)
        self._events.watch(self, self._run, self._run_prefix)
        jobs = [
            asyncio.create_task(job)
            for job in (self._ended.wait(), self._gone(receive), self._may_listen(), self._say(send))
        ]
        try:
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
        finally:
            self._events.forget(self)
            self._streams.discard(self)
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _say(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b": listening\n\n", "more_body": True})
        beat_s = time.monotonic() + HEARTBEAT_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, beat_s - time.monotonic())):
                    said = await self._waiting.get()
            except TimeoutError:
                said, beat_s = b": here\n\n", time.monotonic() + HEARTBEAT_S
            await send({"type": "http.response.body", "body": said, "more_body": True})

    async def _may_listen(self) -> None:
        """Returns when the caller may listen no more."""
        while await self._look_again() is not None:
            await asyncio.sleep(LOOK_S)

    @staticmethod
    async def _gone(receive: Receive) -> None:
        """Returns when the peer has left."""
        while (await receive())["type"] != "http.disconnect":
            pass
