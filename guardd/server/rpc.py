"""The wire of SPEC 4 on Unix sockets and TCP: many connections, many requests in flight on each.

A task per request; the store gathers what they ask into pipelines. Replies go
out in whatever order they are ready.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any, cast

import structlog
from guardd_client.wire import NOTIFICATION, REQUEST, RESPONSE, Decoder, WireError, encode

from guardd import __version__
from guardd.engine.core import Engine
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, GuardError, StoreUnavailable
from guardd.model.ids import check_run
from guardd.server.events import Events
from guardd.server.settings import Settings

log = structlog.get_logger()

PROTOCOL_VERSIONS = (1,)
HELLO_TIMEOUT_S = 2.0
FRAME_TIMEOUT_S = 5.0
# ---- Back-pressure ---------------------------------------------------------
# A client that never reads would make us hold its replies for ever, and one
# that floods us with requests its tasks. We stop reading from it beyond these:
# only that client waits.
REQUESTS_WAITING_MAX = 256
WRITE_BUFFER_BYTES_MAX = 1_048_576


class Server:
    """All listeners of one daemon.

    Args: engine: answers. events: what watchers hear. settings: addresses and limits.
    """

    def __init__(self, engine: Engine, events: Events, settings: Settings) -> None:
        self.engine = engine
        self.events = events
        self.settings = settings
        self.connections: set[Connection] = set()
        self.is_draining = False
        self.requests = 0
        self._listeners: list[asyncio.Server] = []
        self._sockets: list[Path] = []

    async def start(self) -> list[str]:
        """Listens on every address; returns them as clients name them.

        Raises: BadArgument: an address that is none, or is open to others.
        """
        loop = asyncio.get_running_loop()
        if inherited := os.environ.get("GUARDD_LISTEN_FDS"):
            sockets = [socket.socket(fileno=int(descriptor)) for descriptor in inherited.split(",")]
            shown = list(self.settings.listen)
        else:
            sockets, shown = bind_listeners(self.settings.listen)
            self._sockets = [Path(each.getsockname()) for each in sockets if each.family == socket.AF_UNIX]
        for each in sockets:
            start = loop.create_unix_server if each.family == socket.AF_UNIX else loop.create_server
            self._listeners.append(await start(self._connection, sock=each))
        return shown

    def _connection(self) -> Connection:
        return Connection(self)

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
        for path in self._sockets:
            path.unlink(missing_ok=True)

    async def answer(self, connection: Connection, method: str, params: Any) -> Any:
        """The result of one request, as plain values.

        Raises: GuardError.
        """
        if not isinstance(params, dict):
            raise BadArgument("params are a map", field="params", value=type(params).__name__, limit="map")
        if method == "hello":
            return connection.greet(params)
        if connection.client is None:
            raise BadArgument("the first call is hello", field="method", value=method, limit="hello")
        if method == "watch":
            run = check_run(params.get("run", ""))
            self.events.watch(connection, run)
            return {"watching": run}
        if method == "before":
            # The instance is the one that hello named; only the player may speak for several.
            if not self.settings.virtual_clock or "client" not in params:
                params["client"] = connection.client
        result = await self.engine.call(method, params)
        return result.as_dict() if isinstance(result, Answer) else result


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, server: Server) -> None:
        self.client: str | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._server = server
        self._decoder = Decoder(frame_bytes_max=server.settings.frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
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
        self._expect(HELLO_TIMEOUT_S, "no hello")

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol. What is in flight goes on: its answer is remembered for a resend."""
        self._cancel_timer()
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
        for message in messages:
            if message[0] != REQUEST:
                continue
            task = asyncio.get_running_loop().create_task(self._handle(message[1], message[2], message[3]))
            self.tasks.add(task)
            task.add_done_callback(self._done)
        if self.client is not None or messages:
            self._cancel_timer()
        if self._decoder.is_inside_frame:
            self._expect(FRAME_TIMEOUT_S, "a frame that does not end")
        self._adapt()

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client does not read."""
        self._is_write_paused = True
        self._adapt()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._is_write_paused = False
        self._adapt()

    # ---- Requests ------------------------------------------------------------------

    def greet(self, params: dict[str, Any]) -> dict[str, Any]:
        """The first call: which client instance this is, and which versions it speaks."""
        versions, client = params.get("versions"), params.get("client")
        if not isinstance(versions, list) or not set(versions) & set(PROTOCOL_VERSIONS):
            raise BadArgument(
                "no common version of the protocol", field="versions", value=versions, limit=list(PROTOCOL_VERSIONS)
            )
        if not isinstance(client, str) or not 0 < len(client.encode()) <= 128:
            raise BadArgument("a client instance has a name", field="client", value=client, limit="1..128 bytes")
        self.client = client
        return {
            "version": PROTOCOL_VERSIONS[-1],
            "server": f"guardd {__version__}",
            "role": "operator",
            "config": self._server.engine.context.config.digest(),
        }

    async def _handle(self, request_id: int, method: str, params: Any) -> None:
        self._server.requests += 1
        try:
            result = await self._server.answer(self, method, params)
            self._say([RESPONSE, request_id, None, result])
        except GuardError as error:
            self._say([RESPONSE, request_id, error.as_dict(), None])
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

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._adapt()

    def _adapt(self) -> None:
        """Reads on, or stops reading, as far as the client keeps up."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        is_full = self._is_write_paused or len(self.tasks) >= REQUESTS_WAITING_MAX
        if is_full and not self._is_paused:
            transport.pause_reading()
        elif self._is_paused and not is_full:
            transport.resume_reading()
        self._is_paused = is_full

    def _expect(self, seconds: float, what: str) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._too_slow, what)

    def _too_slow(self, what: str) -> None:
        log.warning("connection.too_slow", what=what, client=self.client)
        self.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Sends what is written and closes."""
        if self._transport is not None:
            self._transport.close()


def bind_listeners(addresses: list[str]) -> tuple[list[socket.socket], list[str]]:
    """A listening socket an address, and the addresses as clients name them.

    Raises: BadArgument: an address that is none, is open to others, or is served by another daemon.
    """
    sockets: list[socket.socket] = []
    shown: list[str] = []
    for address in addresses:
        if address.startswith("unix:"):
            path = Path(address.removeprefix("unix:").removeprefix("//")).absolute()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _end_stale_socket(path)
            listener = socket.socket(socket.AF_UNIX)
            previous = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(previous)
            shown.append(f"unix:{path}")
        else:
            host, port = _host_and_port(address)
            listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
            shown.append(f"tcp://{host}:{listener.getsockname()[1]}")
        listener.listen(1024)
        listener.setblocking(False)
        sockets.append(listener)
    return sockets, shown


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    if not address.startswith("tcp://") or not host or not port.isdigit():
        raise BadArgument(
            "no address to listen on", field="listen", value=address, limit="unix:PATH or tcp://HOST:PORT"
        )
    if host not in ("127.0.0.1", "::1", "localhost"):
        raise BadArgument(
            "without tokens only loopback is served: listen on 127.0.0.1 or a Unix socket",
            field="listen",
            value=address,
            limit="loopback",
        )
    return host, int(port)


def _end_stale_socket(path: Path) -> None:
    """Removes a socket nobody listens on.

    Raises: BadArgument: a daemon answers there.
    """
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise BadArgument(
        "another daemon listens there: stop it, or name another socket", field="listen", value=str(path), limit="free"
    )
