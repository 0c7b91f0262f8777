"""N5: older revisions of this repository serve the same store beside this one; no effect runs twice."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path

import pytest

from tests.daemons import DaemonProcess, daemon
from tests.fault.long.oracle import Crowd, Oracle, in_doubt, seed
from tests.fault.rows import Row, scale
from tests.servers import Server

ROOT = Path(__file__).parents[3]
REVISIONS = ("11f4812", "e4fcd76", "HEAD~1")
"""The first daemon, one between, and the one before this."""
WORKERS_EACH, CLAIMS, CHANGES = 2, 4000, 9
RUNS = ("rolled-1", "rolled-2", "rolled-3")


def git(*words: str) -> bytes:
    """A git command in this repository; skips the test where there is none."""
    command = shutil.which("git")
    if command is None:
        pytest.skip("no git on PATH")
    done = subprocess.run([command, "-C", str(ROOT), *words], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no history here: {done.stderr.decode().strip()}")
    return done.stdout


def tree(revision: str, folder: Path) -> Path:
    """The files of a revision."""
    target = folder / revision.replace("~", "-")
    with tarfile.open(fileobj=BytesIO(git("archive", revision, "guardd", "lua", "clients"))) as packed:
        packed.extractall(target, filter="data")
    return target


def of_tree(folder: Path) -> tuple[str, ...]:
    """Words before a command that make it import guardd from there."""
    client = folder / "clients" / "python"
    return (shutil.which("env") or "env", "-C", str(folder), f"PYTHONPATH={folder}:{client}")


def running_from(running: DaemonProcess) -> Path:
    """The folder that a daemon's code stands in."""
    return Path(f"/proc/{running.process.pid}/cwd").readlink()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "s"
    folder.mkdir()
    with Server.start(folder, "--appendonly", "yes", "--appendfsync", "always") as made:
        yield made


async def test_old_and_new_serve_one_store_and_are_rolled_under_load(server: Server, tmp_path: Path) -> None:
    """A claim of one revision is another's to wait for, to replay and to settle.

    Daemons change their revision, forth and back, while workers are in the middle of their effects: what was
    granted by one is reported to another.
    """
    trees = [ROOT, *(tree(revision, tmp_path) for revision in REVISIONS)]
    (tmp_path / "outside").mkdir()
    chance = random.Random(word := seed())
    crowd = Crowd(Oracle(tmp_path / "outside"), RUNS, chance)
    row = Row("N5", f"rolling upgrade: {', '.join(REVISIONS)} and this", seed=word)
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(daemon(server.url, "n", where=of_tree(folder))) for folder in trees]
        async with asyncio.TaskGroup() as tasks:
            for each in daemons * WORKERS_EACH:
                tasks.create_task(crowd.work(each.url))
            try:
                claims, changes = scale(CLAIMS), scale(CHANGES)
                for number in range(1, changes + 1):
                    async with asyncio.timeout(120):
                        while crowd.claims < claims * number // (changes + 1):
                            await asyncio.sleep(0.02)
                    changed = daemons[number % len(daemons)]
                    now = trees.index(running_from(changed))
                    changed.where = of_tree(trees[(now + chance.randrange(1, len(trees))) % len(trees)])
                    await (changed.kill() if number % 2 else changed.stop())
                    await changed.restart()
                    row.faults += 1
                async with asyncio.timeout(120):
                    while crowd.claims < claims:
                        await asyncio.sleep(0.02)
            finally:
                crowd.is_over = True
        lost = [await crowd.audit(each.url) for each in daemons]
        row.in_doubt = await in_doubt(daemons[0].url)
    row.claims, row.granted, row.lost = crowd.claims, crowd.granted, sum(lost)
    row.doubled = len(crowd.oracle.doubled())
    row.note = f"named errors {dict(crowd.errors) or 'none'}; results asked for again from all {len(daemons)} daemons"
    row.write()
    assert crowd.oracle.doubled() == []
    assert row.lost == 0
    assert crowd.wrong() == set()
    assert row.in_doubt == 0
    assert row.granted > 0
