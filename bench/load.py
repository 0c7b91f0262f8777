"""A load generator: connections that ask before, and report after, as fast as answers come."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgpack

_LENGTH = struct.Struct(">I")
ARGS = {"query": "x" * 60, "page": 1, "options": {"lang": "en", "limit": 20}}


def frame(message: list[Any]) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(body)) + body


class Peer(asyncio.Protocol):
    """One connection with one request in flight."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._reply: asyncio.Future[Any] | None = None
        self._transport: Any = None
        self.events: list[tuple[float, dict[str, Any]]] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if len(self._buffer) < 4 + size:
                return
            message = msgpack.unpackb(bytes(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]
            if message[0] == 2:
                self.events.append((time.time(), message[2]))
            elif self._reply is not None:
                reply, self._reply = self._reply, None
                reply.set_result(message)

    async def ask(self, method: str, params: dict[str, Any]) -> Any:
        """One request and its result."""
        self._reply = reply = asyncio.get_running_loop().create_future()
        self._transport.write(frame([0, 1, method, params]))
        message = await reply
        assert message[2] is None, message[2]
        return message[3]


async def connect(path: str) -> Peer:
    """A greeted connection to a Unix socket."""
    _, peer = await asyncio.get_running_loop().create_unix_connection(Peer, path)
    await peer.ask("hello", {"versions": [1], "client": f"bench-{id(peer)}"})
    return peer


def calls(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """before and after of ever new calls; a run gets 200 of them, so that it stays as a run is."""
    number = 0
    while True:
        run, call = f"{name}-{number // 200}", f"{name}-call-{number:012d}"
        before = {"run": run, "call": call, "agent": "worker", "tool": "web_search", "args": {**ARGS, "n": number}}
        yield before, {"run": run, "call": call, "status": "progress", "value": {"ok": True}}
        number += 1


async def hammer(path: str, connections: int, seconds: float, name: str) -> tuple[list[float], float]:
    """Latencies of `before` in ms, and decisions (before and after) a second."""
    peers = [await connect(path) for _ in range(connections)]
    latencies: list[float] = []
    ends_s = time.perf_counter() + seconds
    done = 0

    async def work(peer: Peer, number: int) -> None:
        nonlocal done
        for before, after in calls(f"{name}-{number}"):
            start_s = time.perf_counter()
            if start_s > ends_s:
                return
            answer = await peer.ask("before", before)
            latencies.append((time.perf_counter() - start_s) * 1000)
            assert answer["action"] == "execute", answer
            await peer.ask("after", after)
            done += 2

    start_s = time.perf_counter()
    await asyncio.gather(*(work(peer, number) for number, peer in enumerate(peers)))
    return latencies, done / (time.perf_counter() - start_s)
