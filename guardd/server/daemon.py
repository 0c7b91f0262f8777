"""The daemon: store, engine, listeners, signals, and what has to be done every second."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from guardd import __version__
from guardd.engine.core import Engine
from guardd.model.errors import BadArgument, GuardError
from guardd.server.access import check_somebody_can_make_tokens, roles_sentence
from guardd.server.audit import Audit, AuditFile
from guardd.server.events import Events
from guardd.server.gate import Gate
from guardd.server.hooks import Hook, Hooks, parse_hooks
from guardd.server.housekeeping import Housekeeping
from guardd.server.http import CONNECTIONS_MAX, HttpServer
from guardd.server.listeners import check_addresses, open_listeners, raise_descriptor_limit
from guardd.server.metrics import Metrics
from guardd.server.rpc import Server
from guardd.server.settings import Settings
from guardd.store.connect import OpenedStore, open_store
from guardd.store.embedded import prepare_directory

if TYPE_CHECKING:
    from guardd.server.tracing import Tracing  # an extra

log = structlog.get_logger()


class Daemon:
    """One running guard.

    Args: settings: of this daemon. Its files are in `state_dir`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.addresses: list[str] = []
        self.http_addresses: list[str] = []
        self._opened: OpenedStore | None = None
        self._server: Server | None = None
        self._http: HttpServer | None = None
        self._events: Events | None = None
        self._gate: Gate | None = None
        self._audit: Audit | None = None
        self._housekeeping: Housekeeping | None = None
        self._hooks: Hooks | None = None
        self._tracing: Tracing | None = None

    async def start(self) -> None:
        """Opens the store and listens; afterwards `addresses` are served.

        Raises: StoreRefused, StoreUnavailable, BadArgument.
        """
        check_addresses(self.settings)
        state_dir = prepare_directory(Path(self.settings.state_dir))
        config, hooks = self.settings.engine_config(redact_key(state_dir)), parse_hooks(self.settings.hooks)
        self._opened = opened = await open_store(
            self.settings.store,
            state_dir=state_dir / "store",
            durability=self.settings.durability or None,
            timeout_ms=self.settings.store_timeout_ms,
            pipes=2,
            prefix=self.settings.prefix,
            memory=state_dir / "canary.json",
        )
        try:
            engine = Engine(opened.store, config)
            self._events = Events(opened.store, engine.context.keys.events)
            await self._events.start()
            self._events.on_settled = self._wake
            await check_somebody_can_make_tokens(self.settings, engine.tokens)
            self._audit = Audit(AuditFile(state_dir / "audit.jsonl"), engine.audit_stream)
            await self._audit.probe()
            self._gate = Gate(engine, self._audit, Metrics() if self.settings.http_listen else None)
            raise_descriptor_limit(self.settings.connections_max + CONNECTIONS_MAX)
            listeners = open_listeners(self.settings)
            self._server = Server(self._gate, self._events, self.settings)
            self._http = HttpServer(self._gate, self._events, self.settings)
            self.http_addresses = await self._http.start([each for each in listeners if each.speaks == "http"])
            self.addresses = await self._server.start([each for each in listeners if each.speaks == "rpc"])
            if self._gate.metrics is not None:
                self._count(self._gate.metrics, opened)
            self._call(hooks, self._gate)
            if self.settings.otel:
                self._tracing = make_tracing()
                self._gate.trace(self._tracing)
        except BaseException:
            await self.stop()
            raise
        self._housekeeping = Housekeeping(opened, self._gate, self._audit, is_sweeping=not self.settings.virtual_clock)
        self._housekeeping.start()
        self._say_start(opened)
        notify_systemd("READY=1")

    def _call(self, hooks: dict[str, Hook], gate: Gate) -> None:
        """From now on hooks are told; what metrics hear they hear as well."""
        if not hooks:
            return
        assert self._events is not None
        self._hooks = made = Hooks(hooks, lambda: gate.engine, gate.metrics.hook if gate.metrics else lambda _: None)
        heard = self._events.on_event

        def hear(event: dict[str, str]) -> None:
            heard(event)
            made.hear(event)

        self._events.on_event = hear
        made.start()

    def _count(self, metrics: Metrics, opened: OpenedStore) -> None:
        """From now on everybody tells the metrics what happens."""
        assert self._server is not None and self._http is not None
        assert self._events is not None and self._audit is not None
        server, http = self._server, self._http
        opened.store.observe(metrics.batch)
        self._audit.on_refused, self._audit.on_unwritten = metrics.refused, metrics.audit_failed
        self._events.on_event = lambda event: metrics.heard(event, time.perf_counter())

        def refresh() -> None:
            metrics.set("guardd_connections", len(server.connections), "socket")
            metrics.set("guardd_connections", http.connections, "http")
            metrics.set("guardd_requests_in_flight", sum(len(each.tasks) for each in server.connections), "socket")
            metrics.set("guardd_requests_in_flight", len(http.state.tasks) - http.routes.streams, "http")
            metrics.set("guardd_event_streams", http.routes.streams)

        metrics.refresh = refresh

    def _say_start(self, opened: OpenedStore) -> None:
        report = opened.report
        log.info(
            "daemon.started",
            version=__version__,
            listen=self.addresses,
            http=self.http_addresses,
            store=opened.url,
            server=f"{report.server} {report.version}" if report else "fakeredis",
            durability=opened.store.durability,
            promise=report.promise if report else "none: fakeredis is for tests",
            roles=roles_sentence(self.settings),
        )
        for warning in report.warnings if report else ():
            log.warning("store.warned", warning=warning)
        if opened.embedded is not None:
            log.info("store.readable", command=opened.embedded.cli_line)

    def _wake(self, key: str) -> None:
        if self._gate is not None:
            self._gate.engine.context.wakeups.wake(key)

    def reload(self, settings: Settings) -> None:
        """Takes policies and tool rules of new settings; addresses and store stay (SIGHUP)."""
        assert self._server is not None and self._http is not None
        assert self._gate is not None and self._opened is not None
        state_dir = Path(self.settings.state_dir)
        config = settings.engine_config(redact_key(state_dir))
        self._server.reload_certificates()
        self._http.reload_certificates()
        engine = Engine(self._opened.store, config)
        engine.context.wakeups = self._gate.engine.context.wakeups  # who waits goes on waiting
        self._gate.take(engine)
        log.info("daemon.reloaded", policies=sorted(config.policies), tools=sorted(config.tools.by_name))

    async def stop(self) -> None:
        """Answers what is in flight, then closes everything."""
        notify_systemd("STOPPING=1")
        if self._housekeeping is not None:
            await self._housekeeping.stop()
        await asyncio.gather(*(server.drain() for server in (self._server, self._http) if server is not None))
        if self._events is not None:
            await self._events.stop()
        if self._hooks is not None:
            await self._hooks.stop()
        if self._audit is not None:
            await self._audit.close()
        if self._opened is not None:
            await self._opened.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)
        log.info("daemon.stopped")


