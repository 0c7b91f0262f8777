"""`guardd demo`: real processes share a run, and the guard stops what has to be stopped.

Nothing here is canned: every line is what the guard answered, each scene checks
it, and the command fails loudly when the guard misbehaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard

from guardd.cli import show
from guardd.model.errors import GuardError, StoreUnavailable

LEASE_MS = 1500
KILL_MOST_MS = 2000


class DemoFailed(GuardError):
    """The guard did not do what the scene shows."""

    name = "demo_failed"
    number = 40


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser("demo", help="see a loop, a double refund and a run of processes being stopped")
    parser.add_argument(
        "--page",
        action="store_true",
        help="with the operator's page to look at, and at the end a run that only you can stop",
    )
    parser.set_defaults(handler=run)


class Worker:
    """A process with a client of its own."""

    def __init__(self, process: asyncio.subprocess.Process, role: str) -> None:
        self.process, self.role = process, role

    async def send(self, request: dict[str, Any]) -> None:
        """Asks without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        await self.process.stdin.drain()

    async def hear(self) -> dict[str, Any]:
        """The next line of the process."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise DemoFailed(f"the worker {self.role} ended")
        heard: dict[str, Any] = json.loads(line)
        return heard

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Asks and waits."""
        await self.send(request)
        return await self.hear()


class Demo:
    """One daemon with a store of its own, and workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix:{folder / 'guardd.sock'}"
        self.payments = folder / "payments.txt"
        self.processes: list[asyncio.subprocess.Process] = []

    async def start_daemon(self, *options: str) -> None:
        """`guardd serve`, on an embedded store."""
        with (self.folder / "daemon.log").open("wb") as log:
            daemon = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "guardd.cli.main", "serve", "--listen", self.url,
                "--state-dir", str(self.folder / "state"), *options, stderr=log,
            )  # fmt: skip
        self.processes.append(daemon)
        async with AsyncGuard(self.url, deadline_ms=30_000) as guard:
            await guard.call("runs", {})
        if daemon.returncode is not None:
            raise StoreUnavailable((self.folder / "daemon.log").read_text()[-500:])

    async def worker(self, role: str, run: str) -> Worker:
        """A process that inherits the run by GUARDD_RUN_ID."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "guardd.cli.demo_worker", role, str(self.payments),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={"GUARDD_URL": self.url, "GUARDD_RUN_ID": run, "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        self.processes.append(process)
        made = Worker(process, role)
        await made.hear()
        return made

    async def stop(self) -> None:
        """Ends every process, the daemon last."""
        for process in reversed(self.processes):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in self.processes))


async def run(arguments: argparse.Namespace) -> int:
    """Plays all scenes; 0 when the guard did what they show."""
    with tempfile.TemporaryDirectory(prefix="guardd-demo-") as folder:
        demo = Demo(Path(folder))
        try:
            await demo.start_daemon(*(("--http-listen", "tcp://127.0.0.1:0") if arguments.page else ()))
            async with AsyncGuard(demo.url) as guard:
                if arguments.page:
                    await _invite(demo, guard)
                await _circle(demo)
                await _poll(demo)
                await _refund(demo, guard)
                await _stop_button(demo, guard)
                if arguments.page:
                    await _endless(guard)
        finally:
            await demo.stop()
    print("\nall four as they should be")
    return 0


async def _invite(demo: Demo, guard: AsyncGuard) -> None:
    """Where to look, and with which token; it begins when the person is there."""
    started = json.loads((demo.folder / "daemon.log").read_text(encoding="utf-8").splitlines()[0])
    token = await guard.call("token_new", {"role": "operator", "name": "demo"})
    print(
        f"page      {started['http'][0]}/\ntoken     {token['token']}\nOpen the page, then press Enter here.",
        flush=True,
    )
    await asyncio.to_thread(sys.stdin.readline)


async def _endless(guard: AsyncGuard) -> None:
    """Honest work without an end: each poll moves on, so no rule stops it."""
    print("\n5. A run without an end: stop `endless` on the page (button Token, then Kill)", flush=True)
    run, version = (
        guard.run("endless", agent="poller", policy="agent", limits={"max_steps": None, "max_wall_ms": None}),
        0,
    )
    while True:
        version += 1
        answer = await run.before("job_status", {"job": 17}, progress_version=version)
        if answer.action == "stop":
            break
        if answer.action == "execute":
            await run.after(answer["call"], "progress", progress_version=version)
        await asyncio.sleep(0.1)
    print(f"   poller     stopped: {answer.reason}, {version} polls done", flush=True)


def _expect(answer: dict[str, Any], action: str, reason: str = "") -> None:
    if (answer.get("action"), answer.get("reason", "")) != (action, reason):
        raise DemoFailed(
            f"expected {action} {reason}, the guard answered {json.dumps(answer)[:300]}", field="demo", limit=action
        )


def _line(who: str, what: str, answer: dict[str, Any]) -> None:
    print(f"   {who:<10} {what:<34} -> {answer['action']} {answer.get('reason', '')}".rstrip())


