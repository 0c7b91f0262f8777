"""The network that the partition tests stand on: its cuts cut what they say, and nothing else."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
from guardd_client import AsyncGuard

from guardd.store.embedded import find_server
from tests.daemons import daemon
from tests.fault.long.networks import HOSTS, Network


@pytest.fixture
def network() -> Iterator[Network]:
    with Network.make() as made:
        yield made


def passing(network: Network) -> set[tuple[str, str]]:
    """The directions in which a datagram arrives.

    Each way gets one; then all cuts are healed and each gets a last one. Packets
    keep their order, so who hears the last one first has lost the other.
    """
    ways = list(permutations(HOSTS, 2))
    sockets = {host: network.socket_in(host, socket.SOCK_DGRAM) for host in HOSTS}
    try:
        for host, made in sockets.items():
            made.bind((network.address(host), 0))
            made.settimeout(20)
        for word in (b"first", b"last"):
            for source, target in ways:
                sockets[source].sendto(word, sockets[target].getsockname())
            network.heal()
        heard = dict.fromkeys(ways, b"")
        for target in HOSTS:
            open_ways = {network.address(source): (source, target) for source in HOSTS if source != target}
            while open_ways:
                word, (address, _) = sockets[target].recvfrom(16)
                if not heard[open_ways[address]]:
                    heard[open_ways[address]] = word
                if word == b"last":
                    del open_ways[address]
        return {way for way in ways if heard[way] == b"first"}
    finally:
        for made in sockets.values():
            made.close()


def test_a_cut_takes_what_it_names(network: Network) -> None:
    ways = set(permutations(HOSTS, 2))
    assert passing(network) == ways
    network.partition("h1")
    assert passing(network) == {("h2", "h3"), ("h3", "h2")}
    network.partition("h1")
    network.join("h1", "h2")
    assert passing(network) == ways - {("h1", "h3"), ("h3", "h1")}
    network.cut_one_way("h2", "h3")
    assert passing(network) == ways - {("h2", "h3")}
    network.flap("h3", 0.01)
    assert passing(network) == ways


@pytest.fixture(params=["embedded", "redis-server"])
def binary(request: pytest.FixtureRequest) -> Path:
    """The embedded store's server, and the one on PATH."""
    if request.param == "embedded":
        return find_server()
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on PATH")
    return Path(found)


def test_a_primary_that_is_cut_off_is_replaced_and_what_it_took_is_gone(
    binary: Path, network: Network, tmp_path: Path
) -> None:
    """Its clients go on being answered: that is what the guard has to stand."""
    with network.sentinels(tmp_path, binary) as them:
        old = them.primary()
        assert network.host_of(old.address) == "h1"
        old.ask("SET", "k", "before")
        assert old.ask("WAIT", 2, 5000) == 2
        network.partition("h1")
        promoted = them.wait_failover()
        assert network.host_of(promoted.address) != "h1"
        assert promoted.info("server")["process_id"] == promoted.pid
        assert old.ask("SET", "k", "lost")
        assert old.info("replication")["role"] == "master", "two primaries at once"
        assert (old.ask("GET", "k"), promoted.ask("GET", "k")) == ("lost", "before")
        network.heal()
        them.wait_in_sync()
        assert old.info("replication")["role"] == "slave"
        assert old.ask("GET", "k") == "before"


def test_a_primary_that_cannot_be_heard_is_replaced(network: Network, tmp_path: Path) -> None:
    """One way is enough: it hears the others, they do not hear it."""
    with network.sentinels(tmp_path) as them:
        old = them.primary()
        for other in ("h2", "h3"):
            network.cut_one_way("h1", other)
        assert them.wait_failover() is not old
        network.heal()
        them.wait_in_sync()
        assert old.info("replication")["role"] == "slave"


async def test_a_daemon_stands_on_its_side_of_a_cut(network: Network, tmp_path: Path) -> None:
    """It reaches the server of its own host, from there, while that host is cut off."""
    with network.sentinels(tmp_path) as them:
        near = them.nodes[0]
        network.partition("h1")
        async with daemon(f"redis://{near.address}", "n", where=network.prefix("h1")) as running:
            async with AsyncGuard(running.url) as guard:
                assert (await guard.run("r").before("t", {})).action == "execute"
            with near.client() as client:
                seen = {each["addr"].partition(":")[0] for each in client.client_list() if each["name"] == "guardd"}
        assert seen == {network.address("h1")}
