"""A fake server inside the process, for tests and the player only: it keeps nothing and proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis import exceptions as driver

from guardd.model.errors import StoreRefused
from guardd.store.base import Command, Reply, ScriptLike, Scripts, answered, checked, scanned


class FakeStore:
    """fakeredis behind the interface of a store; it does not know the `#!lua` line."""

    kind = "fake"
    durability = "memory"
    trouble = ""

    def __init__(self) -> None:
        try:
            import fakeredis
        except ImportError as error:
            raise StoreRefused(
                "fakeredis: needs the extra: pip install 'guardd[fake]'", field="store", value="fakeredis:"
            ) from error
        self._client: Any = fakeredis.FakeAsyncRedis(protocol=2)
        self._client.response_callbacks.clear()  # replies in the shapes of the wire, as from a server
        self._scripts = Scripts(with_flags=False)

    async def execute(self, *commands: Command) -> list[Reply]:
        """See Store."""
        return checked([await self._one(command) for command in commands], where="a command")

    async def transaction(self, *commands: Command) -> list[Reply]:
        """See Store; one process, one task at a time: every look is consistent."""
        return await self.execute(*commands)

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *, before: Sequence[Command] = ()
    ) -> Reply:
        """See Store."""
        loaded = self._scripts.get(script)
        call: Command = ("EVALSHA", loaded.sha, len(keys), *keys, *args)
        replies = [await self._one(command) for command in (*before, call)]
        if isinstance(replies[-1], driver.NoScriptError):
            replies = [*replies[:-1], await self._one(("SCRIPT", "LOAD", loaded.text)), await self._one(call)]
        return answered(replies, script)

    async def _one(self, command: Command) -> Reply:
        try:
            return await self._client.execute_command(*command)
        except driver.RedisError as error:
            return error

    async def prove(self) -> None:
        """See Store; there is nothing to prove."""

    async def confirm(self) -> None:
        """See Store."""

    def event_pool(self) -> None:
        """See Store."""
        return

    def observe(self, on_batch: object) -> None:
        """See Store: there is no connection."""

    async def scan(self, pattern: str) -> list[bytes]:
        """See Store."""
        return await scanned(self.execute, pattern)

    async def close(self) -> None:
        """See Store."""
        await self._client.aclose()
