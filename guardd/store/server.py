"""One primary: a standalone server, the embedded one, or the one that a Sentinel set names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import exceptions as driver
from redis.asyncio.connection import ConnectionPool

from guardd.store.base import (
    Command,
    LoadedScript,
    Reply,
    ScriptLike,
    Scripts,
    Unproved,
    answered,
    checked,
    may_grant,
    refuse_grants,
    scanned,
)
from guardd.store.canary import SETTLE_S, BatchProof, Canaries
from guardd.store.pipe import Kind, OnBatch, Pipe, Proof

_DID_NOT_RUN = (driver.NoScriptError, driver.AskError)  # a MovedError is one, too


class Node:
    """The connections to one server.

    Args: pipes: connections; more let a batch travel while another is worked on.
    """

    def __init__(self, pool: ConnectionPool, *, timeout_ms: int, pipes: int, proof: Proof | None) -> None:
        self.pool = pool
        self._pipes = [Pipe(pool, timeout_s=timeout_ms / 1000, proof=proof) for _ in range(pipes)]
        self._turn = 0

    def _pipe(self) -> Pipe:
        self._turn = (self._turn + 1) % len(self._pipes)
        return self._pipes[self._turn]

    async def execute(self, *commands: Command) -> list[Reply]:
        """Replies in order, errors among them as exceptions."""
        return await self._pipe().execute(list(commands))

    async def script(self, loaded: LoadedScript, call: Command, *before: Command, is_grant: bool) -> list[Reply]:
        """An EVALSHA with commands before it; on NOSCRIPT nothing ran: it is loaded and the same call sent once.

        Raises: StoreUnavailable, Unproved. A MOVED or ASK reply stands in the list: nothing ran there either.
        """
        pipe = self._pipe()
        kind: Kind = "grant" if is_grant else "record"
        try:
            replies = await pipe.execute([*before, call], kind=kind)
        except Unproved as unproved:
            if not isinstance(unproved.replies[-1], _DID_NOT_RUN):
                raise
            replies = unproved.replies
        if isinstance(replies[-1], driver.NoScriptError):
            load: Command = ("SCRIPT", "LOAD", loaded.text)
            asking = [("ASKING",)] if before and before[-1] == ("ASKING",) else []
            replies = [*replies[:-1], *await pipe.execute([load, *asking, call], kind=kind)]
        return replies

    def observe(self, on_batch: OnBatch | None) -> None:
        """Tells of every batch from now on."""
        for pipe in self._pipes:
            pipe.on_batch = on_batch

    async def reconnect(self) -> None:
        """Drops the connections, subscriptions too; what is on the wire fails, the next batch connects again."""
        for pipe in self._pipes:
            await pipe.close()
        await self.pool.disconnect()

    async def close(self) -> None:
        """Drops the connections."""
        await self.reconnect()


class ServerStore:
    """See Store.

    Args:
        canaries: None: nothing is proved (tests, the player).
        replicas: how many replicas must have a write before it is answered, within wait_ms.
        replicas_known: how many the primary should have.
        refused:  set by the check that is repeated while serving: why this server must not be used now.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        kind: str,
        durability: str,
        timeout_ms: int,
        pipes: int = 1,
        canaries: Canaries | None = None,
        replicas: int = 0,
        wait_ms: int = 0,
        replicas_known: int = 0,
    ) -> None:
        self.kind = kind
        self.durability = durability
        self.replicas_known = replicas_known
        self.canaries = canaries
        self.refused = ""
        self._proof: BatchProof | None = None
        if canaries is not None:
            self._proof = BatchProof(
                canaries, lambda: canaries.keys[0], replicas=replicas, wait_ms=wait_ms, settle_s=SETTLE_S
            )
        self.node = Node(pool, timeout_ms=timeout_ms + wait_ms, pipes=pipes, proof=self._proof)
        self._scripts = Scripts(with_flags=True)

    @property
    def trouble(self) -> str:
        """See Store."""
        return self.refused or (self.canaries.trouble if self.canaries else "")

    async def execute(self, *commands: Command) -> list[Reply]:
        """See Store."""
        return checked(await self.node.execute(*commands), where="a command")

    async def transaction(self, *commands: Command) -> list[Reply]:
        """See Store."""
        replies = await self.node.execute(("MULTI",), *commands, ("EXEC",))
        return list(checked(replies, where="a transaction")[-1])

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *, before: Sequence[Command] = ()
    ) -> Reply:
        """See Store."""
        refuse_grants(script, self.trouble)
        loaded = self._scripts.get(script)
        replies = await self.node.script(
            loaded, ("EVALSHA", loaded.sha, len(keys), *keys, *args), *before, is_grant=may_grant(script)
        )
        return answered(replies, script)

    async def move(self) -> None:
        """Another primary was named: connects anew, and grants nothing before that one has settled."""
        if self._proof is not None:
            self._proof.unsettle()
        await self.node.reconnect()

    async def prove(self) -> None:
        """See Store."""
        if self.canaries is not None:
            await self.canaries.prove(self.execute)

    async def confirm(self) -> None:
        """See Store."""
        if self.canaries is not None:
            await self.canaries.confirm(self.execute)

    def event_pool(self) -> ConnectionPool:
        """See Store."""
        return self.node.pool

    def observe(self, on_batch: OnBatch) -> None:
        """See Store."""
        self.node.observe(on_batch)

    async def scan(self, pattern: str) -> list[bytes]:
        """See Store."""
        return await scanned(self.execute, pattern)

    async def close(self) -> None:
        """See Store."""
        if self.canaries is not None:
            self.canaries.close()
        await self.node.close()
