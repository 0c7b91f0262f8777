"""Three hosts with a network between them that can be cut: network namespaces, each with a server and a sentinel.

    with Network.make() as network, network.sentinels(folder) as them:
        network.partition("h1")         nothing passes between h1 and the others
        network.cut_one_way("h2", "h3") what h2 sends to h3 vanishes, not the other way
        network.heal()

A cut is silent, as a dead cable or switch is: the hosts know each other's link
addresses by heart, and a cut gives a host a link address that nobody has. No
link goes down, no packet is refused. The test itself looks on through a line
of its own that no cut touches; what must stand on one side of a cut is started
with `prefix(host)`, or gets a socket from `socket_in(host)`.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import shutil
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.nodes import Access
from tests.topologies import Sentinels

HOSTS = ("h1", "h2", "h3")
OBSERVER = "look"
NOBODY = "02:00:00:00:00:ff"
_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> str:
    """The `ip` command; its output.

    Raises: subprocess.CalledProcessError.
    """
    done = subprocess.run([str(shutil.which("ip")), *words], check=True, capture_output=True, text=True)
    return done.stdout


def need_namespaces() -> None:
    """Skips the test where hosts cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command on PATH")
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"gd{secrets.token_hex(3)}"
    made = subprocess.run([str(shutil.which("ip")), "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    ip("netns", "delete", name)


@dataclass
class Network:
    """Hosts on one bridge. tag: makes the names on this machine unique. cuts: (from, to) of what vanishes now."""

    tag: str
    subnet: str
    spaces: list[str] = field(default_factory=list)
    cuts: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def make(cls) -> Self:
        """Makes bridge and hosts; skips the test where that is not possible."""
        need_namespaces()
        taken = ip("-4", "address", "show") + ip("route", "show")
        subnet = next(
            s for s in iter(lambda: f"10.{random.randint(200, 250)}.{random.randint(0, 255)}", "") if s not in taken
        )
        network = cls(f"gd{secrets.token_hex(2)}", subnet)
        try:
            network._build()
        except BaseException:
            network.close()
            raise
        return network

    def _build(self) -> None:
        middle = self._space("bridge")
        ip("-n", middle, "link", "add", "br0", "type", "bridge")
        ip("-n", middle, "link", "set", "br0", "up")
        for number, host in enumerate((*HOSTS, OBSERVER), 1):
            port = f"{self.tag}b{number}"
            near = f"{self.tag}v{number}"
            where: tuple[str, ...] = ()
            if host == OBSERVER:
                ip("link", "add", near, "type", "veth", "peer", "name", port, "netns", middle)
            else:
                space = self._space(host)
                where = ("-n", space)
                ip("link", "add", near, "netns", space, "type", "veth", "peer", "name", port, "netns", middle)
                ip("-n", space, "link", "set", "lo", "up")
            ip(*where, "link", "set", near, "address", self._link_address(host))
            ip(*where, "address", "add", f"{self.address(host)}/24", "dev", near)
            ip(*where, "link", "set", near, "up")
            ip("-n", middle, "link", "set", port, "master", "br0")
            ip("-n", middle, "link", "set", port, "up")
        for host in HOSTS:
            for other in (*HOSTS, OBSERVER):
                if other != host:
                    self._send_to(host, other, self._link_address(other))

    def _space(self, name: str) -> str:
        space = f"{self.tag}-{name}"
        ip("netns", "add", space)
        self.spaces.append(space)
        return space

    @staticmethod
    def _number(host: str) -> int:
        return (*HOSTS, OBSERVER).index(host) + 1

    def _link_address(self, host: str) -> str:
        return f"02:00:00:00:00:{self._number(host):02x}"

    def _send_to(self, host: str, other: str, link_address: str) -> None:
        ip("-n", f"{self.tag}-{host}", "neighbour", "replace", self.address(other), "lladdr", link_address,
           "nud", "permanent", "dev", f"{self.tag}v{self._number(host)}")  # fmt: skip

    def address(self, host: str) -> str:
        """The IPv4 address of a host."""
        return f"{self.subnet}.{self._number(host)}"

    def host_of(self, address: str) -> str:
        """The host of `address` or `address:port`."""
        return next(host for host in HOSTS if self.address(host) == address.partition(":")[0])

    def prefix(self, host: str) -> tuple[str, ...]:
        """Words before a command that make it run on a host; the process keeps its number."""
        return (str(shutil.which("ip")), "netns", "exec", f"{self.tag}-{host}")

    def place(self, host: str) -> dict[str, Any]:
        """Where a node of tests.nodes stands."""
        return {"host": self.address(host), "prefix": self.prefix(host)}

    def sentinels(
        self, folder: Path, binary: Path | None = None, *options: str, access: Access | None = None
    ) -> Sentinels:
        """A server and a sentinel on each host; the first is primary."""
        placed = [self.place(host) for host in HOSTS]
        return Sentinels.start(folder, 2, 3, "guard", binary, *options, access=access, placed=placed)

    def socket_in(self, host: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket on a host; any thread may use it. Only the thread that makes it goes there."""
        made: list[socket.socket | OSError] = []

        def make() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with (Path("/run/netns") / f"{self.tag}-{host}").open("rb") as space:
                if libc.setns(space.fileno(), _CLONE_NEWNET):
                    made.append(OSError(ctypes.get_errno(), f"no way into {host}"))
                    return
            made.append(socket.socket(socket.AF_INET, kind))

        maker = threading.Thread(target=make)
        maker.start()
        maker.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    # ---- Cuts ------------------------------------------------------------------

    def cut_one_way(self, source: str, target: str) -> None:
        """What `source` sends to `target` vanishes."""
        self._send_to(source, target, NOBODY)
        self.cuts.add((source, target))

    def partition(self, host: str) -> None:
        """Nothing passes between this host and the others."""
        for other in HOSTS:
            if other != host:
                self.cut_one_way(host, other)
                self.cut_one_way(other, host)

    def join(self, host: str, other: str) -> None:
        """Everything passes again between these two."""
        for source, target in ((host, other), (other, host)):
            self._send_to(source, target, self._link_address(target))
            self.cuts.discard((source, target))

    def heal(self) -> None:
        """Everything passes again."""
        for source, target in sorted(self.cuts):
            self._send_to(source, target, self._link_address(target))
        self.cuts.clear()

    def flap(self, host: str, seconds: float) -> None:
        """A partition that lasts so long; returns when it is over."""
        self.partition(host)
        time.sleep(seconds)  # how long the fault lasts; nothing is concluded from it
        self.heal()

    def close(self) -> None:
        """Takes the hosts away; processes on them must have ended."""
        while self.spaces:
            ip("netns", "delete", self.spaces.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
