"""Between engine and store: sends invocations of scripts, so that neither knows the other's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guardd.scripts.bind import Invocation
from guardd.store.base import Command, Store


class Link:
    """A store that takes invocations."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.execute = store.execute
        self.transaction = store.transaction

    async def invoke(self, invocation: Invocation, *, before: Sequence[Command] = ()) -> Any:
        """Runs a script, with plain commands before it in the same round trip."""
        return await self.store.script(invocation.script, invocation.keys, invocation.args, before=before)
