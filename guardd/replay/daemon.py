"""A daemon of its own process for the player: each scenario is its configuration, taken on SIGHUP."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable

from guardd.model.errors import ERRORS, StoreUnavailable
from guardd.replay.scenario import Scenario

READY_DEADLINE_MS = 30_000


class ReplayDaemon:
    """Starts `guardd serve` on a store and changes its rules from scenario to scenario.

    Args: folder: for its socket and settings file. store: URL.
    """

    def __init__(self, folder: Path, store: str) -> None:
        self.url = f"unix:{folder / 'guardd.sock'}"
        self._folder = folder
        self._store = store
        self._file = folder / "guardd.json"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> ReplayDaemon:
        self._file.write_text("{}", encoding="utf-8")
        with (self._folder / "daemon.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "guardd.cli.main", "serve", "--listen", self.url, "--store", self._store,
                "--state-dir", str(self._folder / "state"), "--config", str(self._file), "--virtual-clock", stderr=log,
            )  # fmt: skip
        async with AsyncGuard(self.url, deadline_ms=READY_DEADLINE_MS) as guard:
            try:
                await guard.call("runs", {})
            except GuardUnavailable as error:
                said = (self._folder / "daemon.log").read_text(encoding="utf-8")
                raise StoreUnavailable(f"the daemon did not start: {said[-500:] or error}", field="daemon") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await self._process.wait()

    async def configure(self, scenario: Scenario, prefix: str) -> None:
        """Serves the scenario's policy and tool rules from now on."""
        assert self._process is not None
        config = scenario.config(prefix)
        policy = config.policies[config.default_policy]
        settings = {
            "default_policy": config.default_policy,
            "prefix": prefix,
            "tools": scenario.tools,
            "policies": {policy.name: {**policy.limits, "volatile_args": sorted(policy.volatile_args)}},
        }
        self._file.write_text(json.dumps(settings), encoding="utf-8")
        self._process.send_signal(signal.SIGHUP)
        wanted = config.digest()
        while True:
            async with AsyncGuard(self.url) as guard:
                await guard.call("runs", {})
                if guard.connection.server["config"] == wanted:
                    return
            await asyncio.sleep(0.005)


class DaemonGuard:
    """A client as the player wants it: errors as the guard's own. call: of a client, sync ones in a thread."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def call(self, name: str, params: dict[str, Any]) -> Any:
        """See player.Guard."""
        try:
            return await self._call(name, params)
        except GuardRequestError as error:
            facts = {fact: error.error.get(fact) for fact in ("value", "limit")}
            raise ERRORS[error.name](error.error.get("message", ""), field=error.field, **facts) from error
