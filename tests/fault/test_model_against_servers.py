"""F1: the Lua on both servers against the independent model, while the servers forget their scripts."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from guardd.store.embedded import find_server
from tests.fault.rows import Row, scale
from tests.property.test_walk import Walk
from tests.servers import Server

WALKS, STEPS = 300, 50
ONE_IN = 8
"""Of so many steps, one comes to a server that has just forgotten all scripts."""

BINARIES = {"embedded": find_server()} | {
    name: Path(found) for name in ("redis-server",) if (found := shutil.which(name))
}


class ForgetfulWalk(Walk):
    """A walk on a server that loses its scripts now and then. A step is one operation that both are asked."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(url, seed)
        self.steps = self.flushes = self.granted = 0
        self.real_play, self.pair.play = self.pair.play, self.play  # type: ignore[method-assign]

    def play(self, op: str, **params: Any) -> dict[str, Any]:
        if self.random.randrange(ONE_IN) == 0:
            self.pair.flush_scripts()
            self.flushes += 1
        self.steps += 1
        answer = self.real_play(op, **params)
        self.granted += answer.get("action") == "execute"
        return answer


def walked(url: str, seed: int, row: Row) -> None:
    """One walk; every answer is that of the model, and so is every counter at its end."""
    journey = ForgetfulWalk(url, seed)
    try:
        while journey.steps < STEPS:
            journey.move()
        journey.pair.agree()
    finally:
        journey.pair.close()
    row.faults += journey.flushes
    row.claims += len(journey.requests)
    row.granted += journey.granted


@pytest.mark.parametrize("which", BINARIES)
def test_a_server_that_forgets_its_scripts_answers_like_the_model(which: str) -> None:
    """0 answers differ; the seed of the walk that fails is `first + number`."""
    first, count = secrets.randbelow(10**6), scale(WALKS // len(BINARIES), 10)
    with (
        tempfile.TemporaryDirectory(prefix="gd-store-") as folder,
        Server.start(Path(folder), binary=BINARIES[which]) as server,
    ):
        about = server.client().info("server")
        name = f"{about.get('server_name', 'redis')} {about.get('valkey_version') or about['redis_version']}"
        row = Row(
            "F1", f"model against {name}, scripts flushed", seed=str(first), note=f"{count} walks of {STEPS} steps"
        )
        for number in range(count):
            walked(server.url, first + number, row)
        calls = server.client().info("commandstats")["cmdstat_evalsha"]
    row.note += f", {calls['failed_calls']} scripts had been forgotten"
    row.write()
    assert calls["failed_calls"] >= row.faults // 2, "the flushes were not noticed"
