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
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from guardd_client import AsyncGuard, GuardUnavailable

from tests.daemons import DaemonProcess, daemon
from tests.fault.long.networks import HOSTS, Network
from tests.fault.long.oracle import PATIENCE_S, Crowd, Oracle, in_doubt, seed
from tests.fault.rows import Row, scale
from tests.nodes import answers
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
        async with asyncio.timeout(PATIENCE_S):
            while self.crowd.claims < until:
                await asyncio.sleep(0.02)

    def primary_host(self) -> str:
        return self.network.host_of(self.them.primary().address)

    async def failed_over(self) -> None:
        await asyncio.to_thread(self.them.wait_failover)

    async def harm(self, kind: str, chance: random.Random) -> None:
        """One fault, at the host of the primary."""
        host = self.primary_host()
        others = [other for other in HOSTS if other != host]
        if kind == "partition":
            await self.partition()
            return
        self.cut_off += WORKERS_EACH
        if kind == "flap":
            await asyncio.to_thread(self.network.flap, host, FLAP_S)
        elif kind == "half":
            self.network.cut_one_way(host, chance.choice(others))
            await self.more(MORE_CLAIMS)
        else:
            for other in others:
                self.network.cut_one_way(*((host, other) if kind == "unheard" else (other, host)))
            await self.failed_over()
            await self.more(MORE_CLAIMS)

    async def partition(self) -> None:
        """The primary and its daemon and workers on one side, all others on the other; both go on."""
        self.network.partition(self.primary_host())
        self.cut_off += WORKERS_EACH
        await self.failed_over()
        await self.more(MORE_CLAIMS)

    async def mend(self) -> bool:
        """The cut ends; all servers follow one primary again, and workers of all sides are answered.

        False: they are not, for the guard noticed that acknowledged writes are gone.
        """
        self.network.heal()
        await asyncio.to_thread(self.them.wait_in_sync)
        self.them._known = self.them.primary_address() or ""
        if self.durability == "memory":
            await self.confirm()
        until = self.crowd.claims + MORE_CLAIMS
        async with asyncio.timeout(PATIENCE_S):
            while self.crowd.claims < until:
                if self.durability == "replicated" and self.distrusted():
                    return False
                await asyncio.sleep(0.1)
        return True

    async def noticed(self) -> None:
        """Returns when every daemon knows that the store lost something, and each worker was refused since."""
        async with asyncio.timeout(PATIENCE_S):
            while not all(self._distrusts(each) for each in self.daemons):
                await asyncio.sleep(0.1)
        await self.refused()

    async def refused(self) -> None:
        """Returns when workers were refused as often as there are some."""
        until = self.crowd.unavailable + len(HOSTS) * WORKERS_EACH
        async with asyncio.timeout(PATIENCE_S):
            while self.crowd.unavailable < until:
                await asyncio.sleep(0.02)

    async def confirm(self) -> None:
        """An operator lets the guard go on after the loss that it noticed, until each daemon grants again."""
        for each in self.daemons:
            async with AsyncGuard(each.url, deadline_ms=1500) as guard, asyncio.timeout(PATIENCE_S):
                while not await self._grants(guard):
                    await guard.call("confirm", {}, deadline_ms=30_000)

    @staticmethod
    async def _grants(guard: AsyncGuard) -> bool:
        try:
            return (await guard.run(secrets.token_hex(4)).before("look", {})).action == "execute"
        except GuardUnavailable:
            return False

    @staticmethod
    def _distrusts(each: DaemonProcess) -> bool:
        """A loss, that is; that replicas are short is told by the same event, and passes."""
        return any(event["event"] == "store.distrusted" and "--confirm" in event["why"] for event in each.log())

    def distrusted(self) -> int:
        """How many daemons noticed that the store had lost something."""
        return sum(self._distrusts(each) for each in self.daemons)


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


async def storm(network: Network, folder: Path, kinds: list[str], row: Row) -> None:
    """One fault after the other; another client then asks for all that was acknowledged. Asserts that nothing is lost.

    Where Redis drops what a replica acknowledged, the guard must have noticed before anything ran twice. That set of
    servers is then given up, for only an operator could say what is true; the other faults meet a new one.
    """
    chance, noticed, longest_s, left = random.Random(row.seed), 0, 0.0, list(kinds)
    errors: Counter[str] = Counter()
    while left:
        (own := folder / str(row.faults)).mkdir()
        async with scene(network, own, "replicated", chance) as made:
            crowd, is_trusted = made.crowd, True
            while left and is_trusted:
                await made.harm(left.pop(0), chance)
                row.faults += 1
                is_trusted = await made.mend()
            if not is_trusted:
                noticed += 1
                await made.noticed()
            doubled, wrong = crowd.oracle.doubled(), crowd.wrong()
            crowd.is_over = True
            if is_trusted:
                row.lost += await crowd.audit(made.daemons[0].url)
                row.in_doubt += await in_doubt(made.daemons[0].url)
                doubled = crowd.oracle.doubled()
            else:
                await made.confirm()
        row.claims, row.granted = row.claims + crowd.claims, row.granted + crowd.granted
        row.doubled, row.killed = row.doubled + len(doubled), row.killed + made.cut_off
        errors += crowd.errors
        longest_s = max(longest_s, crowd.longest_s)
        assert doubled == []
        assert wrong == set()
    row.note = (
        f"longest wait {longest_s:.1f} s; named errors {dict(errors) or 'none'}; "
        f"failovers that dropped what a replica had acknowledged, noticed, nothing doubled: {noticed}"
    )
    row.write()
    assert row.lost == 0
    assert row.in_doubt <= row.killed
    assert row.granted > 0
    assert noticed < len(kinds)


async def test_a_primary_cut_off_with_its_clients_doubles_nothing(network: Network, tmp_path: Path) -> None:
    row = Row("N1", "Sentinel: primary, daemon and workers cut off", seed=seed())
    await storm(network, tmp_path, ["partition"] * scale(PARTITIONS), row)


async def test_cuts_in_one_direction_and_flaps_double_nothing(network: Network, tmp_path: Path) -> None:
    """Unheard, deaf, unheard by one only (no failover), and cuts shorter than it takes to fail over."""
    row = Row("N2", "Sentinel: cuts in one direction, flaps of 2 s", seed=seed())
    await storm(network, tmp_path, (["flap", "unheard", "flap", "deaf", "half"] * 2)[: scale(FAULTS_N2)], row)


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
    row.note = f"{doubled} doubled, {lost} acknowledged lost, as doctor warns; noticed by {noticed} of 3 daemons"
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
        async with asyncio.timeout(PATIENCE_S):
            while crowd.granted < granted + MORE_CLAIMS // 2:
                await asyncio.sleep(0.02)
        network.heal()
        await asyncio.to_thread(made.them.wait_in_sync)
        await made.noticed()
        granted, doubled = crowd.granted, crowd.oracle.doubled()
        await made.refused()
        assert crowd.granted == granted, "granted while the store was not trusted"
        crowd.is_over = True
        await made.confirm()
    row.claims, row.granted = crowd.claims, crowd.granted
    row.doubled = len(doubled)
    row.note = "noticed before anything ran twice; then nothing was granted until an operator confirmed"
    row.write()
    assert doubled == []
