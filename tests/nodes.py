"""One server process of a topology: on a loopback port of its own, ended, frozen and started again at will.

`Access` says how it is reached: in the clear or by TLS, open or by an ACL user.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from guardd.store.embedded import find_server
from tests.servers import wait_until

PORTS = range(12_000, 22_000)  # below those that the system gives to outgoing connections
BUS_ABOVE = 10_000  # the cluster bus of a port: above all ports of servers, still below those of the system
ATTEMPTS = 20
ANSWER_TIMEOUT_S = 2.0
LOOPBACK = "127.0.0.1"


def has_tls(binary: Path) -> bool:
    """Whether this server was built with TLS: then it ends for want of a certificate, else for want of TLS."""
    said = subprocess.run([str(binary), "--port", "0", "--tls-port", "1"], capture_output=True, check=False, timeout=20)
    assert said.returncode != 0, "a server started with TLS and no certificate"
    return b"No tls-cert-file configured" in said.stdout


def listening_port(host: str = LOOPBACK) -> int:
    """A port that is free now and that no outgoing connection will take."""
    for _ in range(1000):
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


@dataclass(frozen=True)
class Tls:
    """A throw-away authority and a certificate for the loopback, as files."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Tls:
        """By the openssl command; the key is an elliptic one, so that it takes no time."""
        openssl = shutil.which("openssl")
        if openssl is None:
            raise AssertionError("no openssl on PATH")

        def run(*words: str) -> None:
            subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True)

        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        run("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=throw-away CA")
        run("req", *new, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n", encoding="ascii")
        run("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "names", "-out", "server.pem")  # fmt: skip
        return cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")


@dataclass(frozen=True)
class Access:
    """How the servers of a topology are reached.

    user, password: an ACL user that may do everything; then the default user is off. tls: None: in the clear.
    """

    user: str = ""
    password: str = ""
    tls: Tls | None = None

    def config(self, port: int, *, is_sentinel: bool = False) -> list[str]:
        """The lines of a configuration file."""
        lines = [f"port {port}"]
        if self.tls is not None:
            lines = [
                "port 0", f"tls-port {port}", f"tls-cert-file {self.tls.certificate}", f"tls-key-file {self.tls.key}",
                f"tls-ca-cert-file {self.tls.ca}", "tls-auth-clients no", "tls-replication yes",
            ]  # fmt: skip
        if self.user and not is_sentinel:
            lines += [f"user {self.user} on >{self.password} ~* &* +@all", "user default off"]
            lines += [f"masteruser {self.user}", f"masterauth {self.password}"]
        return lines

    def client_options(self) -> dict[str, Any]:
        """Arguments for redis.Redis."""
        options: dict[str, Any] = {}
        if self.user:
            options.update(username=self.user, password=self.password)
        if self.tls is not None:
            options.update(ssl=True, ssl_ca_certs=str(self.tls.ca))
        return options

    def url(self, kind: str, addresses: list[str], path: str = "") -> str:
        """`redis+sentinel://user:password@h:p,h:p/guard`; by TLS `rediss…?ssl_ca_certs=FILE`. kind: "", "+sentinel"."""
        login = f"{self.user}:{self.password}@" if self.user else ""
        query = f"?ssl_ca_certs={self.tls.ca}" if self.tls else ""
        return f"redis{'s' if self.tls else ''}{kind}://{login}{','.join(addresses)}{path}{query}"


@dataclass
class Node:
    """A server process with its configuration file in `folder`. prefix: words before the command (`ip netns exec h1`)."""

    binary: Path
    folder: Path
    port: int
    lines: list[str]
    access: Access = field(default_factory=Access)
    host: str = LOOPBACK
    is_sentinel: bool = False
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    is_paused: bool = False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def bus(self) -> int:
        """Where it meets the other nodes of a cluster."""
        return self.port + BUS_ABOVE

    @property
    def is_up(self) -> bool:
        """Runs and is not frozen."""
        return self.process is not None and self.process.poll() is None and not self.is_paused

    def write_config(self) -> None:
        """The file that it starts from, and that it may write anew."""
        common = [f"bind {self.host}", f"dir {self.folder}", f"logfile {self.folder}/server.log", "protected-mode no"]
        if not self.is_sentinel:
            common += ['save ""', "hash-max-listpack-value 1024", "hash-max-listpack-entries 64",
                       "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"]  # fmt: skip
        lines = common + self.access.config(self.port, is_sentinel=self.is_sentinel) + self.lines
        (self.folder / "server.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def spawn(self) -> bool:
        """Starts the process; False when it ended at once or when another one has the port."""
        command = [*self.prefix, str(self.binary), str(self.folder / "server.conf")]
        if self.is_sentinel:
            command.append("--sentinel")
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **self.environment}
        )
        self.is_paused = False
        wait_until(lambda: self.process is None or self.process.poll() is not None or self._who() is not None,
                   what=f"a server on {self.address}")  # fmt: skip
        return self.process.poll() is None and self._who() == self.process.pid

    def _who(self) -> int | None:
        """The process that answers on our port, None: nobody yet."""
        try:
            pid: int = self.client().info("server")["process_id"]
        except redis.AuthenticationError:
            return -1  # not one of ours
        except (redis.ConnectionError, redis.TimeoutError):
            return None
        return pid

    def client(self, timeout_s: float = ANSWER_TIMEOUT_S) -> redis.Redis:
        """A plain client that repeats nothing and follows nothing, for looking from outside."""
        options = self.access.client_options()
        if self.is_sentinel:
            options = {name: value for name, value in options.items() if name.startswith("ssl")}
        return redis.Redis(
            self.host,
            self.port,
            decode_responses=True,
            socket_timeout=timeout_s,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            **options,
        )

    def ask(self, *words: str | int) -> Any:
        """One command on a connection of its own, the reply as redis-py gives it."""
        with self.client() as client:
            return client.execute_command(*words)

    def info(self, section: str) -> dict[str, Any]:
        """A section of INFO."""
        with self.client() as client:
            found: dict[str, Any] = client.info(section)
            return found

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.is_paused = False

    def restart(self) -> None:
        """Starts it again on the same port, from its own configuration file."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if not self.spawn():
            raise AssertionError(f"{self.address} did not come back, see {self.folder}/server.log")


@dataclass
class Nodes:
    """Processes that end together, and what all topologies do with them."""

    folder: Path
    binary: Path = field(default_factory=find_server)
    access: Access = field(default_factory=Access)
    options: tuple[str, ...] = ()
    nodes: list[Node] = field(default_factory=list)

    def start_node(self, name: str, lines: list[str], *, is_sentinel: bool = False, **placed: Any) -> Node:
        """A node in a folder of its own; on another port when somebody was faster. placed: host, prefix."""
        for _ in range(ATTEMPTS):
            port = listening_port()
            node = Node(self.binary, self.folder / name, port, lines, self.access, is_sentinel=is_sentinel, **placed)
            node.folder.mkdir(exist_ok=True)
            node.lines = [line.replace("{bus}", str(node.bus)) for line in lines]
            node.write_config()
            if node.spawn():
                self.nodes.append(node)
                return node
            node.kill()
            log = node.folder / "server.log"
            text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            if "Address already in use" not in text and "bind" not in text.lower():
                raise AssertionError(
                    f"{self.binary} did not start: {text[-500:] or 'no log'}; {node.folder}/server.conf"
                )
            log.unlink()
        raise AssertionError("no port was kept long enough")

    def at(self, address: str) -> Node:
        """The node of an address `host:port`."""
        return next(node for node in self.nodes if node.address == address)

    def kill(self, node: Node) -> None:
        """SIGKILL."""
        node.kill()

    def pause(self, node: Node) -> None:
        """SIGSTOP."""
        node.pause()

    def resume(self, node: Node) -> None:
        """SIGCONT."""
        node.resume()

    def restart(self, node: Node) -> None:
        """The same server again on its port."""
        node.restart()

    def close(self) -> None:
        """Ends all processes."""
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None:
                node.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def option_lines(options: tuple[str, ...]) -> list[str]:
    """`("--appendonly", "yes")` as lines of a configuration file."""
    text = " ".join(options)
    return [line.strip() for line in f" {text}".split(" --") if line.strip()]


@contextmanager
def ended_on_error(nodes: Nodes) -> Iterator[None]:
    """Ends what was started when a start fails half-way."""
    try:
        yield
    except BaseException:
        nodes.close()
        raise


def answers(node: Node, *words: str | int) -> Any:
    """The reply, or None while the node cannot answer (it starts, is cut off, or has just died)."""
    try:
        return node.ask(*words)
    except (redis.ConnectionError, redis.TimeoutError):
        return None


def wait_to_see(condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
    """Waits until a look at running nodes shows this; a node that drops us meanwhile has not shown it yet."""

    def look() -> bool:
        try:
            return condition()
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    wait_until(look, timeout_s=timeout_s, what=what)
