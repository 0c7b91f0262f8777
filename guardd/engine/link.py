"""Between engine and store: sends invocations of scripts, so that neither knows the other's types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from guardd.scripts.bind import Invocation
from guardd.store.base import Command, Store


class Link:
    """A store that takes invocations."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.execute = store.execute
        self.transaction = store.transaction
        self.around: Callable[[str], AbstractContextManager[None]] | None = None
        """What goes round each script, by its name; None: nothing does."""

    async def invoke(self, invocation: Invocation, *, before: Sequence[Command] = ()) -> Any:
        """Runs a script, with plain commands before it in the same round trip."""
        if self.around is not None:
            with self.around(invocation.script.name):
                return await self.store.script(invocation.script, invocation.keys, invocation.args, before=before)
        return await self.store.script(invocation.script, invocation.keys, invocation.args, before=before)
