"""F5: one request in twenty is lost, and one reply in twenty (RELIABILITY: lost request / lost reply proxy).

The client's own resend repairs it: steps are counted exactly, no effect runs
twice, and what all callers were answered is explained by some order of the calls.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from guardd_client import AsyncGuard
from guardd_client.aio import AsyncRun, new_id

from tests.daemons import daemon
from tests.fault.linearizability import Op, capped_counter, claim_register, unexplained
from tests.fault.oracle import TOOL, Journal, exact, verdict
from tests.fault.proxy import LossyProxy
from tests.fault.rows import Row, scale
from tests.fault.storm import drawn_seed, short_folder
from tests.fault.worker import DEADLINE_MS, limits, value_of
from tests.servers import Server

LOST = 0.05
ASKS, CAP, CALLERS = 200, 180, 8
"""Of each counted run: steps that are asked for, steps that are allowed, callers at once."""
KEY_CALLERS, GROUPS = 4, 4
POLL_S = 0.005
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


@dataclass
class Callers:
    """Callers of one guard and all that they were answered."""

    url: str
    journal: Journal
    steps: list[Op] = field(default_factory=list)
    claims: list[Op] = field(default_factory=list)
    busy: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    """By key: callers that ask for it or hold it now, and how many ever began to."""

    def guard(self) -> AsyncGuard:
        """A connection of its own: one request at a time, so that each message is lost by itself."""
        return AsyncGuard(self.url, deadline_ms=DEADLINE_MS)

    async def count(self, name: str, first: int) -> None:
        """One caller's share of the steps of a run."""
        async with self.guard() as guard:
            run = guard.run(name, limits=limits(30_000) | {"max_steps": CAP})
            await run.open()
            for number in range(first, ASKS, CALLERS):
                called, sent = time.monotonic(), guard.connection._next_id
                answer = await run.before("count", {"number": number})
                said = ("execute", answer["step"]) if answer.action == "execute" else answer.action
                self.steps.append(Op(called, time.monotonic(), "step", said, key=name))
                if said == "stop" and guard.connection._next_id > sent + 1:
                    # It may have been admitted, the answer lost, and the run at its end when it asked again:
                    # then the answer is stop, although its step was counted (SPEC 2.2, call ids).
                    self.steps.append(Op(called, None, "step", None, key=name))

    async def claim(self, name: str, keys: list[str]) -> None:
        """One caller asks for each key until it is committed."""
        async with self.guard() as guard:
            run = guard.run(name, limits=limits(30_000))
            await run.open()
            for key in keys:
                while await self._claim_once(run, key) == "in_flight":
                    await asyncio.sleep(POLL_S)

    async def _claim_once(self, run: AsyncRun, key: str) -> str:
        call, called = new_id(), time.monotonic()
        self.busy[key] += 1
        self.begun[key] += 1
        is_alone, begun = self.busy[key] == 1, self.begun[key]
        answer = await run.before(TOOL, {"key": key}, idempotency_key=key, call=call)
        said = ("replay", exact(answer.value)) if answer.action == "replay" else answer.reason or answer.action
        self.claims.append(Op(called, time.monotonic(), ("claim", call), said, key=key))
        if answer.action == "execute":
            self.journal.effect(key, call)
            value, called = value_of(key, call), time.monotonic()
            late = (await run.after(call, "progress", value=value)).claim
            committed = ("commit", call, exact(value))
            self.claims.append(Op(called, time.monotonic(), committed, late or "held", key=key))
            self.journal.acked(key, call, value)
        self.busy[key] -= 1
        is_alone = is_alone and begun == self.begun[key]
        assert not (is_alone and said == "in_flight"), f"{key} is in flight, and nobody holds it"
        return answer.reason


