"""Throw-away topologies of real servers: a primary with replicas, a set under Sentinels, a cluster.

    with Sentinels.start(folder) as them:
        open_store(them.url) ...
        them.kill_primary()
        promoted = them.wait_failover()

`binary` names the server, the one of the embedded store when left out; `access`
brings TLS and an ACL user. Options are given as on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from guardd.store.embedded import find_server
from tests.nodes import Access, Node, Nodes, answers, ended_on_error, option_lines, wait_to_see

SLOTS = 16_384
DOWN_AFTER_MS, FAILOVER_TIMEOUT_MS, NODE_TIMEOUT_MS = 1000, 3000, 1000


@dataclass
class Replicated(Nodes):
    """One primary and its replicas."""

    @classmethod
    def start(
        cls, folder: Path, replicas: int = 2, binary: Path | None = None, *options: str, access: Access | None = None
    ) -> Self:
        """Starts them and waits until all are in sync."""
        them = cls(folder, binary or find_server(), access or Access(), options)
        with ended_on_error(them):
            them.start_servers([{}] * (1 + replicas))
        return them

    def start_servers(self, placed: list[dict[str, Any]]) -> None:
        """A server for each place (host, prefix), the first is primary."""
        first = self.start_node("server-0", option_lines(self.options), **placed[0])
        for number, place in enumerate(placed[1:], 1):
            follow = f"replicaof {first.host} {first.port}"
            self.start_node(f"server-{number}", [*option_lines(self.options), follow], **place)
        self.wait_in_sync()

    @property
    def servers(self) -> list[Node]:
        """All but the sentinels."""
        return [node for node in self.nodes if not node.is_sentinel]

    def primary(self) -> Node:
        """The one that was started as primary."""
        return self.nodes[0]

    @property
    def primary_url(self) -> str:
        return self.access.url("", [self.primary().address])

    @property
    def replica_urls(self) -> list[str]:
        return [self.access.url("", [node.address]) for node in self.servers if node is not self.primary()]

    def wait_in_sync(self) -> None:
        """Returns when every other running server follows the primary and has all that it wrote."""
        wait_to_see(self._is_in_sync, what="replication")

    def _is_in_sync(self) -> bool:
        primary = self.primary()
        if not primary.is_up:
            return False
        state = primary.info("replication")
        offset = state["master_repl_offset"]
        for node in self.servers:
            if node is primary or not node.is_up:
                continue
            seen = node.info("replication")
            if seen["role"] != "slave" or (seen["master_host"], seen["master_port"]) != (primary.host, primary.port):
                return False
            if seen["master_link_status"] != "up" or seen["slave_repl_offset"] < offset:
                return False
        return True


@dataclass
class Sentinels(Replicated):
    """A primary and replicas, watched by sentinels that fail over. quorum: the majority of them."""

    name: str = "guard"
    sentinels: list[Node] = field(default_factory=list)
    _known: str = ""

    @classmethod
    def start(  # type: ignore[override]
        cls, folder: Path, replicas: int = 2, sentinels: int = 3, name: str = "guard", binary: Path | None = None,
        *options: str, access: Access | None = None, placed: list[dict[str, Any]] | None = None,
    ) -> Self:  # fmt: skip
        """Starts them and waits until every sentinel knows all others.

        Args:
            options: of the servers, such as `"--min-replicas-to-write", "1", "--min-replicas-max-lag", "2"`.
            placed:  host and prefix of each server and its sentinel; all on the loopback when left out.
        """
        them = cls(folder, binary or find_server(), access or Access(), options, name=name)
        with ended_on_error(them):
            them.start_servers(placed or [{}] * (1 + replicas))
            for number in range(sentinels):
                place = placed[number % len(placed)] if placed else {}
                them.sentinels.append(them._start_sentinel(number, sentinels, place))
            them._known = them.primary_address() or them.nodes[0].address
            wait_to_see(them._is_acquainted, what="the sentinels' view of each other")
        return them

    def _start_sentinel(self, number: int, count: int, place: dict[str, Any]) -> Node:
        first = self.nodes[0]
        lines = [
            f"sentinel monitor {self.name} {first.host} {first.port} {count // 2 + 1}",
            f"sentinel down-after-milliseconds {self.name} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {self.name} {FAILOVER_TIMEOUT_MS}",
        ]
        if self.access.user:
            lines += [
                f"sentinel auth-user {self.name} {self.access.user}",
                f"sentinel auth-pass {self.name} {self.access.password}",
            ]
        return self.start_node(f"sentinel-{number}", lines, is_sentinel=True, **place)

    def _is_acquainted(self) -> bool:
        for sentinel in self.sentinels:
            flat = sentinel.ask("SENTINEL", "MASTER", self.name)
            state = flat if isinstance(flat, dict) else dict(zip(flat[::2], flat[1::2], strict=True))
            others = (int(state["num-slaves"]), int(state["num-other-sentinels"]))
            if others != (len(self.servers) - 1, len(self.sentinels) - 1) or state["flags"] not in (
                "master",
                {"master"},
            ):
                return False
        return True

    @property
    def url(self) -> str:
        """`redis+sentinel://h1:p,h2:p,h3:p/guard`."""
        return self.access.url("+sentinel", [node.address for node in self.sentinels], f"/{self.name}")

    def primary_address(self) -> str | None:
        """Where most of the sentinels say that the primary is; None while they disagree."""
        votes = [self.primary_of(node) for node in self.sentinels if node.is_up]
        return next((vote for vote in votes if vote and votes.count(vote) * 2 > len(self.sentinels)), None)

    def primary_of(self, sentinel: Node) -> str | None:
        """Where one sentinel says that the primary is; None: no answer."""
        found = answers(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return f"{found[0]}:{found[1]}" if found else None

    def primary(self) -> Node:
        """Whom the sentinels call primary; before they run, the first server."""
        address = self.primary_address() if self.sentinels else None
        return self.at(address) if address else self.nodes[0]

    def kill_primary(self) -> Node:
        """SIGKILL for the primary; returns which it was."""
        victim = self.primary()
        victim.kill()
        return victim

    def wait_failover(self) -> Node:
        """Returns the new primary once most sentinels name another one than before and it takes writes."""
        wait_to_see(self._is_failed_over, what="the failover")
        promoted = self.primary()
        self._known = promoted.address
        return promoted

    def _is_failed_over(self) -> bool:
        address = self.primary_address()
        if address is None or address == self._known:
            return False
        role = answers(self.at(address), "ROLE")
        return bool(role) and role[0] == "master"


@dataclass
class Cluster(Nodes):
    """Primaries that share the slots evenly, each with replicas."""

    @classmethod
    def start(
        cls, folder: Path, primaries: int = 3, replicas_each: int = 1, binary: Path | None = None,
        *options: str, access: Access | None = None,
    ) -> Self:  # fmt: skip
        """Starts the nodes, joins them, shares the slots and waits until all agree."""
        them = cls(folder, binary or find_server(), access or Access(), options)
        with ended_on_error(them):
            for number in range(primaries * (1 + replicas_each)):
                them._start_member(number)
            them._join(primaries)
        return them

    def _start_member(self, number: int) -> Node:
        lines = [
            "cluster-enabled yes", "cluster-config-file nodes.conf", f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            # The bus stands where no port of a server can be: above the range that they are taken from.
            "cluster-port {bus}", *option_lines(self.options),
        ]  # fmt: skip
        if self.access.tls:
            lines.append("tls-cluster yes")
        return self.start_node(f"node-{number}", lines)

    def _join(self, primaries: int) -> None:
        for epoch, node in enumerate(self.nodes, 1):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", node.host, node.port, node.bus)
        wait_to_see(lambda: all(len(self._rows(node)) == len(self.nodes) for node in self.nodes), what="the meeting")
        for number, node in enumerate(self.nodes[:primaries]):
            first, last = SLOTS * number // primaries, SLOTS * (number + 1) // primaries - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        for number, node in enumerate(self.nodes[primaries:]):
            self._replicate(node, self.nodes[number % primaries])
        self.wait_ok()
        wait_to_see(self._is_in_sync, what="replication in the cluster")

    def _replicate(self, node: Node, primary: Node) -> None:
        wait_to_see(lambda: self.id_of(primary) in {row[0] for row in self._rows(node)}, what="the primary's id")
        node.ask("CLUSTER", "REPLICATE", self.id_of(primary))

    def _is_in_sync(self) -> bool:
        roles = [node.info("replication") for node in self.nodes if node.is_up]
        return all(role["role"] == "master" or role["master_link_status"] == "up" for role in roles) and all(
            self.nodes_known_as_replicas(node) == sum(role["role"] == "slave" for role in roles)
            for node in self.nodes
            if node.is_up
        )

    def nodes_known_as_replicas(self, node: Node) -> int:
        """How many replicas one node knows of."""
        return sum("slave" in row[2].split(",") for row in self._rows(node))

    @staticmethod
    def id_of(node: Node) -> str:
        """The name of a node in its cluster."""
        found: str = node.ask("CLUSTER", "MYID")
        return found

    @staticmethod
    def _rows(node: Node) -> list[list[str]]:
        """CLUSTER NODES, a list of words a node; empty while it does not answer."""
        return [line.split() for line in (answers(node, "CLUSTER", "NODES") or "").splitlines()]

    @property
    def url(self) -> str:
        """`redis+cluster://h:p,h:p`."""
        return self.access.url("+cluster", [node.address for node in self.nodes])

    @property
    def primaries(self) -> list[Node]:
        """Those that run and hold slots by their own view."""
        return [node for node in self.nodes if node.is_up and self._own_slots(node)]

    def _own_slots(self, node: Node) -> set[int]:
        own = next((row for row in self._rows(node) if "myself" in row[2]), None)
        return slots_of(own) if own and "master" in own[2] else set()

    def node_of(self, slot: int) -> Node:
        """The node that serves a slot now."""
        holders = [node for node in self.nodes if node.is_up and slot in self._own_slots(node)]
        assert len(holders) == 1, f"slot {slot} has {len(holders)} holders"
        return holders[0]

    def replicas_of(self, primary: Node) -> list[Node]:
        """The running replicas of a primary."""
        name = self.id_of(primary)
        addresses = {row[1].split("@")[0] for row in self._rows(primary) if row[3] == name}
        return [node for node in self.nodes if node.is_up and node.address in addresses]

    def wait_ok(self) -> None:
        """Returns when every running node says ok and sees every slot with a running primary."""
        wait_to_see(lambda: all(self._sees_all(node) for node in self.nodes if node.is_up), what="the cluster's agreement")  # fmt: skip

    def wait_in_sync(self) -> None:
        """Returns when every running replica follows a primary, and every node knows of all replicas."""
        self.wait_ok()
        wait_to_see(self._is_in_sync, what="replication in the cluster")

    def _sees_all(self, node: Node) -> bool:
        if "cluster_state:ok" not in (answers(node, "CLUSTER", "INFO") or ""):
            return False
        up = {other.address for other in self.nodes if other.is_up}
        covered: set[int] = set()
        for row in self._rows(node):
            flags = row[2].split(",")
            if "master" in flags and "fail" not in flags and "fail?" not in flags and row[1].split("@")[0] in up:
                covered |= slots_of(row)
        return len(covered) == SLOTS

    def migration(self, slot: int, target: Node) -> Migration:
        """A migration to be made step by step."""
        return Migration(self, slot, self.node_of(slot), target)

    def migrate_slot(self, slot: int, target: Node) -> None:
        """All steps at once."""
        move = self.migration(slot, target)
        move.begin()
        move.move()
        move.finish()


@dataclass
class Migration:
    """A slot on its way. Between `begin` and `finish` clients see ASK, and TRYAGAIN for keys on both sides."""

    cluster: Cluster
    slot: int
    source: Node
    target: Node

    def begin(self) -> None:
        """Both sides know."""
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.cluster.id_of(self.source))
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.cluster.id_of(self.target))

    def move(self, count: int | None = None) -> int:
        """Moves so many keys, None: all; returns how many went."""
        moved = 0
        access = self.cluster.access
        login = ("AUTH2", access.user, access.password) if access.user else ()
        while count is None or moved < count:
            keys = self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 100 if count is None else count - moved)
            if not keys:
                break
            self.source.ask("MIGRATE", self.target.host, self.target.port, "", 0, 5000, *login, "KEYS", *keys)
            moved += len(keys)
        return moved

    def move_key(self, key: str) -> None:
        """Moves this one."""
        access = self.cluster.access
        login = ("AUTH2", access.user, access.password) if access.user else ()
        self.source.ask("MIGRATE", self.target.host, self.target.port, "", 0, 5000, *login, "KEYS", key)

    def finish(self) -> None:
        """The slot is the target's, for every node."""
        name = self.cluster.id_of(self.target)
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "NODE", name)
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "NODE", name)
        wait_to_see(self._is_known, what=f"slot {self.slot} on {self.target.address}")

    def _is_known(self) -> bool:
        for node in self.cluster.nodes:
            rows = self.cluster._rows(node) if node.is_up else None
            if rows is not None and {row[1].split("@")[0] for row in rows if self.slot in slots_of(row)} != {
                self.target.address
            }:
                return False
        return True


def slots_of(row: list[str]) -> set[int]:
    """The slots in a row of CLUSTER NODES, without those on their way."""
    found: set[int] = set()
    for word in row[8:]:
        if not word.startswith("["):
            first, _, last = word.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
