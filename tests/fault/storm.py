"""Worker processes and what is done to them: started from a fork server, killed, frozen, heard."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.daemons import DaemonProcess
from tests.fault.rows import scale
from tests.fault.worker import Plan

UNTIL_S = scale(60, 15)
"""Far beyond what anything here needs: only a failure waits so long."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.fault.worker"])


def drawn_seed() -> int:
    """A new seed, or GUARDD_FAULT_SEED to repeat one. It is printed, so a failure shows it."""
    seed = int(os.environ.get("GUARDD_FAULT_SEED") or secrets.randbelow(2**31))
    print(f"GUARDD_FAULT_SEED={seed}")
    return seed


async def until(condition: Callable[[], object], what: str) -> None:
    """Looks again until `condition()` holds; the loop goes on meanwhile. A process needs this; a rule never does."""
    deadline = time.monotonic() + UNTIL_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {UNTIL_S:g} s")
        await asyncio.sleep(0.003)


_started: list[BaseProcess] = []


def end_all() -> None:
    """SIGKILL to every worker that is left: one that is frozen hears nothing else."""
    while _started:
        process = _started.pop()
        process.kill()
        process.join()


@dataclass
class Worker:
    """A worker process: `work` or `halt` of tests.fault.worker."""

    process: BaseProcess
    _told: Connection

    @classmethod
    def start(cls, target: Callable[[Plan, Connection], None], plan: Plan) -> Worker:
        """A process that carries out the plan."""
        here, there = _processes.Pipe()
        process = _processes.Process(target=target, args=(plan, there), daemon=True)
        process.start()
        there.close()
        _started.append(process)
        return cls(process, here)

    async def heard(self) -> Any:
        """What it says next.

        Raises: AssertionError: it died without a word.
        """
        await until(self._told.poll, f"a word of worker {self.process.pid}")
        try:
            return self._told.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"worker {self.process.pid} died: exit {self.process.exitcode}") from None

    def tell(self, word: str) -> None:
        """It goes on."""
        self._told.send(word)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL
        self._told.close()

    async def freeze(self) -> None:
        """SIGSTOP; returns when it has stopped."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        os.kill(self.process.pid or 0, signal.SIGSTOP)
        await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the freeze")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

    async def end(self) -> None:
        """Waits for its own end, which must be a good one."""
        await until(lambda: not self.process.is_alive(), f"the end of worker {self.process.pid}")
        assert self.process.exitcode == 0
        self._told.close()


@dataclass
class Recovery:
    """How long the guard did not serve after each fault, ms."""

    times_ms: list[float] = field(default_factory=list)

    def note(self) -> str:
        """For a row."""
        ordered = sorted(self.times_ms)
        return f"serves again after {ordered[len(ordered) // 2]:.0f} ms (median), {ordered[-1]:.0f} ms (longest)"


def short_folder(served: DaemonProcess) -> Path:
    """The folder of the journal: the daemon's, so that it goes with it."""
    folder = served.folder / "journal"
    folder.mkdir()
    return folder
