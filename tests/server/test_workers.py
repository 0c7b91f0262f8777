"""`--workers N`: stopping while a worker is being made (SPEC 4)."""

from __future__ import annotations

import asyncio
import signal
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from guardd.server import workers
from guardd.server.settings import Settings
from guardd.store.connect import OpenedStore


async def test_a_worker_made_while_we_stop_is_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the parent would wait for it for ever."""
    parent = workers.Workers(Settings(), [])
    made: list[asyncio.subprocess.Process] = []
    spawn = asyncio.create_subprocess_exec

    async def slow(*_: Any, **__: Any) -> asyncio.subprocess.Process:
        process = await spawn(sys.executable, "-c", "import time; time.sleep(600)")
        made.append(process)
        parent._is_stopping = True
        parent._tell(signal.SIGTERM)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
    opened = cast("OpenedStore", SimpleNamespace(embedded=None, store=SimpleNamespace(durability="memory")))
    try:
        await asyncio.wait_for(parent._keep(0, opened), 30)
    finally:
        for process in made:
            if process.returncode is None:
                process.kill()
    assert [process.returncode for process in made] == [-signal.SIGTERM]
