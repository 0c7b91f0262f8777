"""A Redis or Valkey Cluster: every tree of runs lives on one primary, by its hash tag.

All keys of a script are of one slot. MOVED and ASK mean that nothing ran: the
same script is sent once to the node that was named. TRYAGAIN, CLUSTERDOWN and
everything else are the caller's to send again under the same call id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from redis import exceptions as driver
from redis.asyncio.connection import ConnectionPool

from guardd.keys import SLOTS, Key, slot_of
from guardd.model.errors import StoreUnavailable
from guardd.store.base import Command, Reply, ScriptLike, Scripts, checked, may_grant, refuse_grants, scanned
from guardd.store.canary import BatchProof, Canaries
from guardd.store.errors import map_error
from guardd.store.pipe import OnBatch
from guardd.store.server import Node

Address = tuple[str, int]


class ClusterStore:
    """See Store.

    Args:
        seeds:    nodes to ask for the map of slots.
        pool_of:  makes the connections to a node.
        replicas: how many replicas of a primary must have a write before it is answered.
    """

    kind = "cluster"

    def __init__(
        self,
        seeds: Sequence[Address],
        pool_of: Callable[[Address], ConnectionPool],
        *,
        durability: str,
        timeout_ms: int,
        pipes: int = 1,
        canaries: Canaries | None = None,
        replicas: int = 0,
        wait_ms: int = 0,
    ) -> None:
        self.durability = durability
        self.canaries = canaries
        self.refused = ""
        self.replicas_of: dict[Address, list[Address]] = {}
        """What the cluster last said: primaries, each with its replicas."""
        self._seeds = list(seeds)
        self._pool_of = pool_of
        self._options = {"timeout_ms": timeout_ms + wait_ms, "pipes": pipes}
        self._proof = {"replicas": replicas, "wait_ms": wait_ms}
        self._nodes: dict[Address, Node] = {}
        self._owner: list[Address | None] = [None] * SLOTS
        self._mapping: asyncio.Task[None] | None = None
        self._scripts = Scripts(with_flags=True)
        self._on_batch: OnBatch | None = None

    # ---- The map of slots ------------------------------------------------------------

    async def map_slots(self) -> None:
        """Asks the nodes, known ones first, who holds which slots; callers at the same time share one question.

        Raises: StoreUnavailable: no node answers.
        """
        if self._mapping is None:
            self._mapping = asyncio.create_task(self._map_slots())
            self._mapping.add_done_callback(self._mapped)
        await asyncio.shield(self._mapping)

    def _mapped(self, _: asyncio.Task[None]) -> None:
        self._mapping = None

    async def _map_slots(self) -> None:
        last = "no node is known"
        for address in dict.fromkeys([*self.replicas_of, *self._seeds]):
            try:
                (reply,) = checked(await self._node(address).execute(("CLUSTER", "SLOTS")), where="CLUSTER SLOTS")
            except StoreUnavailable as error:
                last = error.message
                continue
            self._take(address, reply)
            return
        raise StoreUnavailable(f"no node of the cluster answers: {last}", field="store", value="cluster")

    def _take(self, asked: Address, reply: list[Any]) -> None:
        owner: list[Address | None] = [None] * SLOTS
        found: dict[Address, list[Address]] = {}
        for first, last, primary, *replicas in reply:
            # A node that does not know its own name leaves the host empty: it is the one that was asked.
            address, *others = [((host or b"").decode() or asked[0], port) for host, port, *_ in (primary, *replicas)]
            found.setdefault(address, others)
            for slot in range(first, last + 1):
                owner[slot] = address
        self._owner, self.replicas_of = owner, found

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            proof = None
            if self.canaries is not None:
                proof = BatchProof(self.canaries, lambda: self._canary_of(address), **self._proof)
            node = self._nodes[address] = Node(self._pool_of(address), proof=proof, **self._options)
            node.observe(self._on_batch)
        return node

    def _canary_of(self, address: Address) -> Key | None:
        assert self.canaries is not None
        return next((key for key in self.canaries.keys if self._owner[slot_of(key)] == address), None)

    async def _owner_of(self, key: str | bytes) -> Node:
        slot = slot_of(key)
        if self._owner[slot] is None:
            await self.map_slots()
        address = self._owner[slot]
        if address is None:
            raise StoreUnavailable(
                f"CLUSTERDOWN: no node serves slot {slot}; bring its primary back", field="store", value="CLUSTERDOWN"
            )
        return self._node(address)

    # ---- Sending ---------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """See Store."""
        return self.refused or (self.canaries.trouble if self.canaries else "")

    async def execute(self, *commands: Command) -> list[Reply]:
        """See Store; commands of different nodes travel side by side."""
        nodes = [await self._owner_of(_key(command)) for command in commands]
        groups: dict[int, list[int]] = {}
        for number, node in enumerate(nodes):
            groups.setdefault(id(node), []).append(number)
        replies: list[Reply] = [None] * len(commands)

        async def ask(numbers: list[int]) -> None:
            sent = [commands[number] for number in numbers]
            for number, reply in zip(numbers, await self._sent(nodes[numbers[0]], *sent), strict=True):
                if isinstance(reply, driver.MovedError | driver.AskError):
                    reply = (await self._redirected(reply, commands[number]))[-1]  # noqa: PLW2901
                replies[number] = reply

        await asyncio.gather(*(ask(numbers) for numbers in groups.values()))
        return checked(replies, where="a command")

    async def transaction(self, *commands: Command) -> list[Reply]:
        """See Store."""
        node = await self._owner_of(_key(commands[0]))
        replies = await self._sent(node, ("MULTI",), *commands, ("EXEC",))
        if any(isinstance(reply, driver.MovedError) for reply in replies):
            await self.map_slots()
            replies = await self._sent(await self._owner_of(_key(commands[0])), ("MULTI",), *commands, ("EXEC",))
        return list(checked(replies, where="a transaction")[-1])

    async def script(
        self, script: ScriptLike, keys: Sequence[str], args: Sequence[Any], *, before: Sequence[Command] = ()
    ) -> Reply:
        """See Store; commands of another node are answered before the script is sent."""
        refuse_grants(script, self.trouble)
        loaded = self._scripts.get(script)
        node = await self._owner_of(keys[0])
        first: list[Command] = []
        for command in before:
            if await self._owner_of(_key(command)) is node:
                first.append(command)
            else:
                await self._list(command, script)
        call: Command = ("EVALSHA", loaded.sha, len(keys), *keys, *args)
        try:
            replies = await node.script(loaded, call, *first, is_grant=may_grant(script))
        except StoreUnavailable:
            self._forget_owner(keys[0])
            raise
        reply = replies[-1]
        if isinstance(reply, driver.MovedError | driver.AskError):
            target = await self._target(reply)
            asking: list[Command] = [("ASKING",)] if isinstance(reply, driver.AskError) else []
            # Index commands may have been sent to a node that moved, too; they are hints and go again.
            for command in first:
                await self._list(command, script)
            reply = (await target.script(loaded, call, *asking, is_grant=may_grant(script)))[-1]
        return checked([reply], where=f"the script {script.name}")[-1]

    async def _list(self, command: Command, script: ScriptLike) -> None:
        """Writes an index that is on another node; a kill or a result never waits for its recovery, see `answered`."""
        try:
            await self.execute(command)
        except StoreUnavailable:
            if may_grant(script):
                raise

    async def _sent(self, node: Node, *commands: Command) -> list[Reply]:
        try:
            return await node.execute(*commands)
        except StoreUnavailable:
            self._forget_owner(next(_key(each) for each in commands if len(each) > 1))
            raise

    def _forget_owner(self, key: str | bytes) -> None:
        """The next request for this slot asks who holds it now."""
        self._owner[slot_of(key)] = None

    async def _redirected(self, reply: driver.AskError, command: Command) -> list[Reply]:
        target = await self._target(reply)
        if isinstance(reply, driver.MovedError):
            return await target.execute(command)
        return await target.execute(("ASKING",), command)

    async def _target(self, reply: driver.AskError) -> Node:
        """The node that a MOVED (kept from now on) or an ASK (for this once) names."""
        if isinstance(reply, driver.MovedError):
            await self.map_slots()
        if not reply.host or not reply.port:
            raise map_error(reply, where="a command")
        return self._node((reply.host, int(reply.port)))

    # ---- Proof, checks ---------------------------------------------------------------

    async def prove(self) -> None:
        """See Store."""
        await self.map_slots()
        if self.canaries is not None:
            await self.canaries.prove(self.execute)

    async def confirm(self) -> None:
        """See Store."""
        if self.canaries is not None:
            await self.canaries.confirm(self.execute)

    async def on_primary(self, address: Address, *commands: Command) -> list[Reply]:
        """Commands to one primary, whatever their keys: what a check of its configuration needs."""
        return checked(await self._node(address).execute(*commands), where="a command")

    def event_pool(self) -> ConnectionPool:
        """See Store: what one node publishes is heard on all."""
        return self._node(next(iter(self.replicas_of or dict.fromkeys(self._seeds)))).pool

    def observe(self, on_batch: OnBatch) -> None:
        """See Store."""
        self._on_batch = on_batch
        for node in self._nodes.values():
            node.observe(on_batch)

    async def scan(self, pattern: str) -> list[bytes]:
        """See Store."""
        await self.map_slots()
        found: list[bytes] = []
        for address in self.replicas_of:
            found += await scanned(partial(self.on_primary, address), pattern)
        return found

    async def close(self) -> None:
        """See Store."""
        if self.canaries is not None:
            self.canaries.close()
        for node in self._nodes.values():
            await node.close()


def _key(command: Command) -> str | bytes:
    """The key of a plain command is its first argument."""
    key = command[1]
    return key if isinstance(key, bytes) else str(key)
