"""HTTP listeners: uvicorn's connections on our own sockets, with the deadlines and caps that it leaves out.

Only connections live here. What is answered stands in routes.py, who may ask
in front.py. The listeners share the daemon's loop, doors and TLS files.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import ssl
import time
from typing import Any

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from guardd.model.errors import BadArgument
from guardd.server.events import Events
from guardd.server.front import Front
from guardd.server.gate import Gate
from guardd.server.listeners import Listener, load_certificates, peer_name, tls_context
from guardd.server.routes import Routes
from guardd.server.settings import Settings

log = structlog.get_logger()

CONNECTIONS_MAX = 1000
"""Connections at once, besides those of the other wire."""
HEAD_BYTES_MAX = 32_768
REQUEST_TIMEOUT_S = 10.0
"""From its first byte, or from the connection, to its last: head and body."""
IDLE_TIMEOUT_S = 30.0
"""Between two requests of a connection."""
READ_TIMEOUT_S = 30.0
"""How long a peer may take nothing of a reply."""


class HttpServer:
    """All HTTP listeners of one daemon.

    Args: gate: answers. events: what streams hear. settings: addresses and limits.
    """

    def __init__(self, gate: Gate, events: Events, settings: Settings) -> None:
        self.settings = settings
        self.routes = Routes(gate, events, settings)
        self.state = ServerState()
        self.is_draining = False
        # The connections say what goes wrong by themselves, as events.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
        self.config = uvicorn.Config(
            Front(self.routes), http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX, timeout_keep_alive=int(IDLE_TIMEOUT_S),
        )  # fmt: skip
        self.config.load()
        self._bound: list[Listener] = []
        self._listeners: list[asyncio.Server] = []
        self._tls: ssl.SSLContext | None = None

    async def start(self, listeners: list[Listener]) -> list[str]:
        """Serves these sockets; returns their addresses as clients name them.

        Raises: BadArgument: the files for TLS cannot be used.
        """
        loop = asyncio.get_running_loop()
        self._bound = listeners
        self._tls = tls_context(self.settings) if listeners else None
        for each in listeners:
            make = functools.partial(HttpConnection, self, each)
            if each.path is not None:
                self._listeners.append(await loop.create_unix_server(make, sock=each.socket))
            else:
                handshake_s = REQUEST_TIMEOUT_S if self._tls else None
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

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self.state.connections)

    async def drain(self) -> None:
        """Takes no more connections or requests, answers what is in flight, ends streams, closes."""
        self.is_draining = True
        for listener in self._listeners:
            listener.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        self.routes.end_streams()
        deadline = time.monotonic() + self.settings.drain_timeout_ms / 1000
        while self.state.tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self.state.connections):
            connection.transport.close()
        for bound in self._bound:
            bound.unlink()


class HttpConnection(H11Protocol):
    """One client. A peer that is too slow in either direction is cut off."""

    def __init__(self, server: HttpServer, listener: Listener) -> None:
        self._facts: dict[str, Any] = {"door": listener.door, "is_unix": listener.path is not None, "connection": self}
        super().__init__(config=server.config, server_state=server.state, app_state=self._facts)
        self._server = server
        self._request_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if self._server.is_draining or self._server.connections > CONNECTIONS_MAX:
            log.warning("connection.refused", door="http", connections=self._server.connections)
            transport.abort()
            return
        self._facts["peer"] = peer_name(transport.get_extra_info("peercert"))
        self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._too_slow, "no request")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. What is in flight goes on: its answer is remembered for a resend."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._cancel(self._request_timer)
        self._cancel(self._reader_timer)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        """See uvicorn: what was sent behind the request is looked at now."""
        super().on_response_complete()
        self._watch_request()

    def _watch_request(self) -> None:
        """A request that has begun must end in time; bytes that drip in do not put that off."""
        state = self.conn.their_state
        has_begun = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
        if not has_begun:
            self._cancel(self._request_timer)
            self._request_timer = None
        elif self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._too_slow, "a request that does not end")

    def pause_writing(self) -> None:
        """See asyncio.Protocol: the client does not read."""
        super().pause_writing()
        self._reader_timer = self.loop.call_later(READ_TIMEOUT_S, self._too_slow, "replies are not read")

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        self._cancel(self._reader_timer)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so and closed."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = BadArgument("this is no HTTP request that is taken here", field="request", limit="HTTP/1.1")
            body = json.dumps(error.as_dict()).encode()
            headers = [
                (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"), (b"x-content-type-options", b"nosniff"),
            ]  # fmt: skip
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def cut(self, what: str) -> None:
        """Ends the connection at once: its peer does not keep up."""
        self._too_slow(what)

    def _too_slow(self, what: str) -> None:
        log.warning("connection.too_slow", what=what, door="http")
        self.transport.abort()

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()
