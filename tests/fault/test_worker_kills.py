"""F3: workers are killed in the middle of effects (RELIABILITY: worker kill -9 storm)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from guardd_client import AsyncGuard

from tests.daemons import daemon
from tests.fault.oracle import Journal, listed_in_doubt, verdict
from tests.fault.rows import Row, scale
from tests.fault.storm import Worker, drawn_seed, short_folder
from tests.fault.worker import DEADLINE_MS, POINTS, Plan, halt, work
from tests.servers import Server

RUNS, LANES, HOT_KEYS = 4, 4, 3
LEASE_MS = 300
LISTED_WITHIN_S = 1.0
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


async def test_workers_that_are_killed_in_mid_effect_leave_at_most_that_effect_in_doubt(
    prefix: str, tmp_path: Path
) -> None:
    """No effect twice although everybody asks again; what is in doubt is listed once its lease is over."""
    seed, kills = drawn_seed(), scale(100, 8)
    chance = random.Random(seed)
    points = [POINTS[number % len(POINTS)] for number in range(kills)]
    chance.shuffle(points)
    with Server.start(tmp_path, *ALWAYS) as server:
        async with daemon(server.url, prefix) as served:
            journal = Journal(short_folder(served))
            plans = [plan_of(served.url, journal.folder, prefix, number, point) for number, point in enumerate(points)]
            waiting = iter(plans)
            async with AsyncGuard(served.url, deadline_ms=DEADLINE_MS) as guard:
                watch = Watch(guard)
                await asyncio.gather(watch.look(deaths=kills), *(lane(waiting, watch.died) for _ in range(LANES)))
                keys = {key: run for plan in plans for key, run in plan.keys}
                again = Worker.start(work, Plan(served.url, journal.folder, tuple(keys.items()), lease_ms=LEASE_MS))
                last = await again.heard()
                await again.end()
                found = await verdict(guard, journal, keys)
            claims = sum(len(plan.keys) for plan in plans) + last["claims"]
            Row(
                "F3", "worker kill -9 in mid-effect", faults=kills, claims=claims, granted=found.granted,
                doubled=len(found.doubled), lost=len(found.lost), in_doubt=len(found.in_doubt), killed=kills, seed=str(seed),
                note=f"lease {LEASE_MS} ms, listed at most {max(watch.lags_ms.values()):.0f} ms after its end",
            ).write()  # fmt: skip
            found.check(killed=kills)
            assert set(found.in_doubt) >= set(watch.sure)
            assert set(found.in_doubt) <= {key for _, key, _ in watch.died}
            journal.close()


def plan_of(url: str, folder: Path, prefix: str, number: int, point: str) -> Plan:
    """A worker that halts at its first grant: of keys that its neighbours ask for too, its own comes last."""
    hot = [f"hot{index}" for index in range(number, number + HOT_KEYS)]
    keys = [(key, f"{prefix}-{int(key[3:]) % RUNS}") for key in hot]
    own = (f"own{number}", f"{prefix}-{number % RUNS}")
    return Plan(url, folder, (*keys, own), lease_ms=LEASE_MS, halts=(point,))


async def lane(waiting: Iterator[Plan], died: list[tuple[str, str, float]]) -> None:
    """One worker after another, each killed where it halts."""
    for plan in waiting:
        worker = Worker.start(halt, plan)
        point, key, _ = await worker.heard()
        worker.kill()
        died.append((point, key, time.monotonic()))


@dataclass
class Watch:
    """Looks at the ledger's list all the while. died: point, key and time of each death."""

    guard: AsyncGuard
    died: list[tuple[str, str, float]] = field(default_factory=list)
    lags_ms: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    @property
    def sure(self) -> dict[str, float]:
        """Keys that are in doubt for certain, and when their workers died: granted, and no report was sent."""
        return {key: at for point, key, at in self.died if point in ("granted", "done")}

    async def look(self, *, deaths: int) -> None:
        """Until all are dead and listed. A look that begins a second after a lease's end must show its effect."""
        while len(self.died) < deaths or len(self.lags_ms) < len(self.sure):
            due = {key: time.monotonic() - at - LEASE_MS / 1000 for key, at in self.sure.items()}
            listed = await listed_in_doubt(self.guard)
            self.missed += [key for key, over_s in due.items() if over_s > LISTED_WITHIN_S and key not in listed]
            for key in listed & set(due) - set(self.lags_ms):
                self.lags_ms[key] = max(0.0, (time.monotonic() - self.sure[key]) * 1000 - LEASE_MS)
            assert not self.missed, f"not in the list: {self.missed[:5]}"
            await asyncio.sleep(0.02)
