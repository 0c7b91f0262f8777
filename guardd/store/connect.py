"""From a store URL to a store: the one place that makes connections.

embedded:            guardd's own server, state in the state directory
embedded:DIR         the same, state in DIR
redis://HOST:PORT/DB rediss://...   unix:///PATH?db=0     an external standalone server
fakeredis:           inside the process; tests and the player only
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from guardd.model.errors import BadArgument, StoreRefused
from guardd.store.base import ServerStore, Store
from guardd.store.checks import ServerReport, check_server
from guardd.store.embedded import EmbeddedServer
from guardd.store.fake import FakeStore
from guardd.store.pool import pool_for

DURABILITIES = ("memory", "fsync")


def shown(url: str) -> str:
    """The URL without user and password, for messages."""
    parts = urlsplit(url)
    if parts.hostname is None or "@" not in parts.netloc:
        return url
    return url.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)


class OpenedStore:
    """A store with what is known of its server. server: None for fakeredis."""

    def __init__(self, store: Store, report: ServerReport | None, embedded: EmbeddedServer | None, url: str) -> None:
        self.store = store
        self.report = report
        self.embedded = embedded
        self.url = url

    async def close(self) -> None:
        """Closes the connections, then stops an embedded server."""
        await self.store.close()
        if self.embedded is not None:
            await self.embedded.stop()

    async def __aenter__(self) -> OpenedStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def open_store(
    url: str = "embedded:",
    *,
    state_dir: Path | None = None,
    durability: str | None = None,
    timeout_ms: int = 2000,
    pipes: int = 1,
) -> OpenedStore:
    """Connects, checks what the server promises, and refuses one that cannot keep it.

    Args:
        state_dir:  where an embedded server keeps its state; required for `embedded:`.
        durability: memory | fsync; None: fsync when embedded, memory otherwise.
        timeout_ms: after this a command counts as unanswered, 1 and up.
    Raises: BadArgument: no such kind of URL. StoreRefused: the server cannot keep the promises. StoreUnavailable.
    """
    scheme = url.split(":", 1)[0]
    opener = _OPENERS.get(scheme)
    if opener is None:
        raise BadArgument(
            "no such kind of store", field="store", value=shown(url), limit=", ".join(f"{s}:" for s in _OPENERS)
        )
    if durability is not None and durability not in DURABILITIES:
        raise BadArgument("no such durability", field="durability", value=durability, limit=" | ".join(DURABILITIES))
    return await opener(url, state_dir, durability, timeout_ms, pipes)


async def _embedded(
    url: str, state_dir: Path | None, durability: str | None, timeout_ms: int, pipes: int
) -> OpenedStore:
    directory = Path(url.removeprefix("embedded:")) if url != "embedded:" else state_dir
    if directory is None:
        raise BadArgument(
            "an embedded store needs a state directory", field="state_dir", limit="embedded:DIR or --state-dir DIR"
        )
    server = EmbeddedServer(directory, durability=durability or "fsync")
    await server.start()
    try:
        return await _checked(f"unix://{server.socket}", "embedded", server.durability, timeout_ms, pipes, server)
    except BaseException:
        await server.stop()
        raise


async def _standalone(url: str, _: Path | None, durability: str | None, timeout_ms: int, pipes: int) -> OpenedStore:
    return await _checked(url, "standalone", durability or "memory", timeout_ms, pipes, None)


async def _checked(
    url: str, kind: str, durability: str, timeout_ms: int, pipes: int, embedded: EmbeddedServer | None
) -> OpenedStore:
    try:
        pool = pool_for(url)
    except ValueError as error:
        raise BadArgument(f"no store URL: {error}", field="store", value=shown(url)) from error
    store = ServerStore(pool, kind=kind, durability=durability, timeout_ms=timeout_ms, pipes=pipes)
    try:
        report = await check_server(store.execute, durability=durability)
    except BaseException:
        await store.close()
        raise
    return OpenedStore(store, report, embedded, shown(url))


async def _fake(url: str, *_: object) -> OpenedStore:
    return OpenedStore(FakeStore(), None, None, url)


async def _later(url: str, *_: object) -> OpenedStore:
    raise StoreRefused(
        "Sentinel and Cluster are not served yet; name the primary by redis:// or rediss://",
        field="store",
        value=shown(url),
    )


_OPENERS: dict[str, Callable[[str, Path | None, str | None, int, int], Awaitable[OpenedStore]]] = {
    "embedded": _embedded,
    "redis": _standalone,
    "rediss": _standalone,
    "unix": _standalone,
    "fakeredis": _fake,
    "redis+sentinel": _later,
    "redis+cluster": _later,
}
