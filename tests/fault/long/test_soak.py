"""N4: everything at once, for GUARDD_SOAK_S seconds (900): the embedded store under a real daemon with fsync.

Processes of workers compete for the same effects. Server, daemon and worker
processes are killed, some are frozen beyond their lease, and the connections
of some are cut in the middle of a request or a reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import redis

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.store.fake import FakeStore
from tests.daemons import DaemonProcess, daemon
from tests.fault.long.oracle import TOOL, Crowd, Oracle, in_doubt, seed
from tests.fault.rows import Row
from tests.servers import wait_until

PREFIX = "soak"
PROCESSES, WORKERS = 4, 12
RUNS = [f"soak-{number}" for number in range(16)]
EVENTS = ["worker"] * 38 + ["server"] * 16 + ["daemon"] * 8 + ["freeze"] * 10 + ["cut"] * 18
LAST_LIFE = 0.6  # no daemon is killed after this part, so that one life is long enough to grow in
EVENT_S, WARM_S, FROZEN_S = 10.0, 60.0, 3.0
KILLS_FULL, FULL_S = 60, 900.0
RSS_GROWTH_MAX, FDS_MORE_MAX = 1.10, 4
AUDITED_BY_CLIENT = 2000


@dataclass
class Relay:
    """Between a client and the daemon: passes bytes on until `cut`, which drops what is on its way."""

    target: Path
    path: Path
    pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=set)

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._pass, self.path)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self.target)
        except OSError:  # the daemon is down: so is the line to it
            writer.close()
            return
        pair = (writer, far_writer)
        self.pairs.add(pair)
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        finally:
            self.pairs.discard(pair)

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while block := await reader.read(65_536):
                writer.write(block)
                await writer.drain()
        except ConnectionError:  # one end is gone: that is what this line is for
            return
        finally:
            writer.close()

    def cut(self) -> int:
        """Drops every connection, without a word; returns how many."""
        pairs = list(self.pairs)
        for pair in pairs:
            for writer in pair:
                writer.transport.abort()
        return len(pairs)


@dataclass
class Soak:
    """All processes of a soak, and what was done to them."""

    oracle: Oracle
    running: DaemonProcess
    relay: Relay
    chance: random.Random
    workers: list[asyncio.subprocess.Process] = field(default_factory=list)
    done: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("worker", "server", "daemon", "freeze", "cut"), 0)
    )
    rss: list[list[int]] = field(default_factory=lambda: [[]])

    async def start_worker(self) -> None:
        """Every second process goes through the relay."""
        url = self.running.url if len(self.workers) % 2 else f"unix:{self.relay.path}"
        self.workers.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.fault.long.soak_worker", url, str(self.oracle.folder),
                str(self.chance.getrandbits(32)), str(WORKERS), ",".join(RUNS),
            )
        )  # fmt: skip

    def server_pid(self) -> int | None:
        """Of the embedded server; None while it starts."""
        try:
            with redis.Redis(unix_socket_path=str(next(self.running.folder.rglob("store.sock")))) as client:
                return int(client.info("server")["process_id"])
        except (redis.ConnectionError, StopIteration):
            return None

    async def harm(self, kind: str) -> None:
        """One event."""
        if kind == "worker":
            victim = self.workers.pop(self.chance.randrange(len(self.workers)))
            victim.kill()
            await victim.wait()
            await self.start_worker()
        elif kind == "server":
            while (pid := self.server_pid()) is None:
                await asyncio.sleep(0.02)
            os.kill(pid, signal.SIGKILL)
        elif kind == "daemon":
            await self.running.kill()
            await self.running.restart()
            self.rss.append([])
        elif kind == "freeze":
            victim = self.chance.choice(self.workers)
            victim.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)  # how long the fault lasts
            victim.send_signal(signal.SIGCONT)
        else:
            self.relay.cut()
        self.done[kind] += 1

    async def watch_memory(self) -> None:
        """A sample a second, by life of the daemon."""
        while True:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is being killed
                self.rss[-1].append(rss_bytes(self.running.process.pid))
            await asyncio.sleep(1)

    def counts(self) -> dict[str, int]:
        """Of all worker processes; of a killed one without its last moments."""
        total = {"claims": 0, "granted": 0, "wrong": 0}
        for path in self.oracle.folder.glob("counts-*"):
            found = json.loads(path.read_text(encoding="utf-8"))
            for name in total:
                total[name] += found[name]
            for name, count in found["errors"].items():
                total[name] = total.get(name, 0) + count
        return total


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; of one that is gone: FileNotFoundError or ProcessLookupError."""
    return int((Path("/proc") / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fds(pid: int) -> int:
    """Open files of a process."""
    return len(list((Path("/proc") / str(pid) / "fd").iterdir()))


def growth(samples: list[int]) -> float | None:
    """The end of a life against its first time after warm-up; None: too short to say.

    The warm-up is the first third: each restart of the server takes a little more until some forty of them are over.
    """
    if len(samples) < 3 * WARM_S:
        return None
    warm = samples[len(samples) // 3 :]
    part = max(5, len(warm) // 10)
    return median(warm[-part:]) / median(warm[:part])


def plan(length_s: float, chance: random.Random) -> list[tuple[float, str]]:
    """(second, kind) of every event; of a short soak some of each kind. The last daemon's life is a long one."""
    count = max(9, min(len(EVENTS), round(length_s / EVENT_S)))
    kinds = [EVENTS[len(EVENTS) * number // count] for number in range(count)]
    early = [kind for kind in kinds if kind == "daemon"]
    others = [kind for kind in kinds if kind != "daemon"]
    chance.shuffle(others)
    first = round(count * LAST_LIFE) - len(early)
    head = others[:first] + early
    chance.shuffle(head)
    return [((number + 1) * length_s / (count + 1), kind) for number, kind in enumerate(head + others[first:])]


def missing(oracle: Oracle, socket: Path) -> int:
    """Acknowledged results whose record does not say the same bytes, looked at in the store itself."""
    context = Engine(FakeStore(), EngineConfig(prefix=PREFIX)).context
    wanted = []
    for name, value in oracle.results().items():
        owner, _, key = name.partition("|")
        scope = "global" if owner == "*" else "run"
        digest = context.shaper.record(owner, TOOL, key, scope).digest
        record = context.keys.global_op(digest) if scope == "global" else context.keys.op(owner, digest)
        wanted.append((record, value))
    lost = 0
    with redis.Redis(unix_socket_path=str(socket), decode_responses=True) as client:
        for start in range(0, len(wanted), 1000):
            pipe = client.pipeline(transaction=False)
            for record, _ in wanted[start : start + 1000]:
                pipe.hmget(record, "state", "value")
            for (_, value), found in zip(wanted[start : start + 1000], pipe.execute(), strict=True):
                lost += found != ["committed", json.dumps(value)]
    return lost


async def test_everything_at_once(tmp_path: Path) -> None:
    """No effect twice, nothing acknowledged lost, no more in doubt than workers killed; the daemon does not grow."""
    length_s = float(os.environ.get("GUARDD_SOAK_S", str(FULL_S)))
    chance = random.Random(word := seed())
    oracle = Oracle(tmp_path)
    async with daemon("embedded:", PREFIX, "--durability", "fsync") as running:
        fds_idle = fds(running.process.pid)
        soak = Soak(oracle, running, Relay(running.folder / "d.sock", running.folder / "relay.sock"), chance)
        async with await soak.relay.serve():
            for _ in range(PROCESSES):
                await soak.start_worker()
            watching = asyncio.create_task(soak.watch_memory())
            began = time.monotonic()
            for at_s, kind in [*plan(length_s, chance), (length_s, "")]:
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                if kind:
                    await soak.harm(kind)
            for worker in soak.workers:
                worker.send_signal(signal.SIGTERM)
            codes = [await worker.wait() for worker in soak.workers]
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        wait_until(lambda: fds(running.process.pid) <= fds_idle + FDS_MORE_MAX, what="the daemon's files closed")
        fds_end = fds(running.process.pid)
        crowd = Crowd(oracle, RUNS, chance)
        lost_records = missing(oracle, next(running.folder.rglob("store.sock")))
        lost_replays = await crowd.audit(running.url, AUDITED_BY_CLIENT)
        row = Row("N4", f"soak of {length_s:.0f} s, everything at once", seed=word)
        row.in_doubt = await in_doubt(running.url)
    counts = soak.counts()
    kills = soak.done["worker"] + soak.done["server"] + soak.done["daemon"]
    grown = [found for samples in soak.rss if (found := growth(samples)) is not None]
    row.faults, row.killed = sum(soak.done.values()), soak.done["worker"] * WORKERS
    row.claims, row.granted, row.lost = counts["claims"], len(oracle.executed()), lost_records + lost_replays
    row.doubled = len(oracle.doubled())
    row.note = (
        f"{', '.join(f'{count} {kind}' for kind, count in soak.done.items())}; "
        f"RSS after warm-up x {', '.join(f'{each:.2f}' for each in grown) or 'too short to say'}; "
        f"fds {fds_idle} idle, {fds_end} at the end; "
        f"named errors { {name: count for name, count in counts.items() if name not in ('claims', 'granted', 'wrong')} or 'none' }"
    )
    row.write()
    assert codes == [0] * PROCESSES
    assert oracle.doubled() == []
    assert (lost_records, lost_replays, counts["wrong"]) == (0, 0, 0)
    assert row.in_doubt <= row.killed
    assert row.granted > 0
    assert all(each < RSS_GROWTH_MAX for each in grown), grown
    assert kills >= KILLS_FULL or length_s < FULL_S
