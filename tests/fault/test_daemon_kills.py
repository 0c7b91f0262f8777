"""F7: the daemon is killed with its clients attached (RELIABILITY: daemon kill -9)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from guardd_client import AsyncGuard

from tests.daemons import daemon
from tests.fault.oracle import Journal, verdict
from tests.fault.rows import Row, scale
from tests.fault.storm import Recovery, Worker, drawn_seed, short_folder, until
from tests.fault.worker import DEADLINE_MS, Plan, work
from tests.servers import Server

RUNS = 8
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.mark.parametrize("store", ["embedded", "standalone"])
async def test_clients_of_a_killed_daemon_go_on_under_the_same_ids(store: str, prefix: str, tmp_path: Path) -> None:
    """No effect runs twice, none is left undone and in doubt, nothing acknowledged is lost.

    Nothing may stay in doubt, for no worker died: an owner whose grant was lost on the way gets it again.
    """
    if store == "embedded":
        await storm("embedded:", prefix, store)
        return
    with Server.start(tmp_path, *ALWAYS) as server:
        await storm(server.url, prefix, store)


async def storm(url: str, prefix: str, store: str) -> None:
    """Ten kills of a daemon over this store; two processes of 16 callers each."""
    seed, kills, keys_count = drawn_seed(), scale(10, 3), scale(2000)
    async with daemon(url, prefix) as served:
        journal = Journal(short_folder(served))
        keys = {f"k{number}": f"{prefix}-{number % RUNS}" for number in range(keys_count)}
        plan = Plan(served.url, journal.folder, tuple(keys.items()), seed, tasks=16, free_share=0.02)
        workers = [Worker.start(work, plan), Worker.start(work, Plan(**{**vars(plan), "seed": seed + 1}))]
        recovery = Recovery()
        for number in range(kills):
            due = keys_count * (number + 1) // (kills + 1)
            await until(lambda due=due: journal.count("effects") >= due, f"{due} effects")
            began = time.monotonic()
            await served.kill()
            await served.restart()
            recovery.times_ms.append((time.monotonic() - began) * 1000)
        told = [await worker.heard() for worker in workers]
        for worker in workers:
            await worker.end()
        async with AsyncGuard(served.url, deadline_ms=DEADLINE_MS) as guard:
            found = await verdict(guard, journal, keys)
        Row(
            "F7", f"daemon kill -9 with clients attached, {store} store", faults=kills, claims=sum(each["claims"] for each in told),
            granted=found.granted, doubled=len(found.doubled), lost=len(found.lost), in_doubt=len(found.in_doubt), seed=str(seed),
            note=recovery.note(),
        ).write()  # fmt: skip
        found.check(killed=0)
        assert len(found.committed) == found.effects == keys_count
        journal.close()
