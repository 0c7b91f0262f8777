"""A real daemon process in a few lines: `async with daemon(tmp_path, embedded.url) as it: ... it.url`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard


@dataclass
class DaemonProcess:
    """A running `guardd serve`."""

    process: asyncio.subprocess.Process
    url: str
    folder: Path
    store: str
    prefix: str
    options: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    where: tuple[str, ...] = ()

    def log(self) -> list[dict[str, Any]]:
        """What it logged, an event a line."""
        lines = (self.folder / "daemon.log").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    async def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    async def restart(self) -> None:
        """The same daemon again, on the same store and socket."""
        self.process = await _spawn(self.folder, self.url, self.store, self.prefix, self.options, self.env, self.where)
        await _ready(self.url)


async def _spawn(
    folder: Path,
    url: str,
    store: str,
    prefix: str,
    options: tuple[str, ...],
    env: Mapping[str, str],
    where: tuple[str, ...],
) -> asyncio.subprocess.Process:
    with (folder / "daemon.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *where, sys.executable, "-m", "guardd.cli.main", "serve", "--listen", url, "--store", store, "--prefix", prefix,
            "--state-dir", str(folder / "state"), *options, stderr=log, env={**os.environ, **env},
        )  # fmt: skip


async def _ready(url: str) -> None:
    async with AsyncGuard(url, deadline_ms=20_000) as guard:
        await guard.call("runs", {})


@contextlib.asynccontextmanager
async def daemon(
    store: str,
    prefix: str,
    *options: str,
    ready: str = "",
    env: Mapping[str, str] | None = None,
    where: tuple[str, ...] = (),
) -> AsyncIterator[DaemonProcess]:
    """Starts a daemon and waits until it answers; its folder is short, for a socket's path may have 104 bytes.

    In options `FOLDER` stands for the folder; ready: the address to ask whether it answers, where `listen` takes tokens.
    env: more variables for it and its children. where: words before the command, such as `ip netns exec h1`.
    """
    with tempfile.TemporaryDirectory(prefix="gd-") as name:
        folder = Path(name)
        url = f"unix:{folder / 'd.sock'}"
        options = tuple(option.replace("FOLDER", str(folder)) for option in options)
        more = dict(env or {})
        process = await _spawn(folder, url, store, prefix, options, more, where)
        started = DaemonProcess(process, url, folder, store, prefix, options, more, where)
        try:
            await _ready(ready.replace("FOLDER", str(folder)) or url)
            yield started
        finally:
            await started.stop()
