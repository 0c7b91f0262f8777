"""The world outside the store: effects and acknowledged results as lines of files, and workers who compete.

An effect is one O_APPEND line; what the guard acknowledged as committed is a
line of a second file. No store, daemon or worker that dies takes them along.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guardd_client import Answer, AsyncGuard, GuardRequestError, GuardUnavailable
from guardd_client.aio import AsyncRun

TOOL = "pay"
FREE = {
    "max_steps": None, "max_wall_ms": None, "max_same_call": None, "max_no_progress": None, "max_denied": None,
    "max_replays": None,
}  # fmt: skip
"""Limits of a run that only its ledger holds back."""
GLOBAL_EVERY = 3
OLD_EVERY = 5
NEWEST = 6
PATIENCE_S = 180.0
TELL_S, LINE_BYTES = 0.2, 28


def seed() -> str:
    """What repeats a test: GUARDD_FAULT_SEED, or one drawn anew."""
    return os.environ.get("GUARDD_FAULT_SEED") or secrets.token_hex(4)


def append(path: Path, line: str) -> None:
    """One write of one line: whole or not there, whatever becomes of this process."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


@dataclass(frozen=True)
class Oracle:
    """Both files. Keys are `run|key`, of a global effect `*|key`."""

    folder: Path

    @property
    def effects_file(self) -> Path:
        return self.folder / "effects"

    @property
    def acked_file(self) -> Path:
        return self.folder / "acked"

    def do(self, name: str, value: str) -> None:
        """The effect happens."""
        append(self.effects_file, f"{name} {value}")

    def acked(self, name: str, value: str) -> None:
        """The guard acknowledged this result."""
        append(self.acked_file, f"{name} {value}")

    def executed(self) -> list[tuple[str, str]]:
        """(name, value) of every execution."""
        return self._lines(self.effects_file)

    def doubled(self) -> list[str]:
        """Effects that were executed more than once."""
        return [name for name, count in Counter(name for name, _ in self.executed()).items() if count > 1]

    def results(self) -> dict[str, str]:
        """Acknowledged results by name."""
        return dict(self._lines(self.acked_file))

    @staticmethod
    def _lines(path: Path) -> list[tuple[str, str]]:
        if not path.exists():
            return []
        lines = (line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines())
        return [(name, value) for name, _, value in lines]


def is_global(key: str) -> bool:
    """Every third effect is one of all runs."""
    return int(key.removeprefix("k")) % GLOBAL_EVERY == 0


def name_of(run: str, key: str) -> str:
    """An effect as the oracle knows it."""
    return f"{'*' if is_global(key) else run}|{key}"


async def ask(run: AsyncRun, key: str, call: str) -> Answer:
    """One question. Raises what the client raises."""
    scope = "global" if is_global(key) else "run"
    return await run.before(TOOL, {"key": key}, call=call, idempotency_key=key, scope=scope)


