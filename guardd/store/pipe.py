"""One connection on which the commands of many callers travel together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from hiredis import pack_command
from redis import exceptions as driver
from redis.asyncio.connection import AbstractConnection, ConnectionPool

from guardd.model.errors import StoreUnavailable
from guardd.store.base import Command, Reply, Unproved
from guardd.store.errors import map_error

Kind = Literal["plain", "record", "grant"]
OnBatch = Callable[[int, float], None]
"""Hears of every batch: its commands, and the seconds until the last reply or the failure."""
Judge = Callable[[list[Reply]], Unproved | None]


class Proof(Protocol):
    """What ends a batch that holds scripts, to learn whether its writes stand as firmly as they must."""

    def begin(self) -> tuple[list[Command], Judge]:
        """Commands to send after the batch, and who judges by their replies."""


class Entry(NamedTuple):
    """The commands of one caller. kind: plain, or a script whose writes have to be proved: it records, or may grant."""

    commands: list[Command]
    kind: Kind
    future: asyncio.Future[list[Reply]]


def pack(command: Command) -> bytes:
    """A command as it goes over the wire. The driver's async connections pack in Python; hiredis does it in C."""
    packed: bytes = pack_command(tuple(command))  # type: ignore[arg-type]
    return packed


class Pipe:
    """One connection, batches of commands.

    While a batch is on the wire later callers queue up; they go as the next
    batch, never waiting for a timer to fill one. After a failure or a timeout
    the connection is dropped, so that a late reply is never read as the answer
    to another command; the next batch connects again.
    """

    def __init__(self, pool: ConnectionPool, *, timeout_s: float, proof: Proof | None = None) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._proof = proof
        self._connection: AbstractConnection | None = None
        self._queue: list[Entry] = []
        self._sender: asyncio.Task[None] | None = None
        self.on_batch: OnBatch | None = None

    async def execute(self, commands: list[Command], *, kind: Kind = "plain") -> list[Reply]:
        """Replies in order; an error reply stands in the list as an exception.

        Raises: StoreUnavailable. Unproved: with the replies of a script whose write is not proved.
        """
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._queue.append(Entry(commands, kind, future))
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

    async def _send(self, batch: list[Entry]) -> None:
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._connection is None:
                    connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
                    await connection.connect()  # type: ignore[no-untyped-call]
                    self._connection = connection
                await self._talk(self._connection, batch)
        except BaseException as error:
            await self._drop()
            mapped = map_error(error, where="the store")
            for entry in batch:
                if not entry.future.done():
                    entry.future.set_exception(mapped)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            if self.on_batch is not None:
                self.on_batch(sum(len(entry.commands) for entry in batch), time.perf_counter() - began_s)

    async def _talk(self, connection: AbstractConnection, batch: list[Entry]) -> None:
        """Sends a batch and reads its replies; scripts are answered when the proof was read, too."""
        closing: list[Command] = []
        judge: Judge | None = None
        if self._proof is not None and any(entry.kind != "plain" for entry in batch):
            closing, judge = self._proof.begin()
        sent = [pack(command) for entry in batch for command in entry.commands] + [pack(each) for each in closing]
        await connection.send_packed_command(b"".join(sent), check_health=False)
        unproved: list[tuple[Entry, list[Reply]]] = []
        for entry in batch:
            replies = [await self._read(connection) for _ in entry.commands]
            if entry.kind != "plain" and judge is not None:
                unproved.append((entry, replies))
            elif not entry.future.done():
                entry.future.set_result(replies)
        if judge is None:
            return
        verdict = judge([await self._read(connection) for _ in closing])
        for entry, replies in unproved:
            if entry.future.done():
                continue
            if verdict is None or (verdict.spares_records and entry.kind == "record"):
                entry.future.set_result(replies)
            else:
                entry.future.set_exception(Unproved(verdict.message, value=verdict.value, replies=replies))

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
        if (sender := self._sender) is not None:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if self._sender is sender:  # cancelled before it began, it could not say that it is over
                self._sender = None
        waiting, self._queue = self._queue, []
        for entry in waiting:
            if not entry.future.done():
                entry.future.set_exception(StoreUnavailable("the store was closed", field="store"))
        await self._drop()
