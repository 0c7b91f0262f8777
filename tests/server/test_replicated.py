"""Durability `replicated`, Sentinel and Cluster: real sets of servers, real failovers (SPEC 5)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guardd.cli.replay import run as replay
from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.keys import slot_of
from guardd.model.errors import StoreRefused, StoreUnavailable
from guardd.store.cluster import ClusterStore
from guardd.store.connect import open_store
from tests.topologies import Cluster, Replicated, Sentinels

SCENARIOS = Path(__file__).parents[1] / "scenarios"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start(tmp_path_factory.mktemp("cluster")) as them:
        yield them


def guard_of(opened: Any) -> Engine:
    return Engine(opened.store, EngineConfig(prefix="guardd"))


async def pay(guard: Engine, key: str, call: str = "", **params: Any) -> Any:
    request = {
        "run": "r",
        "call": call or secrets.token_hex(8),
        "tool": "pay",
        "args": {"key": key},
        "idempotency_key": key,
    }
    return await guard.call("before", request | params)


async def until_granted(guard: Engine, prove: Any, **params: Any) -> Any:
    """Sends the same request again until it is answered, as a client does."""
    call, key = secrets.token_hex(8), secrets.token_hex(4)
    for _ in range(600):
        try:
            await prove()
            return await pay(guard, key, call, **params)
        except StoreUnavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("never granted")


# ---- replicated -----------------------------------------------------------------------


async def test_too_few_replicas_grant_nothing_and_the_claim_is_taken_back(tmp_path: Path) -> None:
    """Both replicas freeze: the claim is free again, and the same id sent again passes the same check."""
    with Replicated.start(tmp_path) as them:
        async with await open_store(them.primary_url, durability="replicated") as opened:
            guard = guard_of(opened)
            assert (await pay(guard, "a")).action == "execute"
            replicas = [node for node in them.servers if node is not them.primary()]
            for node in replicas:
                node.pause()
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match=r"NOREPLICAS: 0 of 1 replicas"):
                    await pay(guard, "b", "b1")
            record = guard.context.keys.op("r", guard.context.shaper.record("r", "pay", "b", "run").digest)
            primary = them.primary().client()
            assert primary.hget(record, "state") == "freed"
            assert primary.hget(guard.context.keys.run("r"), "steps") == "1"
            replicas[0].resume()
            await until_granted(guard, opened.prove)
            assert (await pay(guard, "b", "b1")).action == "execute"
            replicas[0].pause()
            with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                await pay(guard, "b", "b1")
            assert primary.hget(record, "state") == "claimed", "an answer that was heard is never taken back"
            replicas[0].resume()
            replicas[1].resume()


async def test_a_global_claim_short_of_replicas_is_taken_back(tmp_path: Path) -> None:
    with Replicated.start(tmp_path, replicas=1) as them:
        async with await open_store(them.primary_url, durability="replicated") as opened:
            guard = guard_of(opened)
            await guard.call("open", {"run": "r"})
            real = guard.context.link.invoke
            replica = them.servers[1]

            async def invoke(invocation: Any, **options: Any) -> Any:
                if invocation.script.name == "claim":
                    replica.pause()
                return await real(invocation, **options)

            guard.context.link.invoke = invoke  # type: ignore[method-assign]
            with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                await pay(guard, "g", scope="global")
            guard.context.link.invoke = real  # type: ignore[method-assign]
            replica.resume()
            record = guard.context.keys.global_op(guard.context.shaper.record("r", "pay", "g", "global").digest)
            assert them.primary().client().hget(record, "state") == "freed"
            await until_granted(guard, opened.prove, run="r2")
            assert (await pay(guard, "g", scope="global", run="r3")).action == "execute"


async def test_a_beat_that_no_replica_has_accuses_nobody(tmp_path: Path) -> None:
    """A primary that is cut off counts on, and what it counted goes when a replica takes over: no promise is broken."""
    with Replicated.start(tmp_path, replicas=1) as them:
        async with await open_store(them.primary_url, durability="replicated") as opened:
            guard = guard_of(opened)
            await pay(guard, "a")
            canary, primary = guard.context.keys.canary, them.primary().client()
            replica = them.servers[1]
            replica.pause()
            beat = primary.hget(canary, "beat")
            for _ in range(3):
                with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                    await pay(guard, "b", "b1")
            await opened.prove()
            assert beat is not None and int(primary.hget(canary, "beat") or 0) > int(beat)
            primary.hset(canary, "beat", beat)  # as the replica has it
            replica.resume()
            await opened.prove()
            assert opened.store.trouble == ""
            await until_granted(guard, opened.prove)
            primary.hset(canary, "beat", 1)
            await opened.prove()
            assert "went back" in opened.store.trouble, "what replicas had must stay"


async def test_grants_wait_until_those_who_lost_something_can_have_said_so(tmp_path: Path) -> None:
    """Replicas may have acknowledged another primary's writes meanwhile; results are recorded at once."""
    with Replicated.start(tmp_path, replicas=1) as them:
        async with await open_store(them.primary_url, durability="replicated") as opened:
            guard = guard_of(opened)
            assert (await pay(guard, "a", "a1")).action == "execute"
            replica = them.servers[1]
            replica.pause()
            with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
                await pay(guard, "b", "b1")
            replica.resume()
            them.wait_in_sync()
            with pytest.raises(StoreUnavailable, match=r"settles.*the same call id"):
                await pay(guard, "b", "b1")
            done = await guard.call("after", {"run": "r", "call": "a1", "status": "progress", "value": "sent"})
            assert done.action == "continue"
            them.primary().client().hset(guard.context.keys.canary, "suspect", "another daemon misses its beats")
            await opened.prove()
            with pytest.raises(StoreUnavailable, match="misses its beats"):
                await pay(guard, "b", "b1")
            await guard.call("confirm", {})
            await until_granted(guard, opened.prove)
            assert (await pay(guard, "b", "b1")).action == "execute"


