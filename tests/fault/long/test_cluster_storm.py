"""N3: a cluster of six under workers at full speed: primaries die in turn, a thousand slots move, the hot one too."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack
from pathlib import Path

from guardd.keys import Keys, slot_of
from tests.daemons import daemon
from tests.fault.long.oracle import Crowd, Oracle, in_doubt, seed
from tests.fault.rows import Row, scale
from tests.topologies import Cluster

WORKERS = 8
RUNS = tuple(f"storm-{number}" for number in range(6))
KILLS, SLOTS_MOVED = 9, 1000
MORE_CLAIMS = 200


async def more(crowd: Crowd, count: int) -> None:
    """Returns when so many claims more were begun."""
    until = crowd.claims + count
    async with asyncio.timeout(60):
        while crowd.claims < until:
            await asyncio.sleep(0.02)


async def kill_in_turn(them: Cluster, crowd: Crowd, kills: int, runs: tuple[str, ...]) -> list[float]:
    """Each time a primary dies that serves one of the runs; the longest wait of a worker for each."""
    waits = []
    for number in range(kills):
        slot = slot_of(Keys("n").run(runs[number % len(runs)]))
        victim = await asyncio.to_thread(them.node_of, slot)
        replicas = await asyncio.to_thread(them.replicas_of, victim)
        assert replicas, f"{victim.address} has no replica"
        crowd.longest_s = 0.0
        them.kill(victim)
        await asyncio.to_thread(them.wait_ok)
        await asyncio.to_thread(them.restart, victim)
        await asyncio.to_thread(them.wait_in_sync)
        await more(crowd, MORE_CLAIMS)
        waits.append(crowd.longest_s)
    return waits


async def test_primaries_die_in_turn_and_slots_move_under_load(tmp_path: Path) -> None:
    """A promoted replica has no scripts; a slot on its way answers ASK, MOVED and TRYAGAIN."""
    chance = random.Random(word := seed())
    servers, outside = tmp_path / "servers", tmp_path / "outside"
    servers.mkdir()
    outside.mkdir()
    crowd = Crowd(Oracle(outside), RUNS, chance)
    row = Row("N3", "cluster of 6: primaries killed, slots moved", seed=word)
    with Cluster.start(servers) as them:
        async with daemon(them.url, "n", "--durability", "replicated", "--store-timeout-ms", "1000") as running:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(WORKERS):
                    tasks.create_task(crowd.work(running.url))
                try:
                    await more(crowd, MORE_CLAIMS)
                    kills = scale(KILLS)
                    waits = await kill_in_turn(them, crowd, kills, RUNS)
                    slots = scale(SLOTS_MOVED, least=3 * len(RUNS))
                    crowd.longest_s = 0.0
                    hot = [slot_of(Keys("n").run(run)) for run in RUNS]
                    await asyncio.to_thread(move_slots, them, hot, slots, chance)
                    moved_wait = crowd.longest_s
                finally:
                    crowd.is_over = True
            row.faults, row.claims, row.granted = kills + slots, crowd.claims, crowd.granted
            row.lost, row.killed = await crowd.audit(running.url), 0
            row.doubled, row.in_doubt = len(crowd.oracle.doubled()), await in_doubt(running.url)
    shown = ", ".join(f"{wait:.1f}" for wait in waits)
    row.note = f"longest wait for each kill {shown} s; while slots moved {moved_wait:.1f} s; named errors {dict(crowd.errors) or 'none'}"
    row.write()
    assert crowd.oracle.doubled() == []
    assert row.lost == 0
    assert crowd.wrong() == set()
    assert row.in_doubt == 0
    assert row.granted > 0


def move_slots(them: Cluster, hot: list[int], count: int, chance: random.Random) -> None:
    """The hot slots first and last, each step seen by every node; between them any others, with all keys they hold."""
    for slot in hot:
        source = them.node_of(slot)
        them.migrate_slot(slot, chance.choice([node for node in them.primaries if node is not source]))
    primaries = them.primaries
    owner = {slot: node for node in primaries for slot in them._own_slots(node)}
    others = [slot for slot in chance.sample(sorted(owner), count) if slot not in hot][: max(0, count - 2 * len(hot))]
    with ExitStack() as stack:
        lines = {node.address: stack.enter_context(node.client()) for node in primaries}
        names = {node.address: them.id_of(node) for node in primaries}
        for slot in others:
            source = owner[slot]
            target = chance.choice([node for node in primaries if node is not source])
            near, far = lines[source.address], lines[target.address]
            far.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[source.address])
            near.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[target.address])
            while keys := near.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                near.execute_command("MIGRATE", target.host, target.port, "", 0, 5000, "KEYS", *keys)
            for line in (far, near, *(each for each in lines.values() if each not in (far, near))):
                line.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[target.address])
    them.wait_ok()
    for slot in hot:
        source = them.node_of(slot)
        them.migrate_slot(slot, chance.choice([node for node in them.primaries if node is not source]))
