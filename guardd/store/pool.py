"""Makes connections to a server: the only place that does (SPEC 5).

redis-py repeats commands by itself in several constructions, also commands that
may have executed. `pool_for` allows none; a test counts executions.
"""

from __future__ import annotations

from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

CONNECT_TIMEOUT_S = 5


def pool_for(url: str) -> ConnectionPool:
    """Connections by a `redis://`, `rediss://` or `unix://` URL; a failed command is never sent again by the driver."""
    return ConnectionPool.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        socket_timeout=None,  # each batch has its own deadline
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        health_check_interval=0,
        protocol=2,  # RESP3 changes the shapes of replies
        client_name="guardd",
    )
