"""N1, N2: a Sentinel set, a daemon and workers on both sides of a cut, the same effects wanted on both.

Three hosts, each with a server, a sentinel and a daemon. With
`replicated` no effect runs twice and no acknowledged result is lost. With
`memory` the same cuts must show doubles, else this test sees nothing.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from guardd_client import AsyncGuard, GuardUnavailable

from tests.daemons import DaemonProcess, daemon
from tests.fault.long.networks import HOSTS, Network
from tests.fault.long.oracle import Crowd, Oracle, in_doubt, seed
from tests.fault.rows import Row, scale
from tests.nodes import answers
from tests.servers import wait_until
from tests.topologies import Sentinels

WORKERS_EACH = 3
RUNS = ("shared-1", "shared-2", "shared-3")
PARTITIONS, FAULTS_N2, BLIND = 10, 10, 3
FLAP_S, ATTEMPTS = 2.0, 8
MORE_CLAIMS = 200
OPTIONS = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "2", "--appendonly", "yes")


@pytest.fixture
def network() -> Iterator[Network]:
    with Network.make() as made:
        yield made


@dataclass
class Scene:
    """What the cuts are made in. cut_off: workers that were cut off, all faults together."""

    network: Network
    them: Sentinels
    daemons: list[DaemonProcess]
    crowd: Crowd
    durability: str
    cut_off: int = 0

    async def more(self, count: int) -> None:
        """Returns when so many claims more were begun."""
        until = self.crowd.claims + count
        async with asyncio.timeout(60):
            while self.crowd.claims < until:
                await asyncio.sleep(0.02)

    def primary_host(self) -> str:
        return self.network.host_of(self.them.primary().address)

    async def failed_over(self) -> None:
        await asyncio.to_thread(self.them.wait_failover)

    async def partition(self) -> None:
        """The primary and its daemon and workers on one side, all others on the other; both go on."""
        self.network.partition(self.primary_host())
        self.cut_off += WORKERS_EACH
        await self.failed_over()
        await self.more(MORE_CLAIMS)

    async def mend(self) -> None:
        """The cut ends; all servers follow one primary again, and workers of all sides are answered."""
        self.network.heal()
        await asyncio.to_thread(self.them.wait_in_sync)
        self.them._known = self.them.primary_address() or ""
        if self.durability == "memory":
            await self.confirm()
        await self.more(MORE_CLAIMS)

    async def confirm(self) -> None:
        """An operator lets the guard go on after the loss that it noticed, until each daemon grants again."""
        for each in self.daemons:
            async with AsyncGuard(each.url, deadline_ms=1500) as guard, asyncio.timeout(60):
                while not await self._grants(guard):
                    await guard.call("confirm", {}, deadline_ms=30_000)

    @staticmethod
    async def _grants(guard: AsyncGuard) -> bool:
        try:
            return (await guard.run(secrets.token_hex(4)).before("look", {})).action == "execute"
        except GuardUnavailable:
            return False

    def distrusted(self) -> int:
        """How often a daemon noticed that the store had lost something."""
        return sum(event["event"] == "store.distrusted" for each in self.daemons for event in each.log())


@asynccontextmanager
async def scene(network: Network, folder: Path, durability: str, chance: random.Random) -> AsyncIterator[Scene]:
    """Servers, sentinels, a daemon on every host, and workers at each; all end by themselves."""
    servers, outside = folder / "servers", folder / "outside"
    servers.mkdir()
    outside.mkdir()
    crowd = Crowd(Oracle(outside), RUNS, chance)
    options = ("--durability", durability, "--store-timeout-ms", "1000")
    async with AsyncExitStack() as stack:
        them = stack.enter_context(network.sentinels(servers, None, *OPTIONS))
        daemons = [
            await stack.enter_async_context(daemon(them.url, "n", *options, where=network.prefix(host)))
            for host in HOSTS
        ]
        made = Scene(network, them, daemons, crowd, durability)
        async with asyncio.TaskGroup() as tasks:
            for each in daemons * WORKERS_EACH:
                tasks.create_task(crowd.work(each.url))
            try:
                await made.more(MORE_CLAIMS)
                yield made
            finally:
                network.heal()
                crowd.is_over = True


async def verdict(made: Scene, row: Row) -> Row:
    """The row, after another client asked for all that was acknowledged."""
    crowd = made.crowd
    row.lost = await crowd.audit(made.daemons[0].url)
    row.claims, row.granted, row.doubled = crowd.claims, crowd.granted, len(crowd.oracle.doubled())
    row.in_doubt, row.killed = await in_doubt(made.daemons[0].url), made.cut_off
    row.note += f"longest wait {crowd.longest_s:.1f} s; named errors {dict(crowd.errors) or 'none'}; distrusted {made.distrusted()} times"
    row.write()
    return row


def assert_nothing_lost(made: Scene, row: Row) -> None:
    """No effect twice, no acknowledged result gone, no more in doubt than workers that were cut off."""
    assert made.crowd.oracle.doubled() == []
    assert row.lost == 0
    assert made.crowd.wrong() == set()
    assert row.in_doubt <= row.killed
    assert row.granted > 0


async def test_a_primary_cut_off_with_its_clients_doubles_nothing(network: Network, tmp_path: Path) -> None:
    chance, row = random.Random(word := seed()), Row("N1", "Sentinel: primary, daemon and workers cut off", seed=word)
    async with scene(network, tmp_path, "replicated", chance) as made:
        for _ in range(scale(PARTITIONS)):
            await made.partition()
            await made.mend()
            row.faults += 1
        made.crowd.is_over = True
        await verdict(made, row)
    assert_nothing_lost(made, row)


async def test_cuts_in_one_direction_and_flaps_double_nothing(network: Network, tmp_path: Path) -> None:
    """Unheard, deaf, unheard by one only (no failover), and cuts shorter than it takes to fail over."""
    chance, row = random.Random(word := seed()), Row("N2", "Sentinel: cuts in one direction, flaps of 2 s", seed=word)
    async with scene(network, tmp_path, "replicated", chance) as made:
        kinds = ["flap", "unheard", "flap", "deaf", "half"] * 2
        for kind in kinds[: scale(FAULTS_N2)]:
            host = made.primary_host()
            others = [other for other in HOSTS if other != host]
            made.cut_off += WORKERS_EACH
            if kind == "flap":
                await asyncio.to_thread(network.flap, host, FLAP_S)
            elif kind == "half":
                network.cut_one_way(host, chance.choice(others))
                await made.more(MORE_CLAIMS)
            else:
                for other in others:
                    network.cut_one_way(*((host, other) if kind == "unheard" else (other, host)))
                await made.failed_over()
                await made.more(MORE_CLAIMS)
            await made.mend()
            row.faults += 1
        made.crowd.is_over = True
        await verdict(made, row)
    assert_nothing_lost(made, row)


async def test_without_waiting_for_replicas_the_same_cuts_lose_and_the_doctor_says_so(
    network: Network, tmp_path: Path
) -> None:
    """So this test sees what `replicated` prevents. The guard notices the loss, and an operator has to confirm."""
    chance, row = (
        random.Random(word := seed()),
        Row("N1", "the same with durability memory: must be seen to lose", seed=word),
    )
    async with scene(network, tmp_path, "memory", chance) as made:
        said = await asyncio.to_thread(
            subprocess.run,
            [*network.prefix(HOSTS[0]), sys.executable, "-m", "guardd.cli.main", "doctor", "--store", made.them.url,
             "--durability", "memory", "--prefix", "n", "--state-dir", str(tmp_path / "doctor")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        for _ in range(scale(BLIND)):
            await made.partition()
            await made.mend()
            row.faults += 1
        made.crowd.is_over = True
        crowd = made.crowd
        lost = await crowd.audit(made.daemons[0].url)
        doubled, noticed = len(crowd.oracle.doubled()), made.distrusted()
    row.claims, row.granted = crowd.claims, crowd.granted
    row.note = f"{doubled} doubled, {lost} acknowledged lost, as doctor warns; noticed {noticed} times"
    row.write()
    assert "fails over" in said.stdout, said.stdout + said.stderr
    assert doubled + lost > 0, "the cuts do not show what replicated prevents"
    assert noticed > 0


async def half_heard(made: Scene) -> bool:
    """A replica is promoted and cut off before any other host hears of it, and the old primary is back with the third.

    False: the sentinel that led the failover was the third host's; then it is given up, and nothing is lost.
    """
    network, them, old = made.network, made.them, made.primary_host()
    others = [host for host in HOSTS if host != old]
    servers = {network.host_of(node.address): node for node in them.servers}
    network.partition(old)

    def promoted() -> str | None:
        return next((host for host in others if (answers(servers[host], "ROLE") or [""])[0] == "master"), None)

    while (new := await asyncio.to_thread(promoted)) is None:
        pass
    (third,) = (host for host in others if host != new)
    network.partition(new)
    network.join(old, third)
    leading = next(node for node in them.sentinels if network.host_of(node.address) == new)
    flags = answers(leading, "SENTINEL", "MASTER", "guard")
    return "failover_in_progress" in str(flags) and answers(servers[third], "ROLE")[1] == servers[old].host


async def test_a_failover_that_most_hosts_did_not_hear_of_is_noticed(network: Network, tmp_path: Path) -> None:
    """What Redis gives no proof against: old primary and third host acknowledge writes that the promoted one ends.

    Waiting for most replicas does not see it. The canary does: the guard grants nothing until an operator confirms.
    """
    chance, row = random.Random(word := seed()), Row("N2", "a failover that most hosts did not hear of: must be noticed", seed=word)  # fmt: skip
    async with scene(network, tmp_path, "replicated", chance) as made:
        crowd = made.crowd
        for _ in range(ATTEMPTS):
            row.faults += 1
            if await half_heard(made):
                break
            await made.mend()
        else:
            raise AssertionError("the promoted host never led the failover")
        granted = crowd.granted
        async with asyncio.timeout(60):
            while crowd.granted < granted + MORE_CLAIMS // 2:
                await asyncio.sleep(0.02)
        network.heal()
        await asyncio.to_thread(made.them.wait_in_sync)
        await asyncio.to_thread(wait_until, lambda: made.distrusted() >= len(HOSTS), what="every daemon's distrust")
        granted, doubled, refused = crowd.granted, len(crowd.oracle.doubled()), crowd.unavailable
        async with asyncio.timeout(60):
            while crowd.unavailable < refused + len(HOSTS) * WORKERS_EACH:
                await asyncio.sleep(0.02)
        assert crowd.granted == granted, "granted while the store was not trusted"
        crowd.is_over = True
        await made.confirm()
    row.claims, row.granted = crowd.claims, crowd.granted
    row.note = f"{doubled} doubled before it was noticed; then nothing was granted until an operator confirmed"
    row.write()
