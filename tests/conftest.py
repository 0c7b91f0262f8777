"""Fixtures shared by all tests: stores that are real unless they say `fake`, engines on a virtual clock."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.limits import REFERENCE, Policy
from guardd.model.tools import ToolRules
from guardd.store.base import Store
from guardd.store.connect import OpenedStore, open_store
from tests import recorder
from tests.servers import Server

MAY_LIVE_FOR_EVER = (":runs", ":doubt", ":deny", ":canary", ":tokens", ":audit")


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real server for the whole session, started as guardd's embedded store starts it."""
    with Server.start(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(params=["fake", "server"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[OpenedStore]:
    """Every test that takes this runs twice: on fakeredis and on a real server."""
    url = "fakeredis:" if request.param == "fake" else request.getfixturevalue("embedded").url
    async with await open_store(url) as store:
        yield store


@pytest.fixture
async def real(embedded: Server) -> AsyncIterator[Store]:
    """A store on a real server."""
    async with await open_store(embedded.url) as opened:
        yield opened.store


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
async def make_guard(opened: OpenedStore, prefix: str) -> AsyncIterator[Callable[..., Engine]]:
    """Makes engines of one store: `make_guard(limits={...}, tools={...})`, policy reference, virtual clock.

    Afterwards every key that was left must have the expiry that SPEC 3 gives it.
    """

    def make(limits: dict[str, Any] | None = None, tools: dict[str, Any] | None = None, **config: Any) -> Engine:
        policy = Policy("reference", {**REFERENCE.limits, **(limits or {})}, REFERENCE.volatile_args)
        settings: dict[str, Any] = {
            "policies": {"reference": policy}, "default_policy": "reference", "tools": ToolRules(tools),
            "prefix": prefix, "virtual_clock": True,
        }  # fmt: skip
        return Engine(opened.store, EngineConfig(**{**settings, **config}))

    yield make
    await assert_expiries(opened.store, prefix)


@pytest.fixture
def make_real(real: Store, prefix: str) -> Callable[[], Engine]:
    """Engines on the real server only."""

    def make() -> Engine:
        policies = {"reference": REFERENCE}
        return Engine(
            real, EngineConfig(policies=policies, default_policy="reference", prefix=prefix, virtual_clock=True)
        )

    return make


async def assert_expiries(store: Store, prefix: str) -> None:
    """No key without an expiry but those that SPEC 3 lets live: indexes, and claims or doubts."""
    (keys,) = await store.execute(("KEYS", f"{prefix}:*"))
    for key in sorted(name.decode() for name in keys):
        (ttl_ms,) = await store.execute(("PTTL", key))
        if key.endswith(MAY_LIVE_FOR_EVER):
            assert ttl_ms == -1, f"{key} is an index and expires"
        elif ":op" in key.removeprefix(prefix):
            (state,) = await store.execute(("HGET", key, "state"))
            assert (ttl_ms == -1) == (state in (b"claimed", b"in_doubt")), f"{key} is {state!r} with expiry {ttl_ms}"
        else:
            assert ttl_ms > 0, f"{key} was left without an expiry"


@pytest.fixture
def scenarios() -> list[Path]:
    """All scenario files."""
    return sorted((Path(__file__).parent / "scenarios").glob("*.json"))


recorder.install()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Holds what was answered in the whole suite against the table of operations."""
    recorder.finish(session)
