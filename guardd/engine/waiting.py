"""Callers that wait for an effect in flight, woken by its settlement (SPEC 2.6, `wait_ms`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from guardd.keys import Key


class Wakeups:
    """Who waits for which ledger record. Wake-ups may be lost; a waiter has a deadline of its own."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def expect(self, key: Key) -> Iterator[asyncio.Event]:
        """An event that is set when the record is settled from now on; taken before the record is looked at."""
        event = asyncio.Event()
        self._waiting.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._waiting[key]
            waiting.discard(event)
            if not waiting:
                del self._waiting[key]

    def wake(self, key: str) -> None:
        """The record was settled."""
        for event in self._waiting.get(key, ()):
            event.set()


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event is set, or after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
