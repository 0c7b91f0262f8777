"""F11: a wall clock jumps, the store's or the daemon's. No finished effect is given out again, no pending one by itself."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from guardd_client import AsyncGuard
from guardd_client.aio import AsyncRun

from tests.daemons import DaemonProcess, daemon
from tests.fault.machines import Clock
from tests.fault.rows import Row, scale
from tests.servers import Server

EFFECTS = 200
DAY_S = 86_400
JUMPS_S = {"+2 d": 2 * DAY_S, "-1 d": -DAY_S, "+31 s": 31}
FREE = {"max_steps": None, "max_wall_ms": None, "max_no_progress": None, "max_denied": None, "max_replays": None}


def scope_of(number: int) -> str:
    """Every second effect is a global one."""
    return "global" if number % 2 else "run"


async def claim(run: AsyncRun, kind: str, number: int) -> tuple[str, str, str]:
    """(action, reason, call) of one attempt at the effect."""
    key = f"{kind}{number}"
    answer = await run.before("pay", {"key": key}, idempotency_key=key, scope=scope_of(number))
    said = str(answer.value) if answer.action == "replay" else answer.reason or ""
    return answer.action, said, answer["call"]


async def commit(run: AsyncRun, call: str, value: str) -> str:
    """The action that answers a result."""
    said = await run.after(call, "progress", value=value, side_effect_committed=True)
    return str(said.action)


async def shown_by(whose: str, server: Server, running: DaemonProcess, offset_s: int) -> float:
    """The time by the clock of the store, or by the daemon's: it stands in its index of runs."""
    if whose == "store":
        return float(server.client().time()[0])
    async with AsyncGuard(running.url) as guard:
        await guard.run(f"probe{offset_s}").open()
    shown_ms = server.client().zscore("f11:runs", f"probe{offset_s}")
    assert shown_ms is not None
    return float(shown_ms) / 1000


@pytest.mark.parametrize("whose", ["store", "daemon"])
@pytest.mark.parametrize("jump", JUMPS_S)
async def test_a_clock_that_jumps_gives_nothing_out_twice(whose: str, jump: str, tmp_path: Path) -> None:
    """There and back again; asked by another client each time. The owner's late result still counts."""
    count = scale(EFFECTS, 20)
    clock = Clock.make(tmp_path)
    with (
        tempfile.TemporaryDirectory(prefix="gd-store-") as folder,
        Server.start(Path(folder), env=clock.env if whose == "store" else None) as server,
    ):
        async with (
            daemon(server.url, "f11", env=clock.env if whose == "daemon" else None) as running,
            AsyncGuard(running.url) as owner,
        ):
            mine, calls = owner.run("r", limits=FREE), {}
            for kind in ("done", "open"):
                for number in range(count):
                    action, _, calls[f"{kind}{number}"] = await claim(mine, kind, number)
                    assert action == "execute"
            for number in range(count):
                assert await commit(mine, calls[f"done{number}"], f"v{number}") == "continue"
            said: dict[str, Counter[tuple[str, str]]] = {"done": Counter(), "open": Counter()}
            lost = 0
            for offset_s in (JUMPS_S[jump], 0):
                clock.jump(offset_s)
                seen_s = await shown_by(whose, server, running, offset_s)
                assert abs(seen_s - time.time() - offset_s) < 10, "the shim moved nothing"
                async with AsyncGuard(running.url) as other:
                    theirs = other.run("r", limits=FREE)
                    for number in range(count):
                        action, value, _ = await claim(theirs, "done", number)
                        said["done"][action, ""] += 1
                        lost += action == "replay" and value != f"v{number}"
                        action, reason, _ = await claim(theirs, "open", number)
                        said["open"][action, reason] += 1
            late = Counter([await commit(mine, calls[f"open{number}"], "late") for number in range(count)])
            async with AsyncGuard(running.url) as other:
                theirs = other.run("r", limits=FREE)
                settled = Counter([(await claim(theirs, "open", number))[:2] for number in range(count)])
    regranted = {kind: sum(n for (action, _), n in said[kind].items() if action == "execute") for kind in said}
    Row(
        "F11", f"{whose}'s clock {jump} and back", faults=2, claims=7 * count, granted=2 * count,
        doubled=sum(regranted.values()), lost=lost + said["done"].total() - said["done"]["replay", ""],
        note=f"asked for what was pending: {dict(sorted((f'{a} {r}', n) for (a, r), n in said['open'].items()))}",
    ).write()  # fmt: skip
    assert said["done"] == {("replay", ""): 2 * count}
    assert lost == 0
    assert regranted == {"done": 0, "open": 0}
    assert set(said["open"]) <= {("wait", "in_flight"), ("deny", "in_doubt")}
    if whose == "store" and JUMPS_S[jump] > 0:
        assert said["open"]["deny", "in_doubt"] >= count, "the leases did not end while the clock was ahead"
    assert late == {"continue": count}
    assert settled == {("replay", "late"): count}
