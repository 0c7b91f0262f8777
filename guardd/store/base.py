"""One store behind the engine: commands and scripts, gathered into pipelines.

Nothing here repeats a command by itself. A NOSCRIPT answer means that nothing
ran, so the script is loaded and the same EVALSHA sent once; every other failure
is the caller's to send again under the same call id.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection, ConnectionPool

from guardd.model.errors import StoreUnavailable
from guardd.store.errors import map_error

Command = Sequence[str | bytes | int | float]
Reply = Any


class ScriptLike(Protocol):
    """What a store needs of a script. flags: of the `#!lua` line, for servers that know it."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def flags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class LoadedScript:
    """Text as this server gets it, and its SHA-1."""

    text: str
    sha: str


class Store(Protocol):
    """What the engine asks of a store.

    kind:       embedded | standalone | fake.
    durability: memory | fsync: when an answer is given, what a granted call survives.
    """

    kind: str
    durability: str

    async def execute(self, *commands: Command) -> list[Reply]:
        """Sends commands in one write; replies in order.

        Raises: StoreUnavailable: no connection, no answer in time, or an error for one of the commands.
        """

    async def transaction(self, *commands: Command) -> list[Reply]:
        """The same as one MULTI/EXEC: a consistent look."""

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *,
        before: Sequence[Command] = (),
    ) -> Reply:  # fmt: skip
        """Runs a script, with plain commands before it in the same write.

        Raises: the error the script names, or StoreUnavailable.
        """

    async def close(self) -> None:
        """Lets connections, and an embedded server, go."""


class Scripts:
    """The texts and digests of scripts for one kind of server."""

    def __init__(self, *, with_flags: bool) -> None:
        self._with_flags = with_flags
        self._loaded: dict[str, LoadedScript] = {}

    def get(self, script: ScriptLike) -> LoadedScript:
        """The script as this server gets it."""
        found = self._loaded.get(script.name)
        if found is None:
            text = script.text
            if self._with_flags:
                text = f"#!lua{' flags=' + ','.join(script.flags) if script.flags else ''}\n{text}"
            found = self._loaded[script.name] = LoadedScript(text, hashlib.sha1(text.encode()).hexdigest())  # noqa: S324 (names a script, as the server does)
        return found


def checked(replies: list[Reply], *, where: str) -> list[Reply]:
    """The replies, when none is an error; else the first error as the guard's own."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise map_error(reply, where=where) from reply
    return replies


class Pipe:
    """One connection on which the commands of many callers travel together.

    While a batch is on the wire later callers queue up; they go as the next
    batch, never waiting for a timer to fill one. After a failure or a timeout
    the connection is dropped, so that a late reply is never read as the answer
    to another command; the next batch connects again.
    """

    def __init__(self, pool: ConnectionPool, *, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._queue: list[tuple[list[Command], asyncio.Future[list[Reply]]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def execute(self, commands: list[Command]) -> list[Reply]:
        """Replies in order; an error reply stands in the list as an exception."""
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._queue.append((commands, future))
        if self._sender is None:
            self._sender = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                await self._send(batch)
        finally:
            self._sender = None

    async def _send(self, batch: list[tuple[list[Command], asyncio.Future[list[Reply]]]]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._connection is None:
                    connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
                    await connection.connect()  # type: ignore[no-untyped-call]
                    self._connection = connection
                connection = self._connection
                packed = connection.pack_commands([command for commands, _ in batch for command in commands])
                await connection.send_packed_command(packed, check_health=False)
                for commands, future in batch:
                    replies = [await self._read(connection) for _ in commands]
                    if not future.done():
                        future.set_result(replies)
        except BaseException as error:
            await self._drop()
            mapped = map_error(error, where="the store")
            for _, future in batch:
                if not future.done():
                    future.set_exception(mapped)
            if isinstance(error, asyncio.CancelledError):
                raise

    @staticmethod
    async def _read(connection: AbstractConnection) -> Reply:
        try:
            return await connection.read_response(disconnect_on_error=False)
        except driver.ResponseError as error:
            return error

    async def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Drops the connection; callers that wait get StoreUnavailable."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        waiting, self._queue = self._queue, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(StoreUnavailable("the store was closed", field="store"))
        await self._drop()


class ServerStore:
    """A standalone server, by one or a few pipes.

    Args: pool:   makes connections, without retries (`connect.pool_for`).
          pipes:  connections; more let a batch travel while another is worked on.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        kind: str,
        durability: str,
        timeout_ms: int,
        pipes: int = 1,
        with_flags: bool = True,
    ) -> None:
        self.kind = kind
        self.durability = durability
        self.pool = pool
        self._pipes = [Pipe(pool, timeout_s=timeout_ms / 1000) for _ in range(pipes)]
        self._scripts = Scripts(with_flags=with_flags)
        self._turn = 0

    def _pipe(self) -> Pipe:
        self._turn = (self._turn + 1) % len(self._pipes)
        return self._pipes[self._turn]

    async def execute(self, *commands: Command) -> list[Reply]:
        """See Store."""
        return checked(await self._pipe().execute(list(commands)), where="a command")

    async def transaction(self, *commands: Command) -> list[Reply]:
        """See Store."""
        replies = await self._pipe().execute([("MULTI",), *commands, ("EXEC",)])
        return list(checked(replies, where="a transaction")[-1])

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *, before: Sequence[Command] = ()
    ) -> Reply:
        """See Store."""
        loaded = self._scripts.get(script)
        call: Command = ("EVALSHA", loaded.sha, len(keys), *keys, *args)
        pipe = self._pipe()
        replies = await pipe.execute([*before, call])
        if isinstance(replies[-1], driver.NoScriptError):
            # Nothing ran: load it and send the same call once.
            replies = [*replies[:-1], *await pipe.execute([("SCRIPT", "LOAD", loaded.text), call])]
        return checked(replies, where=f"the script {script.name}")[-1]

    async def close(self) -> None:
        """See Store."""
        for pipe in self._pipes:
            await pipe.close()
        await self.pool.disconnect()
