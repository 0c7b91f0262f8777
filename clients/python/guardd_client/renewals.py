"""Keeps the claim of an effect while its tool runs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from guardd_client.errors import GuardUnavailable
from guardd_client.tools import Granted, ToolOptions

if TYPE_CHECKING:
    from guardd_client.aio import AsyncRun

log = logging.getLogger("guardd_client")

RENEWALS_PER_LEASE = 3


class Renewals:
    """Keeps a claim while a tool runs; hears of the run's end on the way."""

    def __init__(self, run: AsyncRun, granted: Granted, options: ToolOptions) -> None:
        self._run, self._granted, self._options = run, granted, options
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._granted.lease_ms is not None:
            self._task = asyncio.create_task(self._renew(self._granted.lease_ms))

    async def _renew(self, lease_ms: int) -> None:
        while True:
            await asyncio.sleep(lease_ms / RENEWALS_PER_LEASE / 1000)
            lease_ms = self._options.lease_ms or lease_ms
            try:
                await self._run.renew(self._granted.call, lease_ms=lease_ms)
            except GuardUnavailable as error:
                log.warning("a claim could not be renewed: %s", error)

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
