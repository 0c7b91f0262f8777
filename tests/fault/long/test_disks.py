"""N6: disks that are full, logs that are torn or damaged, two daemons on one directory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from guardd_client import AsyncGuard, GuardUnavailable

from tests.daemons import DaemonProcess, daemon
from tests.fault.long.oracle import FREE, Crowd, Oracle, ask, name_of
from tests.fault.rows import Row
from tests.servers import wait_until

DISK_BYTES = 3_000_000
RUN = "disk"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    if os.getuid() != 0:
        pytest.skip("a small file system is mounted by root only")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = shutil.which("mount") or "mount"
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "guardd-small", str(folder)],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no small file system here: {made.stderr.strip()}")
    yield folder
    subprocess.run([shutil.which("umount") or "umount", str(folder)], check=True)


def crowd_in(folder: Path) -> Crowd:
    import random

    outside = folder / "outside"
    outside.mkdir()
    return Crowd(Oracle(outside), [RUN], random.Random(1))


async def fill(crowd: Crowd, running: DaemonProcess, count: int) -> None:
    """So many effects, each acknowledged."""
    async with AsyncGuard(running.url, deadline_ms=5000) as guard:
        run = guard.run(RUN, limits=FREE)
        for _ in range(count):
            assert await crowd.attempt(run, f"k{crowd.frontier}") == "execute"


async def finish(crowd: Crowd, running: DaemonProcess, row: Row) -> None:
    """Everything that was acknowledged is there, nothing ran twice, and the guard goes on."""
    row.lost, row.doubled = await crowd.audit(running.url), len(crowd.oracle.doubled())
    await fill(crowd, running, 3)
    row.claims, row.granted = crowd.claims, crowd.granted
    row.write()
    assert (row.lost, crowd.oracle.doubled(), crowd.wrong()) == (0, [], set())


def events(running: DaemonProcess, name: str) -> list[dict[str, object]]:
    return [event for event in running.log() if event["event"] == name]


async def test_a_full_disk_refuses_and_the_guard_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    """The server ends rather than answer what is not on the disk; it is started again until it can."""
    row, crowd = Row("N6", "full disk", faults=1), crowd_in(tmp_path)
    filler = small_disk / "filler"
    async with daemon(f"embedded:{small_disk / 'store'}", "n") as running:
        await fill(crowd, running, 20)
        filler.write_bytes(b"\0" * (shutil.disk_usage(small_disk).free - 32_768))
        async with AsyncGuard(running.url, deadline_ms=500) as guard:
            run, refused, number = guard.run(RUN, limits=FREE), "", 1000
            while not refused:
                number += 1
                try:
                    answer = await ask(run, f"k{number}", f"full-{number:0>20}")
                    assert answer.action == "execute"
                    value = "x" * 1000
                    crowd.oracle.do(name_of(RUN, f"k{number}"), value)
                    await run.after(answer["call"], "progress", value=value, side_effect_committed=True)
                    crowd.oracle.acked(name_of(RUN, f"k{number}"), value)
                except GuardUnavailable as error:
                    refused = str(error)
            row.claims += number - 1000
        wait_until(lambda: bool(events(running, "store.died")), what="the log event")
        said = " ".join(json.dumps(event) for event in events(running, "store.died"))
        assert f"the disk of {small_disk / 'store'} is full" in said, said
        filler.unlink()
        async with AsyncGuard(running.url, deadline_ms=30_000) as guard:
            await guard.call("runs", {})
        await finish(crowd, running, row)


def log_file(running: DaemonProcess) -> Path:
    """The append-only file that grows."""
    return max(running.folder.rglob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)


async def test_a_torn_end_of_the_log_starts_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    row, crowd = Row("N6", "torn end of the append-only file", faults=1), crowd_in(tmp_path)
    async with daemon("embedded:", "n") as running:
        await fill(crowd, running, 20)
        await running.stop()
        with log_file(running).open("ab") as file:
            file.write(b"*3\r\n$3\r\nSET\r\n$9\r\nunfinis")  # a write that power cut short: nobody was told of it
        await running.restart()
        await finish(crowd, running, row)


async def test_a_damaged_log_is_refused_with_its_name_and_left_as_it_is(tmp_path: Path) -> None:
    row, crowd = Row("N6", "append-only file damaged in its middle", faults=1), crowd_in(tmp_path)
    async with daemon("embedded:", "n") as running:
        await fill(crowd, running, 20)
        await running.stop()
        path = log_file(running)
        whole = path.read_bytes()
        at = whole.index(b"\r\n*", len(whole) // 2) + 2
        damaged = whole[:at] + b"#" + whole[at + 1 :]
        path.write_bytes(damaged)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "guardd.cli.main", "serve", "--listen", running.url, "--store", "embedded:", "--prefix", "n",
            "--state-dir", str(running.folder / "state"), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        assert process.returncode != 0
        assert path.name in said.decode(), said.decode()
        assert "copy" in said.decode()
        assert "check-aof" in said.decode()
        assert path.read_bytes() == damaged
        path.write_bytes(whole)  # as from a copy
        await running.restart()
        await finish(crowd, running, row)


async def test_a_second_daemon_on_one_directory_is_refused(tmp_path: Path) -> None:
    row, crowd = Row("N6", "two daemons on one directory", faults=1), crowd_in(tmp_path)
    async with daemon("embedded:", "n") as running:
        await fill(crowd, running, 5)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "guardd.cli.main", "serve", "--listen", f"unix:{running.folder / 'second.sock'}",
            "--store", "embedded:", "--state-dir", str(running.folder / "state"), stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await process.communicate()
        assert process.returncode != 0
        assert f"another guardd (pid {running.process.pid})" in said.decode()
        await finish(crowd, running, row)
