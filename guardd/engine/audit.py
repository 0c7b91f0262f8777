"""The audit's copy in the store: a stream that every daemon of this store writes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guardd.engine.link import Link
from guardd.keys import Keys

ENTRIES_MAX = 100_000


class AuditStream:
    """Who asked what, newest entries last."""

    def __init__(self, store: Link, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    async def add(self, entry: Mapping[str, str | int]) -> None:
        """Adds one entry.

        Raises: StoreUnavailable: it is unknown whether it was written.
        """
        fields: list[str | int] = [part for item in entry.items() for part in item]
        await self._store.execute(("XADD", self._keys.audit, "MAXLEN", "~", ENTRIES_MAX, "*", *fields))

    async def newest(self, limit: int) -> list[dict[str, Any]]:
        """The newest entries, newest first."""
        (entries,) = await self._store.execute(("XREVRANGE", self._keys.audit, "+", "-", "COUNT", limit))
        shown = []
        for _, flat in entries:
            items = flat.items() if isinstance(flat, dict) else zip(flat[::2], flat[1::2], strict=True)
            entry: dict[str, Any] = {name.decode(): value.decode() for name, value in items}
            shown.append(entry | {name: int(entry[name]) for name in ("at", "unwritten") if name in entry})
        return shown
