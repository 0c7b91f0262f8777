"""All scenarios through a running daemon, with the async and with the sync client."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from guardd_client import AsyncGuard, Guard

from guardd.replay.daemon import DaemonGuard, ReplayDaemon
from guardd.replay.player import play
from guardd.replay.scenario import read_scenario
from tests.servers import Server

FILES = sorted((Path(__file__).parents[1] / "scenarios").glob("**/*.json"))


@pytest.mark.parametrize("shell", ["async", "sync"])
async def test_every_scenario_holds_over_the_wire(shell: str, embedded: Server, prefix: str) -> None:
    """The same answers as in the process."""
    differences: list[str] = []
    with tempfile.TemporaryDirectory(prefix="gd-") as folder:
        async with ReplayDaemon(Path(folder), embedded.url) as daemon:
            for number, path in enumerate(FILES):
                scenario = read_scenario(path)
                await daemon.configure(scenario, f"{prefix}-{number}")
                async with AsyncGuard(daemon.url) as guard:
                    call: Any = guard.call
                    if shell == "sync":
                        sync = Guard(daemon.url)
                        call = lambda name, params, sync=sync: asyncio.to_thread(sync.call, name, params)  # noqa: E731
                    played = await play(scenario, DaemonGuard(call))
                    if shell == "sync":
                        await asyncio.to_thread(sync.close)
                differences += [f"{path.name}: {difference}" for difference in played.differences]
    assert not differences, "\n".join(differences)