@dataclass
class Crowd:
    """Workers of one process who compete for the same effects until told to stop, then end what they are at.

    pace:     grants after which the frontier moves; the more, the more often the same effects are asked for.
    frontier: effects up to about this number are asked for, the newest most often.
    replays:  (name, value) that were answered. errors: what was refused with a named error, by name.
    longest_s: the longest wait for an answer since somebody set it to 0.
    """

    oracle: Oracle
    runs: Sequence[str]
    chance: random.Random
    pace: int = 1
    frontier: int = 1
    claims: int = 0
    granted: int = 0
    unavailable: int = 0
    longest_s: float = 0.0
    is_over: bool = False
    errors: Counter[str] = field(default_factory=Counter)
    replays: set[tuple[str, str]] = field(default_factory=set)

    def pick(self) -> str:
        """A key: one of the newest, now and then an old one."""
        least = 1 if self.chance.randrange(OLD_EVERY) == 0 else max(1, self.frontier - NEWEST)
        return f"k{self.chance.randint(least, self.frontier)}"

    async def work(self, url: str, deadline_ms: int = 1500) -> None:
        """One worker."""
        async with AsyncGuard(url, deadline_ms=deadline_ms) as guard:
            runs = [guard.run(name, limits=FREE) for name in self.runs]
            while not self.is_over:
                await self.attempt(self.chance.choice(runs), self.pick())

    async def attempt(self, run: AsyncRun, key: str) -> str:
        """Asks for an effect, does it when it may, reports it; returns the action, "error" for a named error."""
        call, name = secrets.token_urlsafe(16), name_of(run.run_id, key)
        self.claims += 1
        try:
            answer = await self.until_answered(lambda: ask(run, key, call))
            if answer.action == "replay":
                self.replays.add((name, str(answer.value)))
            if answer.action != "execute":
                return str(answer.action)
            self.granted += 1
            if self.granted % self.pace == 0:
                self.frontier += 1
            value = secrets.token_hex(8)
            self.oracle.do(name, value)
            said = await self.until_answered(
                lambda: run.after(call, "progress", value=value, side_effect_committed=True)
            )
        except GuardRequestError as error:
            self.errors[error.name] += 1
            return "error"
        if said.claim == "stale":
            self.errors["stale"] += 1
        else:
            self.oracle.acked(name, value)
        return "execute"

    async def until_answered(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """What is asked is asked again, under the same ids, until there is an answer."""
        began = time.monotonic()
        while True:
            try:
                answer = await send()
            except GuardUnavailable:
                self.unavailable += 1
                if time.monotonic() - began > PATIENCE_S:
                    raise
                continue
            finally:
                self.longest_s = max(self.longest_s, time.monotonic() - began)
            return answer

    async def tell(self) -> None:
        """Keeps the counts of this process beside the oracle's files, and the frontier that of all processes."""
        while not self.is_over:
            await asyncio.sleep(TELL_S)
            if self.oracle.effects_file.exists():
                self.frontier = max(self.frontier, self.oracle.effects_file.stat().st_size // (LINE_BYTES * self.pace))
            self._write_counts()
        self._write_counts(len(self.wrong()))

    def _write_counts(self, wrong: int = 0) -> None:
        counts = {"claims": self.claims, "granted": self.granted, "wrong": wrong, "errors": self.errors}
        scratch = self.oracle.folder / f".{os.getpid()}"
        scratch.write_text(json.dumps(counts), encoding="utf-8")
        scratch.replace(self.oracle.folder / f"counts-{os.getpid()}")

    def wrong(self) -> set[tuple[str, str]]:
        """Replays of a result that no execution had."""
        return self.replays - set(self.oracle.executed())

    async def audit(self, url: str, most: int | None = None) -> int:
        """Another client asks for every acknowledged effect, or for so many: how many are not there with the same bytes."""
        lost = 0
        results = self.oracle.results()

        async def look(guard: AsyncGuard, names: list[str]) -> None:
            nonlocal lost
            for name in names:
                owner, _, key = name.partition("|")
                run = guard.run(self.runs[0] if owner == "*" else owner, limits=FREE)
                answer = await self.until_answered(lambda run=run, key=key: ask(run, key, secrets.token_urlsafe(16)))  # type: ignore[misc]
                if answer.action == "execute":
                    self.oracle.do(name, "audit")
                lost += (answer.action, answer.value) != ("replay", results[name])

        names = sorted(results)
        if most is not None and most < len(names):
            names = self.chance.sample(names, most)
        async with AsyncGuard(url, deadline_ms=5000) as guard, asyncio.TaskGroup() as tasks:
            for turn in range(8):
                tasks.create_task(look(guard, names[turn::8]))
        return lost


async def in_doubt(url: str) -> int:
    """How many effects are claimed or in doubt now."""
    async with AsyncGuard(url, deadline_ms=5000) as guard:
        return len(await guard.call("ledger", {}))
