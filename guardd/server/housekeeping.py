"""What a daemon does every second besides answering: is the store still ours, which rules and tokens hold, which leases are over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from guardd.model.errors import GuardError
from guardd.server.audit import Audit
from guardd.server.gate import Gate
from guardd.store.connect import OpenedStore

log = structlog.get_logger()

EVERY_S = 1.0
RECHECK_S = 30.0


class Housekeeping:
    """The rounds of one daemon.

    Args: is_sweeping: False on a virtual clock, whose leases this machine's clock must not end.
    """

    def __init__(self, opened: OpenedStore, gate: Gate, audit: Audit, *, is_sweeping: bool) -> None:
        self._opened = opened
        self._gate = gate
        self._audit = audit
        self._is_sweeping = is_sweeping
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Goes round from now on."""
        self._task = asyncio.create_task(self._rounds())

    async def stop(self) -> None:
        """Goes round no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _rounds(self) -> None:
        began = checked_s = time.monotonic()
        while True:
            await self._round()
            if time.monotonic() - checked_s >= RECHECK_S:
                checked_s = time.monotonic()
                await self._recheck()
            await asyncio.sleep(EVERY_S - (time.monotonic() - began) % EVERY_S)

    async def _round(self) -> None:
        engine = self._gate.engine
        jobs: list[Callable[[], Awaitable[None]]] = [self._opened.prove, engine.rules.read, engine.tokens.read]
        if self._is_sweeping:
            jobs.append(self._sweep)
        for job in (*jobs, self._audit.flush):
            try:
                await job()
            except GuardError as error:
                log.warning("store.unanswered", job=getattr(job, "__qualname__", "job"), error=error.message)
        if self._gate.metrics is not None:
            self._gate.metrics.refresh()
        trouble = self._opened.store.trouble
        if trouble != self._trouble:
            self._trouble = trouble
            if trouble:
                log.error("store.distrusted", why=trouble)
            else:
                log.info("store.trusted")

    async def _sweep(self) -> None:
        found = await self._gate.engine.sweep.once()
        if self._gate.metrics is not None:
            self._gate.metrics.lapsed(len(found))
        for record in found:
            log.warning("effect.in_doubt", run=record.get("run"), tool=record.get("tool"), scope=record.get("scope"))

    async def _recheck(self) -> None:
        opened = self._opened
        before = opened.report.warnings if opened.report else ()
        try:
            await opened.recheck()
        except GuardError as error:
            log.warning("store.unanswered", job="recheck", error=error.message)
        for warning in opened.report.warnings if opened.report else ():
            if warning not in before:
                log.warning("store.warned", warning=warning)
