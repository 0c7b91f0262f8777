"""Makes connections to servers: the only place that does (SPEC 5).

redis-py repeats commands by itself in several constructions, also commands that
may have executed. Nothing made here does; a test counts executions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff

from guardd.model.errors import BadArgument

CONNECT_TIMEOUT_S = 5
SENTINEL_TIMEOUT_S = 0.5


def _no_repeats() -> dict[str, Any]:
    return {
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "socket_timeout": None,  # each batch has its own deadline
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 0,
        "protocol": 2,  # RESP3 changes the shapes of replies
        "client_name": "guardd",
        "driver_info": None,  # CLIENT SETINFO is one more right and round trip
    }


def pool_for(url: str) -> ConnectionPool:
    """Connections by a `redis://`, `rediss://` or `unix://` URL; a failed command is never sent again by the driver."""
    return ConnectionPool.from_url(url, **_no_repeats())


@dataclass(frozen=True, slots=True)
class Hosts:
    """A URL that names several hosts: `redis+sentinel://[USER:PASSWORD@]H1:P,H2:P/NAME`, `redis+cluster://H1:P,H2:P`.

    With `rediss+…` connections use TLS. After `?` stand options of the driver's connections, such as
    `ssl_ca_certs`, and for Sentinel `db`, `sentinel_username` and `sentinel_password`.
    """

    addresses: list[tuple[str, int]]
    name: str
    has_tls: bool
    options: dict[str, Any] = field(default_factory=dict)
    sentinel_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> Hosts:
        """The parts of a URL.

        Raises: BadArgument.
        """
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        addresses: list[tuple[str, int]] = []
        for each in hosts.split(","):
            host, _, port = each.rpartition(":")
            if not host or not port.isdigit():
                raise BadArgument(
                    "a host and port each, with commas between them", field="store", value=hosts, limit="HOST:PORT,HOST:PORT"
                )  # fmt: skip
            addresses.append((host.strip("[]"), int(port)))
        given = dict(parse_qsl(parts.query))
        sentinel = {
            name.removeprefix("sentinel_"): given.pop(name) for name in list(given) if name.startswith("sentinel_")
        }
        options: dict[str, Any] = {**given}
        if "db" in options:
            options["db"] = int(options["db"])
        user, _, password = credentials.partition(":")
        if user:
            options["username"] = unquote(user)
        if password:
            options["password"] = unquote(password)
        return cls(addresses, parts.path.strip("/"), parts.scheme.startswith("rediss"), options, sentinel)


def sentinel_for(hosts: Hosts) -> Sentinel:
    """The Sentinels of a set; they are asked once each, never again and again."""
    kwargs = {
        **_no_repeats(),
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        **hosts.sentinel_options,
    }
    if hosts.has_tls:
        kwargs |= {"ssl": True, **{name: value for name, value in hosts.options.items() if name.startswith("ssl_")}}
    return Sentinel(hosts.addresses, sentinel_kwargs=kwargs)  # type: ignore[no-untyped-call]


def sentinel_pool(hosts: Hosts, sentinel: Sentinel) -> ConnectionPool:
    """Connections to whatever primary the Sentinels name when one is made."""
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        hosts.name, sentinel, connection_class=SentinelManagedSSLConnection if hosts.has_tls else SentinelManagedConnection,
        **_no_repeats(), **hosts.options,
    )  # fmt: skip


def node_pool(hosts: Hosts, address: tuple[str, int]) -> ConnectionPool:
    """Connections to one node of a Cluster."""
    host, port = address
    return ConnectionPool(
        connection_class=SSLConnection if hosts.has_tls else Connection, host=host, port=port, **_no_repeats(), **hosts.options
    )  # fmt: skip
