"""A throw-away real server in a few lines: `with Server.start(folder) as server: ... server.url`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from guardd.store.embedded import find_server

START_TIMEOUT_S = 20.0


def wait_until(condition: object, *, timeout_s: float = START_TIMEOUT_S, what: str = "the condition") -> None:
    """Looks again until `condition()` holds. A process needs this; a rule never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {timeout_s} s")
        time.sleep(0.01)


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """A server process of this test; it ends with the `with` block."""

    process: subprocess.Popen[bytes]
    socket: Path
    folder: Path

    @classmethod
    def start(
        cls, folder: Path, *options: str, binary: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Server:
        """Starts a server on a Unix socket in `folder`, without persistence unless `options` say so. env: more of it."""
        path = folder / "s.sock"
        command: Sequence[str] = (
            str(binary or find_server()), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "600",
            "--save", "", "--dir", str(folder), "--hash-max-listpack-value", "1024",
            "--hash-max-listpack-entries", "64", *options,
        )  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
        server = cls(process, path, folder)
        wait_until(server._answers, what=f"{command[0]} on {path}")
        return server

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}")
        try:
            return bool(self.client().info("server")["process_id"] == self.process.pid)
        except redis.ConnectionError:
            return False

    @property
    def url(self) -> str:
        """The store URL of this server."""
        return f"unix://{self.socket}"

    def client(self) -> redis.Redis:
        """A plain client, for looking from outside."""
        return redis.Redis(unix_socket_path=str(self.socket), decode_responses=True)

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