async def test_replicated_without_replicas_is_refused(tmp_path: Path) -> None:
    with Replicated.start(tmp_path, replicas=0) as them, pytest.raises(StoreRefused, match="at least one replica"):
        await open_store(them.primary_url, durability="replicated")


# ---- Sentinel ---------------------------------------------------------------------------


async def test_a_failover_goes_on_where_it_was(tmp_path: Path) -> None:
    """Committed effects replay on the promoted primary; nothing is granted twice; no operator is needed."""
    with Sentinels.start(tmp_path, 2, 3, "guard", None, "--min-replicas-to-write", "1") as them:
        async with await open_store(them.url, durability="replicated") as opened:
            guard = guard_of(opened)
            for number in range(20):
                key = f"k{number}"
                assert (await pay(guard, key, f"c{number}")).action == "execute"
                if number % 2:
                    await guard.call("after", {"run": "r", "call": f"c{number}", "status": "progress", "value": number})
            them.kill_primary()
            await until_granted(guard, opened.prove, run="other")
            for number in range(20):
                answer = await pay(guard, f"k{number}")
                assert answer.action == ("replay" if number % 2 else "wait")
                assert not number % 2 or answer.value == number
            assert opened.store.trouble == ""


async def test_a_sentinel_set_without_replicas_in_sync_is_reported(tmp_path: Path) -> None:
    """Refused for replicated; served with a warning otherwise."""
    with Sentinels.start(tmp_path, replicas=1) as them:
        replica = next(node for node in them.servers if node is not them.primary())
        replica.kill()
        with pytest.raises(StoreRefused, match=r"0 of 1 replicas are in sync"):
            for _ in range(200):  # the primary notices the end of its replica's connection
                await (await open_store(them.url, durability="replicated")).close()
                await asyncio.sleep(0.05)
        async with await open_store(them.url) as opened:
            assert opened.report is not None
            assert any("0 of 1 replicas are in sync" in warning for warning in opened.report.warnings)


# ---- Cluster ----------------------------------------------------------------------------


