"""The wire of SPEC 4 on Unix sockets and TCP: many connections, many requests in flight on each.

A task per request; the store gathers what they ask into pipelines. Replies go
out in whatever order they are ready.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections import deque
from typing import Any, cast

import structlog
from guardd_client.wire import NOTIFICATION, REQUEST, RESPONSE, Decoder, WireError, encode

from guardd import __version__
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, GuardError, NotAllowed, StoreUnavailable
from guardd.model.ids import check_run
from guardd.server.access import Access, Door, NotKnown, Pass
from guardd.server.events import Events
from guardd.server.gate import Gate
from guardd.server.listeners import (
    Listener,
    load_certificates,
    peer_name,
    tls_context,
)
from guardd.server.settings import Settings

log = structlog.get_logger()

PROTOCOL_VERSIONS = (1,)
HELLO_TIMEOUT_S = 2.0
FRAME_TIMEOUT_S = 5.0
# ---- Back-pressure ---------------------------------------------------------
# A client that never reads would make us hold its replies for ever, and one
# that floods us with requests its tasks. We stop reading from it beyond these:
# only that client waits.
REQUESTS_WAITING_MAX = 16
WRITE_BUFFER_BYTES_MAX = 1_048_576
# What it asked for before that waits as well. One that lets this much wait, or
# takes nothing for this long, is closed: many such peers would fill the memory.
REPLIES_BYTES_MAX = 8 * 1_048_576
READ_TIMEOUT_S = 30.0
# ---- Others ----------------------------------------------------------------
REQUEST_ITEMS_MAX = 65_536
REFUSED_MAX = 100


class Server:
    """All listeners of one daemon.

    Args: gate: answers. events: what watchers hear. settings: addresses and limits.
    """

    def __init__(self, gate: Gate, events: Events, settings: Settings) -> None:
        self.gate = gate
        self.access = Access(gate)
        self.events = events
        self.settings = settings
        self.connections: set[Connection] = set()
        self.is_draining = False
        self.requests = 0
        self._listeners: list[asyncio.Server] = []
        self._bound: list[Listener] = []
        self._tls: ssl.SSLContext | None = None

    async def start(self, listeners: list[Listener]) -> list[str]:
        """Serves these sockets; returns their addresses as clients name them.

        Raises: BadArgument: the files for TLS cannot be used.
        """
        loop = asyncio.get_running_loop()
        self._bound = listeners
        self._tls = tls_context(self.settings)
        for each in listeners:
            make = functools.partial(Connection, self, each.door)
            if each.path is not None:
                self._listeners.append(await loop.create_unix_server(make, sock=each.socket))
            else:
                handshake_s = FRAME_TIMEOUT_S if self._tls else None
                self._listeners.append(
                    await loop.create_server(make, sock=each.socket, ssl=self._tls, ssl_handshake_timeout=handshake_s)
                )
        return [each.shown for each in listeners]

    def reload_certificates(self) -> None:
        """Reads the files for TLS again; connections that stand keep what they have.

        Raises: BadArgument.
        """
        if self._tls is not None:
            load_certificates(self._tls, self.settings)

    async def drain(self) -> None:
        """Takes no more connections or requests, answers what is in flight, closes."""
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        deadline = time.monotonic() + self.settings.drain_timeout_ms / 1000
        while any(connection.tasks for connection in self.connections) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.close()
        for bound in self._bound:
            bound.unlink()

    async def answer(self, connection: Connection, method: str, params: Any) -> Any:
        """The result of one request, as plain values.

        Raises: GuardError.
        """
        if not isinstance(params, dict):
            raise BadArgument("params are a map", field="params", value=type(params).__name__, limit="map")
        if method == "hello":
            return await connection.greet(params)
        entered = await connection.entered()
        if entered is None:
            raise BadArgument("the first call is hello", field="method", value=method, limit="hello")
        caller = await self.access.caller(entered, method)
        if method == "watch":
            run = check_run(params["run"]) if "run" in params else ""
            await self.gate.admit(caller, method, run or caller.run_prefix, least="reader")
            self.events.watch(connection, run, "" if run else caller.run_prefix)
            return {"watching": run}
        if method == "before":
            # The instance is the one that hello named; only the player may speak for several.
            if not self.settings.virtual_clock or "client" not in params:
                params["client"] = connection.client
        parent = params.pop("traceparent", "")
        result = await self.gate.call(caller, method, params, parent=parent if isinstance(parent, str) else "")
        return result.as_dict() if isinstance(result, Answer) else result


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server, door: Door) -> None:
        self.client: str | None = None
        self._door = door
        self._pass: Pass | None = None
        self._greeting = asyncio.Lock()
        self._refused = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._queued: deque[list[Any]] = deque()
        self._server = server
        self._decoder = Decoder(frame_bytes_max=server.settings.frame_bytes_max, items_max=REQUEST_ITEMS_MAX)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._is_write_paused = False

    # ---- asyncio's side ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = writable = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        writable.set_write_buffer_limits(high=WRITE_BUFFER_BYTES_MAX)
        if self._server.is_draining or len(self._server.connections) >= self._server.settings.connections_max:
            log.warning("connection.refused", connections=len(self._server.connections))
            writable.abort()
            return
        self._server.connections.add(self)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._no_hello)

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol. What is in flight goes on: its answer is remembered for a resend."""
        self._cancel_timer()
        for timer in (self._reader_timer, self._hello_timer):
            if timer is not None:
                timer.cancel()
        self._server.connections.discard(self)
        self._server.events.forget(self)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            messages = self._decoder.receive_data(data)
        except WireError as error:
            self._say(
                [RESPONSE, 0, BadArgument(str(error), field="frame", limit="see docs/protocol.md").as_dict(), None]
            )
            self.close()
            return
        self._queued.extend(message for message in messages if message[0] == REQUEST)
        if messages:  # bytes alone do not count: a frame that drips in is late as a whole
            self._cancel_timer()
        if self._decoder.is_inside_frame:
            self._expect(FRAME_TIMEOUT_S, "a frame that does not end")
        self._adapt()

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client does not read."""
        self._is_write_paused = True
        self._reader_timer = asyncio.get_running_loop().call_later(READ_TIMEOUT_S, self._abort, "replies are not read")
        self._adapt()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_write_paused = False
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        self._adapt()

    # ---- Requests ------------------------------------------------------------------

    async def greet(self, params: dict[str, Any]) -> dict[str, Any]:
        """The first call: who this is, which client instance, and which versions it speaks.

        Raises: BadArgument, NotKnown, StoreUnavailable.
        """
        versions, client = params.get("versions"), params.get("client")
        if not isinstance(versions, list) or not any(version in versions for version in PROTOCOL_VERSIONS):
            raise BadArgument(
                "no common version of the protocol", field="versions", value=versions, limit=list(PROTOCOL_VERSIONS)
            )
        if not isinstance(client, str) or not 0 < len(client.encode()) <= 128:
            raise BadArgument("a client instance has a name", field="client", value=client, limit="1..128 bytes")
        async with self._greeting:
            if self._pass is not None:
                raise BadArgument("hello was said; connect anew", field="method", value="hello", limit="once")
            certificate = self._transport.get_extra_info("peercert") if self._transport is not None else None
            entered = await self._server.access.enter(self._door, params.get("token"), peer=peer_name(certificate))
            caller = await self._server.access.caller(entered, "hello")
            self.client, self._pass = client, entered
        return {
            "version": PROTOCOL_VERSIONS[-1],
            "server": f"guardd {__version__}",
            "role": caller.role,
            "config": self._server.gate.engine.context.config.digest(),
        }

    async def entered(self) -> Pass | None:
        """What hello was answered with; requests that came right behind it wait for that."""
        if self._pass is not None:
            return self._pass
        async with self._greeting:
            return self._pass

    async def _handle(self, request_id: int, method: str, params: Any) -> None:
        self._server.requests += 1
        try:
            result = await self._server.answer(self, method, params)
            self._say([RESPONSE, request_id, None, result])
        except GuardError as error:
            self._say([RESPONSE, request_id, error.as_dict(), None])
            self._refused += isinstance(error, NotAllowed)
            if isinstance(error, NotKnown) or self._refused >= REFUSED_MAX:
                log.warning("connection.turned_away", door=self._door.name, error=error.name)
                self.close()
        except Exception:
            # A defect of ours must not look like an answer: nothing is granted, and the log has the trace.
            log.exception("request.failed", method=method)
            broken = StoreUnavailable("the daemon failed at this request; see its log", field="daemon")
            self._say([RESPONSE, request_id, broken.as_dict(), None])

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Tells the client something it did not ask for."""
        self._say([NOTIFICATION, method, params])

    def _say(self, message: list[Any]) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write(encode(message))
        except WireError as error:
            too_large = BadArgument(f"the result is too large: {error}", field="limit", limit="a smaller limit")
            self._transport.write(encode([RESPONSE, message[1], too_large.as_dict(), None]))

        if self._transport.get_write_buffer_size() > REPLIES_BYTES_MAX:
            self._abort("replies are not read")

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._adapt()

    def _start_queued(self) -> None:
        """One read can bring thousands of requests; they begin as others end, so that nobody waits behind all of them."""
        while self._queued and len(self.tasks) < REQUESTS_WAITING_MAX and not self._is_write_paused:
            message = self._queued.popleft()
            task = asyncio.get_running_loop().create_task(self._handle(message[1], message[2], message[3]))
            self.tasks.add(task)
            task.add_done_callback(self._done)

    def _adapt(self) -> None:
        """Reads on, or stops reading, as far as the client keeps up."""
        transport = self._transport
        if transport is None or transport.is_closing():
            self._queued.clear()
            return
        self._start_queued()
        is_full = self._is_write_paused or len(self.tasks) >= REQUESTS_WAITING_MAX
        if is_full and not self._is_paused:
            transport.pause_reading()
        elif self._is_paused and not is_full:
            transport.resume_reading()
        self._is_paused = is_full

    def _expect(self, seconds: float, what: str) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._too_slow, what)

    def _no_hello(self) -> None:
        """Whatever else was sent: who did not greet by now is closed, unless the store is being asked who it is."""
        if self._greeting.locked():
            self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._no_hello)
        elif self._pass is None:
            self._too_slow("no hello")

    def _too_slow(self, what: str) -> None:
        log.warning("connection.too_slow", what=what, client=self.client)
        self.close()

    def _abort(self, what: str) -> None:
        log.warning("connection.too_slow", what=what, client=self.client)
        if self._transport is not None:
            self._transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Sends what is written and closes."""
        if self._transport is not None:
            self._transport.close()
