"""F10: whatever a store answers that is no answer, the tool does not run, and the same id is granted once it is mended."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import redis

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.keys import slot_of
from guardd.model.errors import StoreUnavailable
from guardd.store.connect import open_store
from guardd.store.embedded import find_server
from tests.fault.rows import Row
from tests.servers import Server, wait_until
from tests.topologies import Cluster

NOWHERE = ("127.0.0.1", 1)
Trouble = Callable[[Server], AbstractContextManager[None]]


@contextlib.contextmanager
def readonly(server: Server) -> Iterator[None]:
    """It became a replica under us."""
    server.client().execute_command("REPLICAOF", *NOWHERE)
    yield
    server.client().execute_command("REPLICAOF", "NO", "ONE")


@contextlib.contextmanager
def noreplicas(server: Server) -> Iterator[None]:
    server.client().config_set("min-replicas-to-write", "1")
    yield
    server.client().config_set("min-replicas-to-write", "0")


@contextlib.contextmanager
def oom(server: Server) -> Iterator[None]:
    server.client().config_set("maxmemory", "1")
    yield
    server.client().config_set("maxmemory", "0")


@contextlib.contextmanager
def misconf(server: Server) -> Iterator[None]:
    """A snapshot that cannot be written: where its file should be is a directory."""
    client = server.client()
    (server.folder / "dump.rdb" / "full").mkdir(parents=True)
    client.config_set("save", "3600 1")
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", what="a failed snapshot")
    yield
    shutil.rmtree(server.folder / "dump.rdb")
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "ok", what="a good snapshot")


@contextlib.contextmanager
def busy(server: Server) -> Iterator[None]:
    """A foreign script that does not end; it has written nothing, so it can be killed."""
    client = server.client()
    client.config_set("busy-reply-threshold", "50")

    def spin() -> None:
        with contextlib.suppress(redis.ResponseError):  # it ends by our SCRIPT KILL
            server.client().eval("while true do end", 0)

    spinning = threading.Thread(target=spin)
    spinning.start()
    wait_until(lambda: is_busy(client), what="a busy server")
    yield
    client.script_kill()
    spinning.join()


def is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


@contextlib.contextmanager
def noperm(server: Server) -> Iterator[None]:
    server.client().execute_command("ACL", "SETUSER", "default", "-evalsha")
    yield
    server.client().execute_command("ACL", "SETUSER", "default", "+evalsha")


TROUBLES: dict[str, Trouble] = {
    "READONLY": readonly, "NOREPLICAS": noreplicas, "OOM": oom, "MISCONF": misconf,
    "BUSY": busy, "NOPERM": noperm,
}  # fmt: skip


def request(run: str = "r") -> dict[str, Any]:
    return {"run": run, "call": secrets.token_hex(8), "tool": "pay", "idempotency_key": "k"}


def scripts_sent(server: Server) -> int:
    """EVALSHAs that reached the server, those included that it refused."""
    stats = server.client().info("commandstats").get("cmdstat_evalsha", {"calls": 0, "rejected_calls": 0})
    return int(stats["calls"]) + int(stats["rejected_calls"])


async def refused(guard: Engine, params: dict[str, Any], word: str) -> None:
    with pytest.raises(StoreUnavailable) as raised:
        await guard.call("before", dict(params))
    assert (raised.value.value, raised.value.retry) == (word, "same_id"), raised.value.message
    assert raised.value.message.startswith(f"{word}: "), raised.value.message
    assert len(raised.value.message) > len(word) + 20, "it says what to do"


async def granted_once(guard: Engine, params: dict[str, Any]) -> None:
    """The same id now gets its grant, once and for all; another id does not."""
    assert (await guard.call("before", dict(params))).action == "execute"
    assert (await guard.call("before", dict(params))).action == "execute"
    other = await guard.call("before", {**params, "call": secrets.token_hex(8)})
    assert (other.action, other.reason) == ("wait", "in_flight")
    assert (await guard.call("inspect", {"run": params["run"]}))["counters"]["steps"] == 1


@pytest.mark.parametrize("word", TROUBLES)
async def test_a_store_in_trouble_grants_nothing_and_nothing_is_repeated(word: str, tmp_path: Path) -> None:
    with Server.start(tmp_path) as server:
        async with await open_store(server.url, prefix="guardd", timeout_ms=5000) as opened:
            guard = Engine(opened.store, EngineConfig())
            await guard.call("before", request("warm"))
            sent = 0 if word == "BUSY" else scripts_sent(server)
            params = request()
            with TROUBLES[word](server):
                before = sent or 0
                await refused(guard, params, word)
                if word != "BUSY":
                    assert scripts_sent(server) - before == 1, "one question, one script"
            await granted_once(guard, params)
    Row("F10", f"the store answers {word}", faults=1, claims=4, granted=1).write()


async def test_a_script_that_cannot_be_killed_is_a_busy_store_and_then_none(tmp_path: Path) -> None:
    """It has written: only SHUTDOWN NOSAVE is left. Fail closed, before and after."""
    with Server.start(tmp_path, "--busy-reply-threshold", "50") as server:
        async with await open_store(server.url, prefix="guardd", timeout_ms=5000) as opened:
            guard = Engine(opened.store, EngineConfig())
            client = server.client()

            def spin() -> None:
                with contextlib.suppress(redis.ConnectionError):  # it ends with the server
                    server.client().eval("redis.call('SET', 'x', 1) while true do end", 0)

            spinning = threading.Thread(target=spin)
            spinning.start()
            wait_until(lambda: is_busy(client), what="a busy server")
            with pytest.raises(redis.ResponseError, match="UNKILLABLE"):
                client.script_kill()
            params = request()
            await refused(guard, params, "BUSY")
            with contextlib.suppress(redis.ConnectionError):  # the server's last word
                client.execute_command("SHUTDOWN", "NOSAVE")
            spinning.join()
            with pytest.raises(StoreUnavailable, match="is the server up"):
                await guard.call("before", dict(params))
    Row("F10", "the store answers BUSY, UNKILLABLE", faults=1, claims=2).write()


async def test_a_store_that_loads_is_not_ready_yet(tmp_path: Path) -> None:
    """INFO answers, commands do not: only a script that ran is ready."""
    params = request()
    with Server.start(tmp_path) as server:
        async with await open_store(server.url, prefix="guardd", timeout_ms=15_000) as opened:
            guard = Engine(opened.store, EngineConfig())
            await guard.call("before", request("warm"))
            server.client().eval("for i = 1, 3000 do redis.call('SET', 'k' .. i, i) end", 0)
            server.client().save()
            server.kill()
            slow = ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
            with Server.start(tmp_path, *slow) as again:
                assert again.client().info("persistence")["loading"] == 1
                with contextlib.suppress(StoreUnavailable):
                    await guard.call("inspect", {"run": "r"})  # the connection to the dead one ends
                await refused(guard, params, "LOADING")
                again.client().config_set("key-load-delay", "0")
                wait_until(lambda: again.client().info("persistence")["loading"] == 0, what="a loaded server")
                await granted_once(guard, params)
    Row("F10", "the store answers LOADING", faults=1, claims=4, granted=1).write()


async def test_a_replica_without_its_primary_is_not_read(tmp_path: Path) -> None:
    """It may say nothing stale, so what is asked of it is unanswered."""
    with Server.start(tmp_path) as server:
        async with await open_store(server.url, prefix="guardd") as opened:
            guard = Engine(opened.store, EngineConfig())
            await guard.call("open", {"run": "r"})
            server.client().config_set("replica-serve-stale-data", "no")
            with readonly(server):
                with pytest.raises(StoreUnavailable) as raised:
                    await guard.call("inspect", {"run": "r"})
                assert raised.value.value == "MASTERDOWN"
                await refused(guard, request(), "READONLY")
            assert (await guard.call("inspect", {"run": "r"}))["status"] == "running"
    Row("F10", "the store answers MASTERDOWN", faults=1, claims=1).write()


async def test_a_password_that_is_not_taken_any_more(tmp_path: Path) -> None:
    with Server.start(tmp_path) as server:
        client = server.client()
        client.execute_command("ACL", "SETUSER", "guard", "on", ">old", "~*", "&*", "+@all")
        async with await open_store(f"unix://guard:old@{server.socket}", prefix="guardd") as opened:
            guard = Engine(opened.store, EngineConfig())
            await guard.call("before", request("warm"))
            client.execute_command("ACL", "SETUSER", "guard", "resetpass", ">new")
            client.execute_command("CLIENT", "KILL", "USER", "guard")
            params = request()
            with pytest.raises(StoreUnavailable, match="is the server up"):
                await guard.call("before", dict(params))
            await refused(guard, params, "WRONGPASS")
            client.execute_command("ACL", "SETUSER", "guard", ">old")
            await granted_once(guard, params)
    Row("F10", "the store answers WRONGPASS", faults=1, claims=5, granted=1).write()


async def test_a_cluster_that_moves_a_slot_or_lacks_a_node(tmp_path: Path) -> None:
    """TRYAGAIN while the slot of a run is between two nodes; CLUSTERDOWN while a node is missing."""
    with Cluster.start(tmp_path, 3, 0, find_server(), "--appendonly", "yes") as cluster:
        async with await open_store(cluster.url, prefix="guardd") as opened:
            guard = Engine(opened.store, EngineConfig())
            params = request()
            slot = slot_of(guard.context.keys.run("r"))
            await guard.call("open", {"run": "r"})
            source = cluster.node_of(slot)
            target, third = (node for node in cluster.primaries if node is not source)
            move = cluster.migration(slot, target)
            move.begin()
            move.move(1)
            await refused(guard, params, "TRYAGAIN")
            move.move()
            move.finish()
            cluster.kill(third)
            wait_until(lambda: "cluster_state:fail" in target.ask("CLUSTER", "INFO"), what="a cluster that is down")
            await refused(guard, params, "CLUSTERDOWN")
            cluster.restart(third)
            cluster.wait_ok()
            await granted_once(guard, params)
    Row("F10", "a cluster answers TRYAGAIN, CLUSTERDOWN", faults=2, claims=5, granted=1).write()
