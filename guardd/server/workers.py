"""`--workers N`: several processes serve the same sockets; this one holds the store and the listeners.

The workers share nothing but the store. One that dies is started again; its
clients connect to another and send again under the same ids.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from prometheus_client.multiprocess import mark_process_dead

from guardd.engine.link import Link
from guardd.engine.tokens import Tokens
from guardd.keys import Keys
from guardd.server.access import check_somebody_can_make_tokens, roles_sentence
from guardd.server.daemon import notify_systemd, redact_key
from guardd.server.hooks import parse_hooks
from guardd.server.listeners import Listener, bind_listeners, check_addresses, tls_context
from guardd.server.metrics import FILES, WORKER_NUMBER
from guardd.server.settings import Settings
from guardd.store.connect import OpenedStore, open_store
from guardd.store.embedded import prepare_directory

log = structlog.get_logger()

RESTART_S = 0.2


class Workers:
    """The parent of N worker processes.

    Args: argv: the command line of `guardd serve`, given to each worker as it is.
    """

    def __init__(self, settings: Settings, argv: Sequence[str]) -> None:
        self._settings = settings
        self._argv = list(argv)
        self._listeners: list[Listener] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def serve(self) -> None:
        """Serves until SIGTERM or SIGINT; SIGHUP reaches every worker."""
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._tell, signal.SIGHUP)
        check_addresses(self._settings)
        tls_context(self._settings)
        parse_hooks(self._settings.hooks)
        state_dir = prepare_directory(Path(self._settings.state_dir))
        redact_key(state_dir)
        shutil.rmtree(state_dir / "metrics", ignore_errors=True)
        (state_dir / "metrics").mkdir(mode=0o700)
        opened = await open_store(
            self._settings.store, state_dir=state_dir / "store", durability=self._settings.durability or None,
            timeout_ms=self._settings.store_timeout_ms, prefix=self._settings.prefix, memory=state_dir / "canary.json",
        )  # fmt: skip
        try:
            tokens = Tokens(Link(opened.store), Keys(self._settings.prefix))
            await check_somebody_can_make_tokens(self._settings, tokens)
            self._listeners = bind_listeners(self._settings)
            self._keepers = [
                asyncio.create_task(self._keep(number, opened)) for number in range(self._settings.workers)
            ]
            log.info(
                "workers.started",
                workers=self._settings.workers,
                listen=[listener.shown for listener in self._listeners if listener.speaks == "rpc"],
                http=[listener.shown for listener in self._listeners if listener.speaks == "http"],
                store=opened.url,
                roles=roles_sentence(self._settings),
            )
            notify_systemd("READY=1")
            await stopping.wait()
        finally:
            await self._stop()
            await opened.close()

    async def _keep(self, number: int, opened: OpenedStore) -> None:
        """One worker, for as long as we serve."""
        store = f"unix://{opened.embedded.socket}" if opened.embedded else self._settings.store
        while not self._is_stopping:
            descriptors = [listener.socket.fileno() for listener in self._listeners]
            environment = {
                **os.environ, "GUARDD_STORE": store, "GUARDD_WORKERS": "1", "GUARDD_LISTEN_FDS": ",".join(map(str, descriptors)),
                "GUARDD_DURABILITY": opened.store.durability, **self._counting(number),
            }  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "guardd.cli.main", "serve", *self._argv, "--store", store, "--workers", "1",
                pass_fds=descriptors, env=environment,
            )  # fmt: skip
            self._processes[number] = process
            if self._is_stopping:  # said while this one was being made
                process.terminate()
            code = await process.wait()
            if FILES in environment:
                mark_process_dead(process.pid, environment[FILES])  # type: ignore[no-untyped-call]
            if not self._is_stopping:
                log.error("worker.died", number=number, exit_code=code)
                await asyncio.sleep(RESTART_S)

    def _counting(self, number: int) -> dict[str, str]:
        """Where a worker counts: in files beside those of the others, so that each can tell the sum."""
        if not self._settings.http_listen:
            return {}
        return {FILES: str(Path(self._settings.state_dir).absolute() / "metrics"), WORKER_NUMBER: str(number)}

    def _tell(self, name: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(name)

    async def _stop(self) -> None:
        self._is_stopping = True
        self._tell(signal.SIGTERM)
        await asyncio.gather(*self._keepers)
        for listener in self._listeners:
            listener.socket.close()
            listener.unlink()
        log.info("workers.stopped")
