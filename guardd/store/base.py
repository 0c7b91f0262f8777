"""What the engine asks of a store, whatever serves it: one server, a Sentinel set, a Cluster, a fake.

Nothing here repeats a command by itself. A NOSCRIPT, MOVED or ASK answer means
that nothing ran, so the same script is sent once more; every other failure is
the caller's to send again under the same call id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio.connection import ConnectionPool

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


class Unproved(StoreUnavailable):
    """A script ran, but its write does not stand as firmly as it must: nothing may be granted on it.

    replies:         what the server said; a claim that was granted in it is to be withdrawn.
    spares_records:  what records, ends or holds stands all the same; only grants are refused.
    """

    def __init__(
        self, message: str, *, value: str, spares_records: bool = False, replies: list[Reply] | None = None
    ) -> None:
        super().__init__(message, field="store", value=value)
        self.spares_records = spares_records
        self.replies = replies or []


class Store(Protocol):
    """What the engine asks of a store.

    kind:       embedded | standalone | sentinel | cluster | fake.
    durability: memory | fsync | replicated: when an answer is given, what a granted call survives.
    trouble:    why nothing is granted now, a sentence that says what an operator can do; "" when all is well.
    """

    kind: str
    durability: str

    @property
    def trouble(self) -> str: ...

    async def execute(self, *commands: Command) -> list[Reply]:
        """Sends commands in one write; replies in order.

        Raises: StoreUnavailable: no connection, no answer in time, or an error for one of the commands.
        """

    async def transaction(self, *commands: Command) -> list[Reply]:
        """The same as one MULTI/EXEC: a consistent look. All keys are of one tree."""

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *,
        before: Sequence[Command] = (),
    ) -> Reply:  # fmt: skip
        """Runs a script, with plain commands before it, in the same write where the topology allows.

        Raises: the error the script names, Unproved, or StoreUnavailable.
        """

    async def prove(self) -> None:
        """Looks whether this is still the store it was, with all it held; sets or lifts `trouble`. Once a second.

        Raises: StoreUnavailable.
        """

    async def confirm(self) -> None:
        """An operator says that the store may be trusted as it is now; every daemon hears of it within a second."""

    def event_pool(self) -> ConnectionPool | None:
        """Where to listen to published events; None: nothing is published."""

    def observe(self, on_batch: Callable[[int, float], None]) -> None:
        """Tells of every batch from now on: how many commands, how many seconds."""

    async def scan(self, pattern: str) -> list[bytes]:
        """The keys that a glob matches, on every primary. For clearing up after tests and the player."""

    async def close(self) -> None:
        """Lets connections go."""


async def scanned(execute: Callable[..., Awaitable[list[Reply]]], pattern: str) -> list[bytes]:
    """The keys of one server that a glob matches."""
    found: list[bytes] = []
    cursor: Any = "0"
    while True:
        ((cursor, keys),) = await execute(("SCAN", cursor, "MATCH", pattern, "COUNT", 1000))
        found += keys
        if int(cursor) == 0:
            return found


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


def answered(replies: list[Reply], script: ScriptLike) -> Reply:
    """The reply of a script that was sent after plain commands.

    What may grant stands on them: a claim is listed before it is made. What records, ends or holds does not: an
    index that cannot be written, as when memory is full, hides no kill or result that was taken.
    """
    return checked(replies if may_grant(script) else replies[-1:], where=f"the script {script.name}")[-1]


def may_grant(script: ScriptLike) -> bool:
    """False for what only records, ends or holds: the same scripts that may run when memory is full."""
    return "allow-oom" not in script.flags


def refuse_grants(script: ScriptLike, trouble: str) -> None:
    """Lets through, while the store is in doubt, only what records, ends or holds.

    Raises: StoreUnavailable.
    """
    if trouble and may_grant(script):
        raise StoreUnavailable(trouble, field="store", value="not trusted")
