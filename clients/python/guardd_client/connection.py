"""One connection to the daemon: many requests in flight, reconnect, resend under the same ids."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from guardd_client.access import tls_context
from guardd_client.errors import GuardRequestError, GuardUnavailable, RunLost
from guardd_client.wire import NOTIFICATION, RESPONSE, Decoder, WireError, encode

DEFAULT_URL = "unix:.guardd/guardd.sock"
PROTOCOL_VERSION = 1
RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.02, 0.5


# ---- Forks -----------------------------------------------------------------
# A child shares the parent's epoll instance. Were its copy of a connection
# collected, closing it would take the socket out of that instance, and the
# parent would never hear a reply again. So the child keeps what is the parent's.
_LIVE: weakref.WeakSet[Connection] = weakref.WeakSet()
_OF_THE_PARENT: list[Connection] = []


def _keep_in_child() -> None:
    _OF_THE_PARENT.extend(_LIVE)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_in_child)


def default_url() -> str:
    """GUARDD_URL, else the socket of a daemon that was started in this folder."""
    return os.environ.get("GUARDD_URL") or DEFAULT_URL


def traceparent() -> str:
    """The current OpenTelemetry span of this program as a W3C `traceparent`; "": it makes none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    span = trace.get_current_span().get_span_context()
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}" if span.is_valid else ""


class Connection:
    """Requests and replies, over `unix:PATH`, `tcp://HOST:PORT` or `tls://HOST:PORT`.

    A request that got no reply before the connection broke is sent again on the next one: every operation
    that changes something carries an id, by which the daemon knows it.

    Args:
        deadline_ms: a request that has no answer by then raises GuardUnavailable.
        on_event:    hears of stops and freezes once `watch` was called.
    """

    def __init__(
        self, url: str, *, token: str | None, deadline_ms: int, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.url = url
        self.client = f"py-{os.getpid()}-{secrets.token_hex(8)}"
        self.server: dict[str, Any] = {}
        self._token = token
        self._deadline_s = deadline_ms / 1000
        self._on_event = on_event
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 0
        self._watched: dict[str, dict[str, Any]] = {}
        _LIVE.add(self)

    async def call(self, method: str, params: dict[str, Any], *, deadline_ms: int | None = None) -> Any:
        """The result of one operation.

        Raises: GuardUnavailable: no answer in time. GuardRequestError: the daemon named an error.
        """
        deadline_s = self._deadline_s if deadline_ms is None else deadline_ms / 1000
        pause_s, last = RECONNECT_FIRST_S, "no answer in time"
        try:
            async with asyncio.timeout(deadline_s) if hasattr(asyncio, "timeout") else _timeout(deadline_s):
                while True:
                    try:
                        await self._connect()
                        return await self._ask(method, params)
                    except (OSError, WireError, asyncio.IncompleteReadError) as error:
                        last = str(error) or type(error).__name__
                    except GuardRequestError as error:
                        if error.retry != "same_id":
                            raise
                        last = str(error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(pause_s * 2, RECONNECT_MOST_S)
        except TimeoutError:
            raise GuardUnavailable(
                f"the guard at {self.url} gave no answer to {method} in {deadline_s:g} s: {last}"
            ) from None

    async def watch(self, run: str) -> None:
        """Hear of stops and freezes of this run and its sub-runs, "": of all runs; kept over reconnects."""
        params = self._watched[run] = {"run": run} if run else {}
        await self.call("watch", params)

    async def _ask(self, method: str, params: dict[str, Any]) -> Any:
        if self._writer is None:
            raise ConnectionError("not connected")
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._writer.write(encode([0, request_id, method, params]))
            await self._writer.drain()
            return await future
        finally:
            self._waiting.pop(request_id, None)

    async def _connect(self) -> None:
        async with self._connecting:
            if self._writer is not None:
                return
            reader, writer = await self._open()
            self._writer = writer
            self._reader_task = asyncio.create_task(self._read(reader))
            try:
                hello = {"versions": [PROTOCOL_VERSION], "client": self.client}
                self.server = await self._ask("hello", hello | ({"token": self._token} if self._token else {}))
                for params in self._watched.values():
                    await self._ask("watch", params)
            except BaseException:
                await self._drop(ConnectionError("the daemon did not greet"))
                raise

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.url.startswith("unix:"):
            return await asyncio.open_unix_connection(self.url.removeprefix("unix:").removeprefix("//"))
        parts = urlsplit(self.url)
        if parts.scheme not in ("tcp", "tls") or not parts.hostname or not parts.port:
            raise GuardUnavailable(f"no URL of a daemon: {self.url}; use unix:PATH, tcp://HOST:PORT or tls://HOST:PORT")
        context = tls_context() if parts.scheme == "tls" else None
        return await asyncio.open_connection(parts.hostname, parts.port, ssl=context)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder, cause = Decoder(), ConnectionError("the daemon closed the connection")
        try:
            while data := await reader.read(65_536):
                for message in decoder.receive_data(data):
                    self._receive(message)
        except (OSError, WireError) as error:
            cause = ConnectionError(str(error))
        await self._drop(cause)

    def _receive(self, message: list[Any]) -> None:
        if message[0] == RESPONSE:
            future = self._waiting.get(message[1])
            if future is None or future.done():
                return
            if message[2] is None:
                future.set_result(message[3])
            else:
                kind = RunLost if message[2].get("error") == "run_lost" else GuardRequestError
                future.set_exception(kind(message[2]))
        elif message[0] == NOTIFICATION and self._on_event is not None:
            self._on_event(message[2])

    async def _drop(self, cause: Exception) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(cause)

    async def close(self) -> None:
        """Closes the connection; requests in flight fail."""
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
        await self._drop(ConnectionError("the client was closed"))


class _timeout:  # noqa: N801
    """asyncio.timeout for Python 3.10."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._end, task)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._is_over = True
        task.cancel()

    async def __aexit__(self, kind: Any, *_: object) -> None:
        self._handle.cancel()
        if self._is_over and kind is asyncio.CancelledError:
            raise TimeoutError
