"""F4: workers are frozen beyond their lease and go on (RELIABILITY: SIGSTOP, then CONT, on hot keys).

What the guard can promise: the key is given to nobody else while nobody knows
what became of it, and an owner that was overtaken by an operator is told so,
when it renews and when it reports. What it cannot: stop a worker that was
frozen between the answer and the effect, that an operator declared
`not_executed`, and that executes without asking again. So a worker that may
have been frozen renews first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard
from guardd_client.aio import AsyncRun

from tests.daemons import daemon
from tests.fault.oracle import TOOL, Journal, verdict
from tests.fault.rows import Row, scale
from tests.fault.storm import Worker, drawn_seed, short_folder
from tests.fault.worker import DEADLINE_MS, Plan, execute, halt, limits
from tests.servers import Server

LANES, RIVALS = 4, 3
LEASE_MS = 300
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")
BY_OPERATOR = {"by": "operator"}
CASES = (
    ("granted", "kept"),
    ("done", "kept"),
    ("done", "committed"),
    ("granted", "not_executed"),
    ("reported", "kept"),
)
"""Where the worker is frozen, and what the operator says meanwhile; kept: nothing."""


@dataclass
class Freezer:
    """One test's freezes."""

    guard: AsyncGuard
    run: AsyncRun
    journal: Journal
    claims: int = 0
    stale: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Answers that late owners got, by key."""

    async def ask(self, key: str) -> Any:
        """A rival asks for the key."""
        self.claims += 1
        return await self.run.before(TOOL, {"key": key}, idempotency_key=key)

    async def rival(self, key: str) -> None:
        """Asks until the lease of the frozen one is over; whatever it is granted, it executes."""
        while (answer := await self.ask(key)).reason == "in_flight":
            await asyncio.sleep(0)
        if answer.action == "execute":
            await execute(self.run, self.journal, key, answer["call"])
        assert answer.action != "deny" or answer.reason == "in_doubt"

    async def freeze_one(self, plan: Plan, point: str, said: str) -> None:
        """Freezes one worker beyond its lease, among rivals."""
        worker = Worker.start(halt, plan)
        _, key, call = await worker.heard()
        await worker.freeze()
        await asyncio.gather(*(self.rival(key) for _ in range(RIVALS)))
        if said == "committed":
            await self.resolve(key, "committed", value=BY_OPERATOR)
            self.journal.acked(key, "operator", BY_OPERATOR)
        overtaker = ""
        if said == "not_executed":
            await self.resolve(key, "not_executed")
            self.journal.freed(key, call)
            answer = await self.ask(key)
            assert answer.action == "execute"
            overtaker = answer["call"]
        worker.tell("ask" if said == "not_executed" else "go")
        worker.thaw()
        told = await worker.heard()
        await worker.heard()
        await worker.end()
        if overtaker:
            # The late owner has been told, and has changed nothing of the claim that followed.
            assert told["renewed"] == "stale"
            assert await execute(self.run, self.journal, key, overtaker) != "stale"
        if said != "kept":
            self.stale[key] = {"told": told["claim"], "call": call}
        else:
            assert told["claim"] != "stale"
        assert (await self.ask(key)).action == "replay"

    async def resolve(self, key: str, state: str, **more: Any) -> None:
        """The operator says what is true."""
        params = {"run": self.run.run_id, "tool": TOOL, "idempotency_key": key, "state": state, "note": "looked"}
        await self.guard.call("resolve", params | more)


async def test_workers_that_were_frozen_beyond_their_lease_cause_no_second_effect(prefix: str, tmp_path: Path) -> None:
    """Hot keys, rivals that execute whatever they are granted; overtaken owners are told stale, their results kept."""
    seed, freezes = drawn_seed(), scale(40, 5)
    cases = [CASES[number % len(CASES)] for number in range(freezes)]
    random.Random(seed).shuffle(cases)
    with Server.start(tmp_path, *ALWAYS) as server:
        async with daemon(server.url, prefix) as served, AsyncGuard(served.url, deadline_ms=DEADLINE_MS) as guard:
            journal, name = Journal(short_folder(served)), f"{prefix}-run"
            run = guard.run(name, limits=limits(LEASE_MS))
            await run.open()
            freezer, numbers = Freezer(guard, run, journal), iter(range(freezes))

            async def lane(numbers: Iterator[int]) -> None:
                for number in numbers:
                    point, said = cases[number]
                    key = ((f"hot{number}", name),)
                    plan = Plan(served.url, journal.folder, key, lease_ms=LEASE_MS, halts=(point,))
                    await freezer.freeze_one(plan, point, said)

            await asyncio.gather(*(lane(numbers) for _ in range(LANES)))
            keys = {f"hot{number}": name for number in range(freezes)}
            found = await verdict(guard, journal, keys)
        Row(
            "F4", "worker SIGSTOP beyond the lease, then SIGCONT", faults=freezes, claims=freezer.claims + freezes,
            granted=found.granted, doubled=len(found.doubled), lost=len(found.lost), in_doubt=len(found.in_doubt), seed=str(seed),
            note=f"{len(freezer.stale)} late owners, each told stale",
        ).write()  # fmt: skip
        found.check(killed=0)
        assert len(found.committed) == found.effects == freezes
        assert len(freezer.stale) == sum(said != "kept" for _, said in cases) > 0
        records = stored_records(server, prefix)
        for key, late in freezer.stale.items():
            assert late["told"] == "stale"
            assert records[key]["late_owner"] == late["call"]
            assert records[key]["late_outcome"] in ("commit", "free")
            if records[key]["late_outcome"] == "commit":
                assert late["call"] in records[key]["late_value"]
        journal.close()


def stored_records(server: Server, prefix: str) -> dict[str, dict[str, str]]:
    """The ledger records as they lie in the store, by effect key."""
    with server.client() as client:
        records = [client.hgetall(name) for name in client.scan_iter(f"{prefix}:*:op:*")]
    return {record["key"]: record for record in records}
