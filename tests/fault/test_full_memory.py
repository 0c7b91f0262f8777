"""F8: a store that may evict is refused; one whose memory is full grants nothing and still records what was done."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.answers import Answer
from guardd.model.errors import StoreRefused, StoreUnavailable
from guardd.store.connect import OpenedStore, open_store
from tests.fault.rows import Row, scale
from tests.servers import Server

POLICIES = ("allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random")
EFFECTS = 40
PREFIX = "f8"
FILLER_BYTES = 16 * 2**20


@asynccontextmanager
async def served(*options: str) -> AsyncIterator[tuple[Server, OpenedStore, Engine]]:
    """A server of its own, a store on it and an engine."""
    with tempfile.TemporaryDirectory(prefix="gd-store-") as folder, Server.start(Path(folder), *options) as server:
        async with await open_store(server.url, prefix=PREFIX) as opened:
            yield server, opened, Engine(opened.store, EngineConfig(prefix=PREFIX))


async def ask(guard: Engine, name: str, *, run: str = "r", attempt: int = 0, scope: str = "run") -> Answer:
    """One attempt at the effect `name`."""
    answer = await guard.call(
        "before", {"run": run, "call": f"{name}.{attempt}", "tool": "pay", "args": {"n": name}, "idempotency_key": name,
                   "scope": scope}
    )  # fmt: skip
    assert isinstance(answer, Answer)
    return answer


async def commit(guard: Engine, name: str, value: str) -> Answer:
    """The result of the first attempt."""
    answer = await guard.call("after", {"run": "r", "call": f"{name}.0", "status": "progress", "value": value})
    assert isinstance(answer, Answer)
    return answer


async def refused_for_memory(guard: Engine, name: str, scope: str = "run") -> None:
    with pytest.raises(StoreUnavailable, match="memory is full; raise maxmemory") as caught:
        await ask(guard, name, scope=scope)
    assert caught.value.value == "OOM"


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_server_that_may_evict_is_refused_until_it_is_mended(policy: str) -> None:
    """At the start, and when somebody changes the policy while we serve; the message holds the command that mends it."""
    with tempfile.TemporaryDirectory(prefix="gd-store-") as folder:
        options = ("--maxmemory", "100mb", "--maxmemory-policy", policy)
        with Server.start(Path(folder), *options) as server:
            client = server.client()
            with pytest.raises(StoreRefused, match=policy) as caught:
                await open_store(server.url, prefix=PREFIX)
            cure = caught.value.message.split(": ", 1)[1].split(",")[0].split(" ")
            assert cure[:2] == ["CONFIG", "SET"]
            client.execute_command(*cure)
            async with await open_store(server.url, prefix=PREFIX) as opened:
                guard = Engine(opened.store, EngineConfig(prefix=PREFIX))
                assert (await ask(guard, "a")).action == "execute"
                client.config_set("maxmemory-policy", policy)
                await opened.recheck()
                with pytest.raises(StoreUnavailable, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"):
                    await ask(guard, "b")
                assert (await commit(guard, "a", "kept")).action == "continue", "finished work is recorded all the same"
                client.execute_command(*cure)
                await opened.recheck()
                assert (await ask(guard, "b")).action == "execute"
                again = await ask(guard, "a", attempt=1)
                assert (again.action, again.value) == ("replay", "kept")
    Row("F8", f"maxmemory-policy {policy}", faults=2, claims=4, granted=2).write()


async def test_a_full_memory_grants_nothing_and_records_everything() -> None:
    """OOM at the claim: refused. OOM at commit, renewal and kill: taken, and read with the same bytes afterwards."""
    count = scale(EFFECTS, 8)
    async with served() as (server, _, guard):
        client = server.client()
        for number in range(count):
            assert (await ask(guard, f"k{number}", scope="global" if number % 2 else "run")).action == "execute"
        client.set("filler", b"x" * FILLER_BYTES)
        client.config_set("maxmemory", str(FILLER_BYTES))
        for scope in ("run", "global"):
            await refused_for_memory(guard, f"new-{scope}", scope)
        for number in range(count):
            renewed = await guard.call("renew", {"run": "r", "call": f"k{number}.0", "lease_ms": 60_000})
            assert renewed.claim == "renewed"
            assert (await commit(guard, f"k{number}", f"v{number}" * 50)).action == "continue"
        stopped = await guard.call("kill", {"run": "r2"})
        assert (stopped.action, stopped.reason) == ("stop", "killed"), "a run this daemon has not heard of"
        await refused_for_memory(guard, "new-run")
        assert client.info("stats")["evicted_keys"] == 0
        client.config_set("maxmemory", "0")
        lost = 0
        for number in range(count):
            again = await ask(guard, f"k{number}", attempt=1, scope="global" if number % 2 else "run")
            lost += (again.action, again.value) != ("replay", f"v{number}" * 50)
        for scope in ("run", "global"):
            assert (await ask(guard, f"new-{scope}", scope=scope)).action == "execute"
            assert (await ask(guard, f"new-{scope}", attempt=1, scope=scope)).reason == "in_flight"
        assert (await ask(guard, "k", run="r2")).action == "stop"
        state = await guard.call("inspect", {"run": "r"})
        assert isinstance(state, dict)
    Row("F8", "memory full at claim, commit, renewal, kill", faults=2 * count + 5, claims=2 * count + 8,
        granted=count + 2, lost=lost).write()  # fmt: skip
    assert lost == 0
    assert state["counters"]["steps"] == count + 2, "what was refused was not counted"