async def serve(settings: Settings, reload: object = None) -> None:
    """Runs a daemon until SIGTERM or SIGINT; SIGHUP calls `reload` for new settings."""
    daemon, stopping = Daemon(settings), asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    if callable(reload):

        def on_hangup() -> None:
            try:
                daemon.reload(reload())
            except GuardError as error:
                log.error("daemon.reload_refused", error=error.message, field=error.field)

        loop.add_signal_handler(signal.SIGHUP, on_hangup)
    await daemon.start()
    await stopping.wait()
    await daemon.stop()


def make_tracing() -> Tracing:
    """Spans by OTLP.

    Raises: BadArgument: the extra is not installed.
    """
    try:
        from guardd.server.tracing import Tracing
    except ImportError as error:
        raise BadArgument("otel needs the extra: pip install 'guardd[otel]'", field="otel", value=True) from error
    return Tracing()


def redact_key(state_dir: Path) -> bytes:
    """The key of this installation for digests of secrets; made at the first start."""
    path = state_dir / "redact.key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        key = secrets.token_bytes(32)
        file.write(key)
    return key


def notify_systemd(state: str) -> None:
    """sd_notify: systemd's readiness protocol, where it is asked for."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.connect("\0" + address[1:] if address.startswith("@") else address)
        notify.sendall(state.encode())
