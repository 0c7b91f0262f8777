"""The daemon: store, engine, listeners, signals, and what has to be done every second."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from guardd import __version__
from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.server.events import Events
from guardd.server.rpc import Server
from guardd.server.settings import Settings
from guardd.store.connect import OpenedStore, open_store
from guardd.store.embedded import prepare_directory

log = structlog.get_logger()

SWEEP_S = 1.0
RECHECK_S = 30.0


class Daemon:
    """One running guard.

    Args: settings: of this daemon. Its files are in `state_dir`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.addresses: list[str] = []
        self._opened: OpenedStore | None = None
        self._server: Server | None = None
        self._events: Events | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the store and listens; afterwards `addresses` are served.

        Raises: StoreRefused, StoreUnavailable, BadArgument.
        """
        state_dir = prepare_directory(Path(self.settings.state_dir))
        config = self.settings.engine_config(redact_key(state_dir))
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
            self._server = Server(engine, self._events, self.settings)
            self.addresses = await self._server.start()
        except BaseException:
            await self.stop()
            raise
        self._sweeper = asyncio.create_task(self._watch_store(opened))
        self._say_start(opened)
        notify_systemd("READY=1")

    def _say_start(self, opened: OpenedStore) -> None:
        report = opened.report
        log.info(
            "daemon.started",
            version=__version__,
            listen=self.addresses,
            store=opened.url,
            server=f"{report.server} {report.version}" if report else "fakeredis",
            durability=opened.store.durability,
            promise=report.promise if report else "none: fakeredis is for tests",
            roles="no tokens: everybody on these addresses is operator",
        )
        for warning in report.warnings if report else ():
            log.warning("store.warned", warning=warning)
        if opened.embedded is not None:
            log.info("store.readable", command=opened.embedded.cli_line)

    async def _watch_store(self, opened: OpenedStore) -> None:
        """Every second: is it still our store, which deny rules hold, which leases are over. Every 30 s: what it promises."""
        assert self._server is not None
        began = checked_s = time.monotonic()
        trouble = ""
        while True:
            jobs: list[Callable[[], Awaitable[None]]] = [opened.prove, self._server.engine.deny_rules.read]
            if not self.settings.virtual_clock:
                jobs.append(self._sweep)
            for job in jobs:
                try:
                    await job()
                except GuardError as error:
                    log.warning("store.unanswered", job=job.__qualname__, error=error.message)
            if time.monotonic() - checked_s >= RECHECK_S:
                checked_s = time.monotonic()
                await self._recheck(opened)
            if opened.store.trouble != trouble:
                trouble = opened.store.trouble
                if trouble:
                    log.error("store.distrusted", why=trouble)
                else:
                    log.info("store.trusted")
            await asyncio.sleep(max(0.0, SWEEP_S - (time.monotonic() - began) % SWEEP_S))

    def _wake(self, key: str) -> None:
        if self._server is not None:
            self._server.engine.context.wakeups.wake(key)

    async def _sweep(self) -> None:
        assert self._server is not None
        for record in await self._server.engine.sweep.once():
            log.warning("effect.in_doubt", run=record.get("run"), tool=record.get("tool"), scope=record.get("scope"))

    async def _recheck(self, opened: OpenedStore) -> None:
        before = opened.report.warnings if opened.report else ()
        try:
            await opened.recheck()
        except GuardError as error:
            log.warning("store.unanswered", job="recheck", error=error.message)
        for warning in opened.report.warnings if opened.report else ():
            if warning not in before:
                log.warning("store.warned", warning=warning)

    def reload(self, settings: Settings) -> None:
        """Takes policies and tool rules of new settings; addresses and store stay (SIGHUP)."""
        assert self._server is not None and self._opened is not None
        state_dir = Path(self.settings.state_dir)
        config = settings.engine_config(redact_key(state_dir))
        self._server.engine = Engine(self._opened.store, config)
        log.info("daemon.reloaded", policies=sorted(config.policies), tools=sorted(config.tools.by_name))

    async def stop(self) -> None:
        """Answers what is in flight, then closes everything."""
        notify_systemd("STOPPING=1")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._server is not None:
            await self._server.drain()
        if self._events is not None:
            await self._events.stop()
        if self._opened is not None:
            await self._opened.close()
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
