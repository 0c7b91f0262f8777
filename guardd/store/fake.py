"""A fake server inside the process, for tests and the player only: it keeps nothing and proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redis import exceptions as driver

from guardd.model.errors import StoreRefused
from guardd.store.base import Command, Reply, ScriptLike, Scripts
from guardd.store.errors import map_error


class FakeStore:
    """fakeredis behind the interface of a store; it does not know the `#!lua` line."""

    kind = "fake"
    durability = "memory"

    def __init__(self) -> None:
        try:
            import fakeredis
        except ImportError as error:
            raise StoreRefused(
                "fakeredis: needs the extra: pip install 'guardd[fake]'", field="store", value="fakeredis:"
            ) from error
        self._client: Any = fakeredis.FakeAsyncRedis()
        self._scripts = Scripts(with_flags=False)

    async def execute(self, *commands: Command) -> list[Reply]:
        """See Store."""
        return [await self._one(command) for command in commands]

    async def transaction(self, *commands: Command) -> list[Reply]:
        """See Store; one process, one task at a time: every look is consistent."""
        replies = await self.execute(*commands)
        for each in replies:
            if isinstance(each, Exception):
                raise map_error(each, where="a transaction")
        return replies

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *,
        before: Iterable[Command] = (), after: Iterable[Command] = (),
    ) -> Reply:  # fmt: skip
        """See Store."""
        loaded = self._scripts.get(script)
        call: Command = ("EVALSHA", loaded.sha, len(keys), *keys, *args)
        first = await self.execute(*before)
        reply = await self._one(call)
        if isinstance(reply, driver.NoScriptError):
            await self._one(("SCRIPT", "LOAD", loaded.text))
            reply = await self._one(call)
        last = await self.execute(*after)
        for each in (*first, reply, *last):
            if isinstance(each, Exception):
                raise map_error(each, where=f"the script {script.name}") from each
        return reply

    async def _one(self, command: Command) -> Reply:
        try:
            return await self._client.execute_command(*command)
        except driver.RedisError as error:
            return error

    async def close(self) -> None:
        """See Store."""
        await self._client.aclose()
