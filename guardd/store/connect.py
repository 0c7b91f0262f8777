"""From a store URL to a store: the one place that opens one.

embedded:            guardd's own server, state in the state directory
embedded:DIR         the same, state in DIR
redis://HOST:PORT/DB rediss://...   unix:///PATH?db=0     an external standalone server
redis+sentinel://H1:P,H2:P/NAME     rediss+sentinel://... the primary that a Sentinel set names
redis+cluster://H1:P,H2:P           rediss+cluster://...  a Cluster
fakeredis:           inside the process; tests and the player only
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions as driver
from redis.asyncio.sentinel import Sentinel

from guardd.keys import Keys
from guardd.model.errors import BadArgument, StoreRefused, StoreUnavailable
from guardd.store.base import Store
from guardd.store.canary import Canaries
from guardd.store.checks import ServerReport, check_server, merged
from guardd.store.cluster import ClusterStore
from guardd.store.embedded import EmbeddedServer
from guardd.store.errors import map_error
from guardd.store.fake import FakeStore
from guardd.store.pool import Hosts, node_pool, pool_for, sentinel_for, sentinel_pool
from guardd.store.server import ServerStore

DURABILITIES = ("memory", "fsync", "replicated")
WAIT_MS = 300
"""How long the replicas of durability `replicated` have to acknowledge a batch."""


def shown(url: str) -> str:
    """The URL without user, password and options, for messages."""
    parts = urlsplit(url)
    bare = url.split("?", 1)[0]
    if "@" not in parts.netloc:
        return bare
    return bare.replace(parts.netloc, parts.netloc.rpartition("@")[2], 1)


@dataclass(frozen=True, slots=True)
class Opening:
    """What `open_store` was asked for."""

    url: str
    state_dir: Path | None
    durability: str | None
    timeout_ms: int
    pipes: int
    prefix: str | None
    memory: Path | None

    def canaries(self, *, is_cluster: bool = False) -> Canaries | None:
        """The canaries under the prefix; None where nothing is proved."""
        if self.prefix is None:
            return None
        keys = Keys(self.prefix)
        return Canaries(
            keys.cluster_canaries() if is_cluster else [keys.canary], memory=self.memory, name=shown(self.url),
            counts_looks=self.durability != "replicated",
            power_loses=self.url.startswith("embedded:") and self.durability == "memory",
        )  # fmt: skip


class OpenedStore:
    """A store with what is known of its server. report: None for fakeredis."""

    def __init__(
        self,
        store: Store,
        report: ServerReport | None,
        url: str,
        *,
        embedded: EmbeddedServer | None = None,
        check: Callable[[], Awaitable[ServerReport]] | None = None,
        follow: Callable[[], Awaitable[None]] | None = None,
        sentinel: Sentinel | None = None,
    ) -> None:
        self.store = store
        self.report = report
        self.embedded = embedded
        self.url = url
        self._check = check
        self._follow = follow
        self._sentinel = sentinel

    async def prove(self) -> None:
        """Looks whether this is still the primary, and the store it was. Once a second.

        Raises: StoreUnavailable.
        """
        if self._follow is not None:
            await self._follow()
        await self.store.prove()

    async def recheck(self) -> None:
        """Looks again what the server promises; one that may not be used any more grants nothing. Every 30 s.

        Raises: StoreUnavailable.
        """
        if self._check is None:
            return
        assert isinstance(self.store, ServerStore | ClusterStore)
        try:
            self.report = await self._check()
            self.store.refused = ""
        except StoreRefused as error:
            self.store.refused = error.message

    async def close(self) -> None:
        """Closes the connections, then stops an embedded server."""
        await self.store.close()
        if self._sentinel is not None:
            await _close(self._sentinel)
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
    prefix: str | None = None,
    memory: Path | None = None,
) -> OpenedStore:
    """Connects, checks what the server promises, and refuses one that cannot keep it.

    Args:
        state_dir:  where an embedded server keeps its state; required for `embedded:`.
        durability: memory | fsync | replicated; None: fsync when embedded, memory otherwise.
        timeout_ms: after this a command counts as unanswered, 1 and up.
        prefix:     of the keys of one guard: its canary is kept and watched. None: nothing is proved (the player).
        memory:     file that keeps what is known of the canary over a restart.
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
    if durability == "replicated" and prefix is None:
        prefix = Keys().prefix
    opened = await opener(Opening(url, state_dir, durability, timeout_ms, pipes, prefix, memory))
    try:
        await opened.prove()
    except BaseException:
        await opened.close()
        raise
    return opened


async def _embedded(asked: Opening) -> OpenedStore:
    directory = Path(asked.url.removeprefix("embedded:")) if asked.url != "embedded:" else asked.state_dir
    if directory is None:
        raise BadArgument(
            "an embedded store needs a state directory", field="state_dir", limit="embedded:DIR or --state-dir DIR"
        )
    if asked.durability == "replicated":
        raise BadArgument(
            "the embedded store has no replicas; name a Sentinel set or a Cluster by --store",
            field="durability", value="replicated", limit="memory | fsync",
        )  # fmt: skip
    server = EmbeddedServer(directory, durability=asked.durability or "fsync")
    await server.start()
    try:
        return await _single(asked, f"unix://{server.socket}", "embedded", server.durability, server)
    except BaseException:
        await server.stop()
        raise


async def _standalone(asked: Opening) -> OpenedStore:
    return await _single(asked, asked.url, "standalone", asked.durability or "memory", None)


