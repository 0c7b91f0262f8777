"""F2: the store is killed again and again while workers claim and commit (RELIABILITY: server kill -9 storm)."""

from __future__ import annotations

import os
import signal
import time

import redis
from guardd_client import AsyncGuard

from tests.daemons import DaemonProcess, daemon
from tests.fault.oracle import Journal, verdict
from tests.fault.rows import Row, scale
from tests.fault.storm import Recovery, Worker, drawn_seed, short_folder, until
from tests.fault.worker import DEADLINE_MS, Plan, limits, work

RUNS = 20


async def test_a_store_that_is_killed_in_a_storm_of_claims_forgets_nothing(prefix: str) -> None:
    """Embedded store, AOF always: no effect twice, no acknowledged result lost, and the guard serves again each time."""
    seed, kills, keys_count = drawn_seed(), scale(25, 3), scale(10_000)
    async with daemon("embedded:", prefix) as served:
        journal = Journal(short_folder(served))
        keys = {f"k{number}": f"{prefix}-{number % RUNS}" for number in range(keys_count)}
        plan = Plan(served.url, journal.folder, tuple(keys.items()), seed, tasks=32, free_share=0.02)
        workers = [Worker.start(work, plan), Worker.start(work, Plan(**{**vars(plan), "seed": seed + 1}))]
        recovery, pids = Recovery(), []
        async with AsyncGuard(served.url, deadline_ms=DEADLINE_MS) as guard:
            probe = guard.run(f"{prefix}-probe", limits=limits(30_000))
            for number in range(kills):
                due = keys_count * (number + 1) // (kills + 1)
                await until(lambda due=due: journal.count("effects") >= due, f"{due} effects")
                pids.append(kill_store(served))
                began = time.monotonic()
                assert (await probe.before("look", {"number": number})).action == "execute"
                recovery.times_ms.append((time.monotonic() - began) * 1000)
            told = [await worker.heard() for worker in workers]
            for worker in workers:
                await worker.end()
            found = await verdict(guard, journal, keys)
        assert len(set(pids)) == kills
        claims = sum(each["claims"] for each in told)
        Row(
            "F2", "server kill -9 storm, embedded, fsync always", faults=kills, claims=claims, granted=found.granted,
            doubled=len(found.doubled), lost=len(found.lost), in_doubt=len(found.in_doubt), seed=str(seed), note=recovery.note(),
        ).write()  # fmt: skip
        found.check(killed=0)
        assert len(found.committed) == found.effects == keys_count
        assert claims >= 2 * keys_count
        journal.close()


def kill_store(served: DaemonProcess) -> int:
    """SIGKILL to the embedded server; returns the process id it had."""
    with redis.Redis(unix_socket_path=str(served.folder / "state" / "store" / "store.sock")) as client:
        pid = int(client.info("server")["process_id"])
    os.kill(pid, signal.SIGKILL)
    return pid
