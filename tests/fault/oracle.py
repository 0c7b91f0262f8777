"""What really happened, counted where the store cannot reach it.

Workers append a line to a file for each effect, and to another for each commit
that was acknowledged to them. Afterwards three sources are compared: the
effects, the acknowledgements, and what the guard says of every key.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard

TOOL = "pay"
AT_ONCE = 64
"""Questions of the verdict that are under way at once."""
LEDGER_MAX = 1000


def exact(value: Any) -> str:
    """A value as the text that is compared."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True)


class Journal:
    """Three files of one line an entry, which any number of processes append to.

    One write(2) with O_APPEND a line: what was written stays when its writer is killed, and no two lines mix.
    """

    NAMES = ("effects", "acked", "freed")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._files = {name: os.open(self._path(name), flags, 0o600) for name in self.NAMES}

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _append(self, name: str, *fields: object) -> None:
        line = json.dumps(fields).encode() + b"\n"
        assert os.write(self._files[name], line) == len(line)

    def effect(self, key: str, call: str) -> None:
        """The effect itself: it cannot be taken back."""
        self._append("effects", key, call, os.getpid())

    def acked(self, key: str, call: str, value: Any) -> None:
        """The guard has acknowledged this result."""
        self._append("acked", key, call, exact(value))

    def freed(self, key: str, call: str) -> None:
        """The guard has acknowledged that nothing was executed."""
        self._append("freed", key, call)

    def read(self, name: str) -> list[list[Any]]:
        """All lines of one file, oldest first."""
        return [json.loads(line) for line in self._path(name).read_bytes().splitlines()]

    def count(self, name: str) -> int:
        """How many lines a file has."""
        return self._path(name).read_bytes().count(b"\n")

    def close(self) -> None:
        """Closes the files of this process."""
        for file in self._files.values():
            os.close(file)


@dataclass
class Verdict:
    """The comparison of the three sources.

    granted:   admitted calls, as the runs count their steps.
    committed: keys that replay. freed: releases that were acknowledged.
    in_doubt:  keys that the guard neither replays nor grants. doubled, lost, astray: keys that break a promise;
               astray: the guard's answer to the key, or the ledger's list, fits nothing that may have happened.
    """

    granted: int = 0
    effects: int = 0
    committed: list[str] = field(default_factory=list)
    freed: int = 0
    in_doubt: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)

    def check(self, *, killed: int) -> None:
        """The promises. killed: workers that died, each of which may leave one effect in doubt."""
        assert not self.doubled, f"effects that ran twice: {self.doubled[:5]}"
        assert not self.lost, f"acknowledged results that are gone or others: {self.lost[:5]}"
        assert not self.astray, f"keys whose state fits nothing that happened: {self.astray[:5]}"
        assert len(self.in_doubt) <= killed, f"{len(self.in_doubt)} in doubt, {killed} killed: {self.in_doubt[:5]}"
        ended = len(self.committed) + self.freed + len(self.in_doubt)
        assert self.granted == ended, (
            f"{self.granted} granted, but {len(self.committed)} committed, {self.freed} freed, "
            f"{len(self.in_doubt)} in doubt"
        )


async def verdict(guard: AsyncGuard, journal: Journal, keys: dict[str, str], *, fresh: Iterable[str] = ()) -> Verdict:
    """Compares effects, acknowledgements and the guard.

    Args:
        keys:  every key of the test, and its run. Each is asked for once more.
        fresh: those whose question may never have arrived: without an effect they may be granted.
    The leases of dead workers must be over.
    """
    effects = Counter(key for key, *_ in journal.read("effects"))
    acked: dict[str, set[str]] = {}
    for key, _, value in journal.read("acked"):
        acked.setdefault(key, set()).add(value)
    result = Verdict(effects=sum(effects.values()), freed=journal.count("freed"))
    runs = {run: guard.run(run) for run in sorted(set(keys.values()))}
    for run in runs.values():
        result.granted += (await run.inspect())["counters"]["steps"]
    may_be_fresh = set(fresh)
    gate = asyncio.Semaphore(AT_ONCE)

    async def look(key: str) -> None:
        async with gate:
            answer = await runs[keys[key]].before(TOOL, {"key": key}, idempotency_key=key)
            if answer.action == "execute" and not effects[key] and key in may_be_fresh:
                await runs[keys[key]].after(answer["call"], "retryable", side_effect_committed=False)
                return
        said = (answer.action, answer.reason)
        stored = exact(answer.value) if answer.action == "replay" else None
        if answer.action == "replay":
            result.committed.append(key)
        if effects[key] > 1 or (answer.action == "execute" and effects[key]):
            result.doubled.append(key)
        if key in acked and acked[key] != {stored}:
            result.lost.append(key)
        if said == ("deny", "in_doubt"):
            result.in_doubt.append(key)
        elif answer.action != "replay" or not effects[key]:
            result.astray.append(f"{key}: {answer.action} {answer.reason}, {effects[key]} effects")

    await asyncio.gather(*(look(key) for key in sorted(keys)))
    listed = await listed_in_doubt(guard)
    result.astray += [f"{key}: not in the ledger's list" for key in result.in_doubt if key not in listed]
    result.astray += [f"{key}: listed as in doubt" for key in sorted(listed & set(keys) - set(result.in_doubt))]
    return result


async def listed_in_doubt(guard: AsyncGuard) -> set[str]:
    """The keys that the ledger lists as in doubt."""
    listed = await guard.call("ledger", {"in_doubt": True, "limit": LEDGER_MAX})
    return {operation["key"] for operation in listed}