async def _circle(demo: Demo) -> None:
    print("1. Two sub-agents in a circle: A B A B")
    planner, critic = await demo.worker("planner", "circle"), await demo.worker("critic", "circle")
    for number, (worker, tool) in enumerate([(planner, "draft"), (critic, "review")] * 2, 1):
        answer = await worker.ask({"do": "call", "tool": tool, "args": {"doc": "plan.md"}})
        _line(worker.role, f"{tool} plan.md", answer)
        if number < 4:
            _expect(answer, "execute")
        else:
            _expect(answer, "deny", "short_cycle")
            print(f"   told to the model: {answer['hint']}")


async def _poll(demo: Demo) -> None:
    print("\n2. Honest long work: the same poll ten times, and each time the job has moved")
    worker = await demo.worker("poller", "poll")
    for version in range(1, 11):
        _expect(
            await worker.ask({"do": "call", "tool": "job_status", "args": {"job": 17}, "version": version}), "execute"
        )
    print("   poller     job_status 17, ten times           -> execute, every time")


async def _refund(demo: Demo, guard: AsyncGuard) -> None:
    print("\n3. One refund, asked for by two workers at once; the one that pays is killed before it can say so")
    await guard.call("open", {"run": "refund", "limits": {"claim_lease_ms": LEASE_MS}})
    workers = [await demo.worker("worker-1", "refund"), await demo.worker("worker-2", "refund")]
    pay = {"do": "pay", "order": 17, "then": "hang"}
    await asyncio.gather(*(worker.send(pay) for worker in workers))
    heard = await asyncio.gather(*(worker.hear() for worker in workers))
    payers = [worker for worker, said in zip(workers, heard, strict=True) if "paid_and_hangs" in said]
    if len(payers) != 1:
        raise DemoFailed(f"{len(payers)} workers paid", field="demo", limit=1)
    winner = payers[0]
    loser = next(worker for worker in workers if worker is not winner)
    print(f"   {winner.role:<10} refund order 17                    -> execute; paid")
    answer = next(said for worker, said in zip(workers, heard, strict=True) if worker is loser)
    _line(loser.role, "refund order 17", answer)
    _expect(answer, "wait", "in_flight")
    winner.process.kill()
    await winner.process.wait()
    print(f"   {winner.role} gets SIGKILL")
    while (answer := await loser.ask(pay)).get("reason") == "in_flight":
        await asyncio.sleep(0.1)
    _line(loser.role, "refund order 17, after the lease", answer)
    _expect(answer, "deny", "in_doubt")
    paid = demo.payments.read_text().splitlines()
    answer = await guard.call(
        "resolve", {"run": "refund", "tool": "refund", "idempotency_key": "refund:17", "state": "committed", "value": {"refunded": 17},
                    "note": "found in payments.txt"},
    )  # fmt: skip
    _line("operator", "finds the payment outside", answer)
    answer = await loser.ask(pay)
    _line(loser.role, "refund order 17, once more", answer)
    _expect(answer, "replay", "already_committed")
    paid = demo.payments.read_text().splitlines()
    print(f"   paid outside: {len(paid)} time")
    if len(paid) != 1:
        raise DemoFailed(f"the refund was paid {len(paid)} times", field="demo", limit=1)


async def _stop_button(demo: Demo, guard: AsyncGuard) -> None:
    print("\n4. The stop button, while three processes work in one run and its sub-runs")
    workers = [await demo.worker(f"agent-{n}", run) for n, run in enumerate(("task", "task/research", "task/write"), 1)]
    for worker in workers:
        await worker.ask({"do": "loop"})
    await asyncio.sleep(0.2)
    before_ns = time.time_ns()
    answer = await guard.call("kill", {"run": "task", "reason": "incident_stop"})
    _line("operator", "guardd kill task", answer)
    ends = await asyncio.gather(*(worker.hear() for worker in workers))
    for worker, end in zip(workers, ends, strict=True):
        late_ms = (end["at_ns"] - before_ns) / 1e6
        print(f"   {worker.role:<10} stopped {late_ms:.1f} ms after it, {end['stopped_after']} calls done")
        if late_ms > KILL_MOST_MS:
            raise DemoFailed(f"{worker.role} went on for {late_ms:.0f} ms", field="demo", limit=KILL_MOST_MS)
    print(*("   " + line for line in show.envelope(answer["envelope"]).splitlines()), sep="\n")
    socket = demo.folder / "state/store/store.sock"
    print("\nThe same with redis-cli alone:\n   redis-cli -s SOCKET HMGET 'guardd:{task}:run' status reason steps")
    if cli := shutil.which("redis-cli") or shutil.which("valkey-cli"):
        done = subprocess.run(  # noqa: S603 (our own socket)
            [cli, "-s", str(socket), "HMGET", "guardd:{task}:run", "status", "reason", "steps"], capture_output=True, text=True, check=True
        )  # fmt: skip
        print(*("   " + line for line in done.stdout.splitlines()), sep="\n")
