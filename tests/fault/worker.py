"""What the worker processes of a storm do. They know the guard, the journal, and no other oracle."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard
from guardd_client.aio import AsyncRun, new_id

from tests.fault.oracle import TOOL, Journal
from tests.fault.rows import scale

DEADLINE_MS = scale(60_000, 15_000)
POLL_S = 0.005

POINTS = ("asked", "granted", "done", "reported")
"""Where a worker halts: its question is on the way; granted, no effect yet; effect, no report yet; report on the way."""


@dataclass(frozen=True)
class Plan:
    """One worker process.

    keys:       in the order they are asked for, each with its run.
    tasks:      how many are asked for at once. free_share: of the grants that are given back unexecuted.
    lease_ms:   of a claim.
    halts:      points at which it halts, in turn: at the first grants it gets, one each.
    """

    url: str
    folder: Path
    keys: tuple[tuple[str, str], ...]
    seed: int = 0
    tasks: int = 1
    free_share: float = 0.0
    lease_ms: int = 30_000
    halts: tuple[str, ...] = ()


def limits(lease_ms: int) -> dict[str, Any]:
    """Only the ledger refuses: no cap, no loop rule."""
    unlimited = ("max_steps", "max_wall_ms", "max_same_call", "max_no_progress", "max_denied", "max_replays")
    return {**dict.fromkeys(unlimited), "claim_lease_ms": lease_ms}


def value_of(key: str, call: str) -> dict[str, Any]:
    """The result of an effect; no other call has the same."""
    return {"key": key, "by": call, "text": "é\u2028\"'\n", "list": [1, 2.5, None, True, {}], "big": 2**53 - 1}


# ---- A worker that works -------------------------------------------------------


def work(plan: Plan, tell: Connection) -> None:
    """Asks for every key until it is finished; sends {"claims", "granted"} and ends."""
    tell.send(asyncio.run(_work(plan)))


async def _work(plan: Plan) -> dict[str, int]:
    chance, journal = random.Random(plan.seed), Journal(plan.folder)
    counts = {"claims": 0, "granted": 0}
    waiting = deque(plan.keys)
    async with AsyncGuard(plan.url, deadline_ms=DEADLINE_MS) as guard:
        runs = {run: guard.run(run, limits=limits(plan.lease_ms)) for _, run in plan.keys}

        async def turns() -> None:
            while waiting:
                key, run = waiting.popleft()
                counts["claims"] += 1
                answer = await runs[run].before(TOOL, {"key": key}, idempotency_key=key)
                if answer.action == "execute":
                    counts["granted"] += 1
                    if chance.random() < plan.free_share:
                        await runs[run].after(answer["call"], "retryable", side_effect_committed=False)
                        journal.freed(key, answer["call"])
                        waiting.append((key, run))
                    else:
                        await execute(runs[run], journal, key, answer["call"])
                elif answer.reason == "in_flight":
                    waiting.append((key, run))
                    await asyncio.sleep(POLL_S)
                else:
                    assert answer.action == "replay" or answer.reason == "in_doubt", dict(answer)

        await asyncio.gather(*(turns() for _ in range(plan.tasks)))
    journal.close()
    return counts


async def execute(run: AsyncRun, journal: Journal, key: str, call: str) -> str:
    """The effect, its report, and the note that it was acknowledged. Returns the claim that the answer names."""
    journal.effect(key, call)
    value = value_of(key, call)
    answer = await run.after(call, "progress", value=value)
    if answer.claim != "stale":
        journal.acked(key, call, value)
    return answer.claim


# ---- A worker that halts in the middle of an effect ------------------------------


def halt(plan: Plan, tell: Connection) -> None:
    """Works alone; at each of `plan.halts` it sends (point, key, call) and goes on when it is told to.

    Told "ask": it renews its claim before it executes, and executes nothing when the guard says stale.
    After each halt it sends {"claim", "renewed"}, at the end {"claims"}.
    """
    asyncio.run(_halt(plan, tell))


async def _halt(plan: Plan, tell: Connection) -> None:
    journal, halts, claims = Journal(plan.folder), deque(plan.halts), 0
    async with AsyncGuard(plan.url, deadline_ms=DEADLINE_MS) as guard:
        runs = {name: guard.run(name, limits=limits(plan.lease_ms)) for _, name in plan.keys}
        for run in runs.values():
            await run.open()
        for key, name in plan.keys:
            run, call, claims = runs[name], new_id(), claims + 1
            asked = asyncio.create_task(run.before(TOOL, {"key": key}, idempotency_key=key, call=call))
            if halts and halts[0] == "asked":
                await asyncio.sleep(0)  # now the question is on the socket
                tell.send((halts.popleft(), key, call))
                tell.recv()
            if (await asked).action != "execute":
                continue
            if halts:
                tell.send(await _halted(run, journal, key, call, halts.popleft(), tell))
            else:
                await execute(run, journal, key, call)
    tell.send({"claims": claims})
    journal.close()


async def _halted(run: AsyncRun, journal: Journal, key: str, call: str, point: str, tell: Connection) -> dict[str, Any]:
    renewed, value = "", value_of(key, call)
    if point == "granted":
        tell.send((point, key, call))
        if tell.recv() == "ask":
            renewed = (await run.renew(call)).claim
            if renewed == "stale":
                late = await run.after(call, "retryable", side_effect_committed=False)
                return {"claim": late.claim, "renewed": renewed}
    journal.effect(key, call)
    if point == "done":
        tell.send((point, key, call))
        tell.recv()
    reporting = asyncio.create_task(run.after(call, "progress", value=value))
    if point == "reported":
        await asyncio.sleep(0)  # now the report is on the socket
        tell.send((point, key, call))
        tell.recv()
    answer = await reporting
    if answer.claim != "stale":
        journal.acked(key, call, value)
    return {"claim": answer.claim, "renewed": renewed}
