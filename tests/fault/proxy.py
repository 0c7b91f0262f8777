"""A proxy that loses requests and replies, as a network does: by a connection that breaks.

A lost request is cut before it was forwarded: nothing happened. A lost reply
is cut after its request was forwarded: it happened, and nobody heard of it.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CHUNK_BYTES = 65_536


@dataclass
class LossyProxy:
    """`async with LossyProxy(target, random.Random(7)) as proxy: proxy.lose(0.05, 0.05)`; it listens on `proxy.path`.

    Args:
        target: socket of the server behind it: a path, or (host, port).
        chance: draws the faults.
    requests_lost, replies_lost: how many were cut.
    Each piece of the stream is judged by itself: with one request at a time on a connection, that is each message.
    """

    target: Path | tuple[str, int]
    chance: random.Random
    requests_lost: int = 0
    replies_lost: int = 0
    _rates: tuple[float, float] = (0.0, 0.0)
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="gp-")))
    _server: asyncio.Server | None = None
    _links: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def path(self) -> Path:
        """The socket that clients connect to."""
        return self._folder / "p.sock"

    @property
    def faults(self) -> int:
        """Messages that were lost."""
        return self.requests_lost + self.replies_lost

    def lose(self, requests: float, replies: float) -> None:
        """From now on these shares of the requests and replies are lost."""
        self._rates = (requests, replies)

    async def __aenter__(self) -> LossyProxy:
        self._server = await asyncio.start_unix_server(self._accept, path=self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._links:
            link.cancel()
        results = await asyncio.gather(*self._links, return_exceptions=True)
        shutil.rmtree(self._folder)
        broken = [each for each in results if isinstance(each, Exception)]
        assert not broken, broken

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(self._carry(reader, writer))
        self._links.add(link)
        link.add_done_callback(self._ended)

    def _ended(self, link: asyncio.Task[None]) -> None:
        if link.cancelled() or link.exception() is None:
            self._links.discard(link)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or a message is lost."""
        try:
            if isinstance(self.target, Path):
                to_server = await asyncio.open_unix_connection(str(self.target))
            else:
                to_server = await asyncio.open_connection(*self.target)
        except OSError:  # the server is down: so are we, to this client
            writer.transport.abort()
            return
        ways = [
            asyncio.create_task(self._requests(reader, to_server[1])),
            asyncio.create_task(self._replies(to_server[0], writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (*ways,):
                each.cancel()
            results = await asyncio.gather(*ways, return_exceptions=True)
            for each_writer in (writer, to_server[1]):
                each_writer.transport.abort()
        for result in results:
            # Either side may have been killed; anything else is a defect of the proxy.
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self.chance.random() < self._rates[0]:
                self.requests_lost += 1
                return
            writer.write(chunk)
            await writer.drain()

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            if self.chance.random() < self._rates[1]:
                self.replies_lost += 1
                return
            writer.write(chunk)
            await writer.drain()
