"""Machines that lose their power, and clocks that jump: a process under one of the shims beside this file.

cut = PowerCut.make(folder)             clock = Clock.make(folder)
Server.start(..., env=cut.env)          Server.start(..., env=clock.env)
cut.lose_power([server.process.pid])    clock.jump(31.0)
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import wait_until

SHIMS = Path(__file__).parent / "shims"


def build(name: str, folder: Path) -> Path:
    """Compiles a shim into `folder`; skips the test where there is no compiler."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc on PATH")
    target = folder / f"{name}.so"
    subprocess.run(
        [compiler, "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", "-o", str(target), str(SHIMS / f"{name}.c"),
         "-ldl"], check=True,
    )  # fmt: skip
    return target


@dataclass(frozen=True)
class PowerCut:
    """The disk of a machine: what its processes wrote and did not sync goes when the power does.

    env: for the processes of the machine. log: the shim's lines "inode length path".
    Names are taken as durable at once: a file that was made or renamed stays, with the length that was synced.
    """

    log: Path
    env: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> PowerCut:
        """Builds the shim; its files stand in `folder`, which no server may use for its own."""
        log = folder / "fsync.log"
        log.touch()
        return cls(log, {"LD_PRELOAD": str(build("fsync", folder)), "GUARDD_FSYNC_LOG": str(log)})

    def synced(self) -> dict[int, int]:
        """By inode, the length as of the last sync."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return {int(inode): int(length) for inode, length, *_ in (line.split(" ", 2) for line in lines)}

    def unsynced(self, folder: Path) -> dict[Path, tuple[int, int]]:
        """Append-only files below `folder` that are longer than what was synced: (length, length that is safe)."""
        synced, found = self.synced(), {}
        for path in sorted(folder.rglob("*.aof")):
            status = path.stat()
            safe = synced.get(status.st_ino, 0)
            if status.st_size > safe:
                found[path] = (status.st_size, safe)
        return found

    def lose_power(self, pids: Iterable[int], folder: Path) -> int:
        """Ends all processes at one moment and takes back what was not synced; returns how many bytes that was.

        They are frozen first, so that none can act on the death of another.
        """
        pids = list(pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            wait_until(lambda pid=pid: _state(pid) in "TZX", what=f"process {pid} frozen")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            wait_until(lambda pid=pid: _state(pid) in "ZX", what=f"process {pid} dead")
        lost = 0
        for path, (length, safe) in self.unsynced(folder).items():
            os.truncate(path, safe)
            lost += length - safe
        return lost


def _state(pid: int) -> str:
    """R, S, D, T (frozen), Z (dead, not yet waited for) as the kernel says; X: gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter when it goes while we read
        return "X"


@dataclass(frozen=True)
class Clock:
    """The wall clock of the processes started with `env`."""

    file: Path
    env: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> Clock:
        """Builds the shim; the clock is right."""
        file = folder / "clock.offset"
        file.write_bytes(struct.pack("=q", 0))
        return cls(file, {"LD_PRELOAD": str(build("clock", folder)), "GUARDD_CLOCK_OFFSET": str(file)})

    def jump(self, seconds: float) -> None:
        """Sets how far the clock is from the right time; seen at the next look."""
        with self.file.open("r+b", buffering=0) as file:
            file.write(struct.pack("=q", int(seconds * 1_000_000_000)))