async def test_every_scenario_holds_on_a_cluster(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    arguments = argparse.Namespace(
        files=[SCENARIOS, SCENARIOS / "extra"], store=cluster.url, set=[], show=False, json=False, through_daemon=False
    )
    assert await replay(arguments) == 0, capsys.readouterr().out


async def test_moved_and_ask_are_followed_once_and_tryagain_is_the_callers(cluster: Cluster) -> None:
    """The hot slot moves under a run; each step is granted once."""
    async with await open_store(cluster.url, prefix="guardd") as opened:
        guard = guard_of(opened)
        run = f"hot-{secrets.token_hex(4)}"
        slot = slot_of(guard.context.keys.run(run))
        source = cluster.node_of(slot)
        target = next(node for node in cluster.primaries if node is not source)
        assert (await pay(guard, "a", "a1", run=run)).action == "execute"
        move = cluster.migration(slot, target)
        move.begin()
        move.move(1)
        with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
            await pay(guard, "b", "b1", run=run)
        move.move()
        renewed = await guard.call("renew", {"run": run, "call": "a1"})
        assert renewed.claim == "renewed", "by ASK: every key of it is there"
        with pytest.raises(StoreUnavailable, match="TRYAGAIN"):
            await pay(guard, "b", "b1", run=run)  # a record that is nowhere yet: a node that imports cannot know
        move.finish()
        assert (await pay(guard, "b", "b1", run=run)).action == "execute", "by MOVED"
        assert (await pay(guard, "c", run=run)).action == "execute"
        counters = (await guard.call("inspect", {"run": run}))["counters"]
        assert counters["steps"] == 3
        cluster.migrate_slot(slot, source)


async def test_the_death_of_a_primary_is_survived(cluster: Cluster) -> None:
    """Its replica is promoted without the scripts; they are loaded again.

    Durability memory goes on with it; replicated waits until the dead one is back: half of two nodes is one replica.
    """
    async with (
        await open_store(cluster.url, prefix="guardd") as opened,
        await open_store(cluster.url, prefix="guardd", durability="replicated") as strict,
    ):
        guard, strict_guard = guard_of(opened), guard_of(strict)
        run = f"r-{secrets.token_hex(4)}"
        assert (await pay(strict_guard, "k", "c1", run=run)).action == "execute"
        await strict_guard.call("after", {"run": run, "call": "c1", "status": "progress", "value": "sent"})
        victim = cluster.node_of(slot_of(guard.context.keys.run(run)))
        cluster.kill(victim)
        answer = await sent_until_answered(guard, run)
        assert (answer.action, answer.value) == ("replay", "sent")
        with pytest.raises(StoreUnavailable):
            await pay(strict_guard, "first", run=run)  # its connections to the dead one end
        with pytest.raises(StoreUnavailable, match="NOREPLICAS"):
            await pay(strict_guard, "new", run=run)
        cluster.restart(victim)
        cluster.wait_ok()
        answer = await sent_until_answered(strict_guard, run)
        assert (answer.action, answer.value) == ("replay", "sent")
        for each in (opened, strict):
            await each.prove()
            assert each.store.trouble == ""


async def sent_until_answered(guard: Engine, run: str) -> Any:
    call = secrets.token_hex(8)
    for _ in range(200):
        try:
            return await pay(guard, "k", call, run=run)
        except StoreUnavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("never answered")


async def test_the_index_of_doubts_is_kept_on_a_node_of_its_own(cluster: Cluster) -> None:
    """Index and record are on different primaries: the entry comes before its claim."""
    async with await open_store(cluster.url) as opened:
        store = opened.store
        assert isinstance(store, ClusterStore)
        guard = guard_of(opened)
        doubt = cluster.node_of(slot_of(guard.context.keys.doubt))
        run = next(
            name
            for name in (f"far-{number}" for number in range(1000))
            if cluster.node_of(slot_of(guard.context.keys.run(name))) is not doubt
        )
        await pay(guard, "k", run=run)
        listed = await guard.call("ledger", {})
        assert any(record["run"] == run for record in listed)
