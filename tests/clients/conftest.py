"""A daemon process and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from guardd_client import AsyncGuard

from tests.daemons import DaemonProcess, daemon
from tests.servers import Server


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[DaemonProcess]:
    """A daemon process on the session's server."""
    async with daemon(embedded.url, prefix) as running:
        yield running


@pytest.fixture
async def guard(served: DaemonProcess) -> AsyncIterator[AsyncGuard]:
    """A client of it."""
    async with AsyncGuard(served.url) as client:
        yield client