async def storm(callers: Callers, prefix: str, direct: str, *, runs: int, keys_count: int, row: Row) -> None:
    """Counts the steps of `runs` runs and claims all keys, then compares everything."""
    counted = [f"{prefix}-c{number}" for number in range(runs)]
    keys = {f"k{number}": f"{prefix}-e{number % GROUPS}" for number in range(keys_count)}

    async def count_all(names: list[str]) -> None:
        for name in names:
            await asyncio.gather(*(callers.count(name, first) for first in range(CALLERS)))

    of_group = [[key for key, run in keys.items() if run == f"{prefix}-e{group}"] for group in range(GROUPS)]
    async with asyncio.TaskGroup() as tasks:
        for group in range(2):
            tasks.create_task(count_all(counted[group::2]))
        for group in [*range(GROUPS)] * KEY_CALLERS:
            tasks.create_task(callers.claim(f"{prefix}-e{group}", of_group[group]))
    async with AsyncGuard(direct, deadline_ms=DEADLINE_MS) as guard:
        found = await verdict(guard, callers.journal, keys)
        stored = [(await guard.call("inspect", {"run": name}))["counters"]["steps"] for name in counted]
    asked = [op for op in callers.steps if op.returned is not None]
    granted = sum(op.output != "stop" for op in asked)
    row.claims = len(asked) + sum(op.input[0] == "claim" for op in callers.claims)
    row.granted = found.granted + sum(stored)
    row.doubled, row.lost, row.in_doubt = len(found.doubled), len(found.lost), len(found.in_doubt)
    found.check(killed=0)
    assert len(found.committed) == found.effects == keys_count
    assert stored == [CAP] * runs
    assert granted <= CAP * runs <= granted + len(callers.steps) - len(asked)
    assert len(asked) == ASKS * runs
    assert unexplained(capped_counter(CAP), callers.steps) == []
    assert unexplained(claim_register(), callers.claims) == []


async def test_requests_and_replies_lost_before_the_daemon_change_no_count(prefix: str, tmp_path: Path) -> None:
    """Between clients and daemon."""
    seed, runs, keys_count = drawn_seed(), scale(25, 2), scale(1250)
    with Server.start(tmp_path, *ALWAYS) as server:
        async with daemon(server.url, prefix) as served:
            socket = Path(served.url.removeprefix("unix:"))
            async with LossyProxy(socket, random.Random(seed)) as proxy:
                proxy.lose(LOST, LOST)
                callers = Callers(f"unix:{proxy.path}", Journal(short_folder(served)))
                row = Row("F5", "requests and replies lost between client and daemon", seed=str(seed))
                await storm(callers, prefix, served.url, runs=runs, keys_count=keys_count, row=row)
            finish(row, proxy, callers)


async def test_requests_and_replies_lost_before_the_store_change_no_count(prefix: str, tmp_path: Path) -> None:
    """Between daemon and store: whole batches of many callers are lost."""
    seed, runs, keys_count = drawn_seed(), scale(5, 2), scale(300)
    with Server.start(tmp_path, *ALWAYS) as server:
        async with (
            LossyProxy(server.socket, random.Random(seed)) as proxy,
            daemon(f"unix://{proxy.path}", prefix) as served,
        ):
            proxy.lose(LOST, LOST)
            callers = Callers(served.url, Journal(short_folder(served)))
            row = Row("F5", "requests and replies lost between daemon and store", seed=str(seed))
            await storm(callers, prefix, served.url, runs=runs, keys_count=keys_count, row=row)
            proxy.lose(0, 0)
            finish(row, proxy, callers)


def finish(row: Row, proxy: LossyProxy, callers: Callers) -> None:
    """Writes the row; a storm without faults proves nothing."""
    row.faults = proxy.faults
    row.note = (
        f"{proxy.requests_lost} requests, {proxy.replies_lost} replies; "
        f"{len(callers.steps) + len(callers.claims)} operations linearizable"
    )
    row.write()
    assert proxy.requests_lost > 0 and proxy.replies_lost > 0
    callers.journal.close()