async def _single(asked: Opening, url: str, kind: str, durability: str, embedded: EmbeddedServer | None) -> OpenedStore:
    try:
        pool = pool_for(url)
    except ValueError as error:
        raise BadArgument(f"no store URL: {error}", field="store", value=shown(url)) from error
    replicas = 0
    if durability == "replicated":
        probe = ServerStore(pool, kind=kind, durability="memory", timeout_ms=asked.timeout_ms)
        try:
            replicas = await _connected_replicas(probe)
        finally:
            await probe.close()
    return await _checked(_server_store(asked, pool, kind, durability, replicas), shown(url), embedded=embedded)


async def _sentinel(asked: Opening) -> OpenedStore:
    hosts = Hosts.parse(asked.url)
    if not hosts.name:
        raise BadArgument(
            "name the set after the hosts: redis+sentinel://H1:P,H2:P/NAME", field="store", value=shown(asked.url)
        )
    sentinel = sentinel_for(hosts)
    durability = asked.durability or "memory"
    primary: list[Any] = []

    async def follow() -> None:
        """Sentinels may name another primary while the old one still answers: its connections are dropped."""
        try:
            address = await asyncio.wait_for(sentinel.discover_master(hosts.name), asked.timeout_ms / 1000)
        except (driver.RedisError, OSError, TimeoutError) as error:
            raise map_error(error, where="the Sentinels") from error
        if primary and primary[0] != address:
            await store.move()
        primary[:] = [address]

    try:
        replicas = await _sentinel_replicas(sentinel, hosts.name)
        store = _server_store(asked, sentinel_pool(hosts, sentinel), "sentinel", durability, replicas)
        return await _checked(store, shown(asked.url), follow=follow, sentinel=sentinel)
    except (driver.RedisError, OSError) as error:
        await _close(sentinel)
        raise map_error(error, where=f"the Sentinels of {shown(asked.url)}") from error
    except BaseException:
        await _close(sentinel)
        raise


async def _close(sentinel: Sentinel) -> None:
    for client in sentinel.sentinels:
        await client.aclose()


async def _cluster(asked: Opening) -> OpenedStore:
    hosts = Hosts.parse(asked.url)
    durability = asked.durability or "memory"

    def store_with(replicas: int) -> ClusterStore:
        return ClusterStore(
            hosts.addresses, lambda address: node_pool(hosts, address), durability=durability, timeout_ms=asked.timeout_ms,
            pipes=asked.pipes, canaries=asked.canaries(is_cluster=True), replicas=replicas,
            wait_ms=WAIT_MS if replicas else 0,
        )  # fmt: skip

    store = store_with(0)
    try:
        await store.map_slots()
        if durability == "replicated":
            fewest = min((len(replicas) for replicas in store.replicas_of.values()), default=0)
            await store.close()
            store = store_with(_needed(fewest))
            await store.map_slots()

        async def check() -> ServerReport:
            await store.map_slots()
            reports = {}
            for address, replicas in store.replicas_of.items():
                reports[f"{address[0]}:{address[1]}"] = await check_server(
                    lambda *commands, _address=address: store.on_primary(_address, *commands),
                    durability=durability, kind="cluster", replicas=len(replicas),
                )  # fmt: skip
            return merged(reports)

        return OpenedStore(store, await check(), shown(asked.url), check=check)
    except BaseException:
        await store.close()
        raise


async def _fake(asked: Opening) -> OpenedStore:
    return OpenedStore(FakeStore(), None, asked.url)


def _server_store(asked: Opening, pool: Any, kind: str, durability: str, replicas: int) -> ServerStore:
    needed = _needed(replicas) if durability == "replicated" else 0
    return ServerStore(
        pool, kind=kind, durability=durability, timeout_ms=asked.timeout_ms, pipes=asked.pipes,
        canaries=asked.canaries(), replicas=needed, wait_ms=WAIT_MS if needed else 0, replicas_known=replicas,
    )  # fmt: skip


async def _checked(store: ServerStore, url: str, **more: Any) -> OpenedStore:
    async def check() -> ServerReport:
        return await check_server(
            store.execute, durability=store.durability, kind=store.kind, replicas=store.replicas_known
        )

    try:
        return OpenedStore(store, await check(), url, check=check, **more)
    except BaseException:
        await store.close()
        raise


def _needed(replicas: int) -> int:
    """At least half of the nodes, of which the primary is one: with it that is a majority (SPEC 5).

    Raises: StoreRefused: there is no replica to wait for.
    """
    if replicas == 0:
        raise StoreRefused(
            "durability replicated needs at least one replica: add one, or choose durability fsync",
            field="durability", value="replicated", limit="1 replica",
        )  # fmt: skip
    return (replicas + 1) // 2


async def _connected_replicas(store: ServerStore) -> int:
    (info,) = await store.execute(("INFO", "replication"))
    found = [line for line in info.decode().splitlines() if line.startswith("connected_slaves:")]
    return int(found[0].partition(":")[2]) if found else 0


async def _sentinel_replicas(sentinel: Any, name: str) -> int:
    """How many replicas the set has, those included that are down now."""
    last: Exception = StoreUnavailable("no Sentinel answers", field="store")
    for client in sentinel.sentinels:
        try:
            return int((await client.sentinel_master(name))["num-slaves"])
        except (driver.RedisError, OSError) as error:
            last = error
    raise last


_OPENERS: dict[str, Callable[[Opening], Awaitable[OpenedStore]]] = {
    "embedded": _embedded,
    "redis": _standalone,
    "rediss": _standalone,
    "unix": _standalone,
    "fakeredis": _fake,
    "redis+sentinel": _sentinel,
    "rediss+sentinel": _sentinel,
    "redis+cluster": _cluster,
    "rediss+cluster": _cluster,
}
