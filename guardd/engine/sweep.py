"""Looks after the indexes: claims whose lease is over, finished records, runs that are gone (SPEC 3).

The indexes are hints. A sweep only makes sooner what the next look at a record
would do anyway, so any number of daemons may sweep the same store.
"""

from __future__ import annotations

import asyncio
from typing import Any

from guardd.engine.context import Context
from guardd.engine.shaping import pairs, text
from guardd.keys import Key
from guardd.scripts import stubs

CHUNK = 50
ALL_EVERY = 60
"""Every so many sweeps all records are looked at that are past their lease, not only the new ones."""


class Sweep:
    """The sweep of one engine. lapsed: how many claims it found past their lease, since the start."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._swept_ms = 0
        self._sweeps = 0
        self.lapsed = 0

    async def once(self, at_ms: int | None = None) -> list[dict[str, Any]]:
        """Looks at the claims whose lease ended since the last sweep; returns those that are in doubt since now.

        Raises: StoreUnavailable.
        """
        keys = self._context.keys
        now_ms = at_ms if at_ms is not None else self._context.reader.now_ms()
        if self._sweeps % ALL_EVERY == 0:
            self._swept_ms = 0
            await self._context.link.execute(
                ("ZREMRANGEBYSCORE", keys.runs, 0, now_ms - self._context.config.run_ttl_ms)
            )
        found: list[dict[str, Any]] = []
        after, until = f"({self._swept_ms}" if self._swept_ms else 0, now_ms
        offset = 0
        while True:
            (listed,) = await self._context.link.execute(
                ("ZRANGE", keys.doubt, after, until, "BYSCORE", "LIMIT", offset, CHUNK, "WITHSCORES")
            )
            entries = [(text(name), text(score)) for name, score in zip(listed[::2], listed[1::2], strict=True)]
            looked = await asyncio.gather(*(self._look(Key(name), score, at_ms) for name, score in entries))
            found += [record for record in looked if record.get("lapsed")]
            offset += sum(1 for record in looked if record["is_listed"])
            if len(entries) < CHUNK:
                break
        self._swept_ms = until
        self._sweeps += 1
        self.lapsed += len(found)
        return found

    async def settle(self, key: Key) -> None:
        """A record was settled by hand: it leaves the index now.

        Raises: StoreUnavailable.
        """
        (score,) = await self._context.link.execute(("ZSCORE", self._context.keys.doubt, key))
        if score is not None:
            await self._look(key, text(score), None)

    async def _look(self, key: Key, score: str, at_ms: int | None) -> dict[str, Any]:
        """Looks at a record and keeps, moves or removes its entry in the index."""
        doubt = self._context.keys.doubt
        reply = await self._context.link.invoke(
            stubs.look(op_key=key, now_ms=at_ms, wait_ms=None, channel=self._context.keys.events)
        )
        record: dict[str, Any] = {"state": text(reply[0]), **pairs(reply[2:])}
        if record["state"] in ("", "committed", "freed"):
            await self._context.link.invoke(stubs.unlist(doubt_key=doubt, member=key, score=score))
            return {**record, "is_listed": False}
        if record["state"] == "claimed" and record["until_ms"] != score:
            await self._context.link.execute(("ZADD", doubt, "GT", record["until_ms"], key))
            return {**record, "is_listed": False}
        return {**record, "is_listed": True}
