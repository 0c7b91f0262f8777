"""`make bench`: the rows of the performance contract in one run, as ratios, printed as a table."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import redis
import uvloop
from guardd_client import AsyncGuard

from bench.load import calls, connect, hammer
from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.limits import AGENT, Policy
from guardd.store.connect import open_store

SECONDS = float(os.environ.get("BENCH_SECONDS", "4"))
LIMITS = {"max_steps": None, "max_wall_ms": None, "max_same_call": None, "max_no_progress": None, "max_denied": None}


def quantile(values: list[float], share: float) -> float:
    """A quantile by rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


@contextlib.asynccontextmanager
async def serving(durability: str) -> AsyncIterator[tuple[str, str, int]]:
    """A daemon with an embedded store: (socket of the daemon, socket of the store, pid of the daemon)."""
    with tempfile.TemporaryDirectory(prefix="gb-") as name:
        folder = Path(name)
        config = folder / "guardd.toml"
        lines = ["default_policy = 'bench'", "[policies.bench]"] + [f"{limit} = 'unlimited'" for limit in LIMITS]
        config.write_text("\n".join(lines))
        path = folder / "d.sock"
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "guardd.cli.main", "serve", "--listen", f"unix:{path}", "--config", str(config),
                "--state-dir", str(folder / "state"), "--durability", durability, stderr=log,
            )  # fmt: skip
        try:
            async with AsyncGuard(f"unix:{path}", deadline_ms=20_000) as guard:
                await guard.call("runs", {})
            yield str(path), str(folder / "state/store/store.sock"), process.pid
        finally:
            process.terminate()
            await process.wait()


async def captured(store_socket: str, name: str) -> dict[str, tuple[str, list[str], list[Any]]]:
    """The scripts of one call with their keys and arguments, as the engine sends them."""
    policy = Policy("bench", {**AGENT.limits, **LIMITS}, AGENT.volatile_args)
    sent: dict[str, Any] = {}
    async with await open_store(f"unix://{store_socket}") as opened:
        engine = Engine(opened.store, EngineConfig(policies={"bench": policy}, default_policy="bench"))
        real = opened.store.script

        async def script(source: Any, keys: Any, args: Any, *, before: Any = ()) -> Any:
            sent[source.name] = (source, list(keys), list(args))
            return await real(source, keys, args, before=before)

        engine.context.link.store.script = script  # type: ignore[method-assign]
        for (before, after), _ in zip(calls(name), range(2), strict=False):
            await engine.call("before", before)
            await engine.call("after", after)
        loaded = {key: opened.store._scripts.get(value[0]).sha for key, value in sent.items()}  # type: ignore[attr-defined]
    return {key: (loaded[key], value[1], value[2]) for key, value in sent.items()}


def direct_p50_ms(store_socket: str, sent: Any) -> float:
    """The same script by one redis-py client."""
    client = redis.Redis(unix_socket_path=store_socket)
    sha, keys, args = sent["before"]
    at = args.index(next(arg for arg in args if isinstance(arg, str) and "-call-" in arg))
    latencies = []
    for number in range(1500):
        args[at] = f"direct-call-{number}"
        start_s = time.perf_counter()
        client.evalsha(sha, len(keys), *keys, *args)
        latencies.append((time.perf_counter() - start_s) * 1000)
    return quantile(latencies, 0.5)


def benchmark_rate(store_socket: str, sent: Any) -> float | None:
    """Scripts a second by redis-benchmark with pipelining 16: `before` of ever new calls.

    It cannot report the calls that it opened, its ids being random, so `before` stands for both scripts; they
    cost about the same.
    """
    tool = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    if tool is None:
        return None
    sha, keys, args = sent["before"]
    shown = [_renamed(arg, "call-__rand_int__") for arg in args]
    done = subprocess.run(
        [tool, "-s", store_socket, "-P", "16", "-c", "16", "-n", "30000", "-r", "1000000000", "--csv",
         "EVALSHA", sha, str(len(keys)), *keys, *shown],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout.splitlines()[-1].rsplit('","', 7)[1])


def _renamed(arg: Any, call: str) -> str:
    return call if str(arg).endswith("-call-000000000001") else str(arg)


async def growth(path: str) -> tuple[float, float]:
    """p50 of `before` in ms in runs of about 10 steps, and in one of 10 000; asked in turns, for machines drift."""
    peer, young, old = await connect(path), [], []
    calling = calls("growth")

    async def step(run: str) -> float:
        before, after = next(calling)
        start_s = time.perf_counter()
        await peer.ask("before", {**before, "run": run})
        took_ms = (time.perf_counter() - start_s) * 1000
        await peer.ask("after", {**after, "run": run})
        return took_ms

    for _ in range(9_500):
        await step("old")
    for number in range(500):
        young.append(await step(f"young-{number // 20}"))
        old.append(await step("old"))
    return quantile(young, 0.5), quantile(old, 0.5)


async def memory_of_a_run(path: str, store_socket: str) -> tuple[float, float]:
    """KiB of a run with 10 calls of 100-byte arguments: with its trace, and without."""
    peer, client = await connect(path), redis.Redis(unix_socket_path=store_socket, decode_responses=True)
    for number in range(10):
        call = f"memory-call-{number:012d}"
        args = {"query": "y" * 80, "n": number}
        await peer.ask("before", {"run": "memory", "call": call, "agent": "worker", "tool": "web_search", "args": args})
        await peer.ask("after", {"run": "memory", "call": call, "status": "progress", "value": {"ok": True}})
    sizes = {key: client.memory_usage(key, samples=0) for key in client.scan_iter("guardd:{memory}*", count=100_000)}
    return sum(sizes.values()) / 1024, sum(size for key, size in sizes.items() if not key.endswith(":trace")) / 1024


async def kill_p99_ms(path: str, watchers: int = 1000) -> float:
    """From the kill to the notification at each of many watching connections."""
    peers = [await connect(path) for _ in range(watchers)]
    for peer in peers:
        await peer.ask("watch", {"run": "killed"})
    operator = await connect(path)
    await operator.ask("open", {"run": "killed"})
    start_s = time.time()
    await operator.ask("kill", {"run": "killed"})
    while sum(bool(peer.events) for peer in peers) < watchers:
        await asyncio.sleep(0.005)
    return quantile([(peer.events[0][0] - start_s) * 1000 for peer in peers], 0.99)


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def main() -> None:
    """Measures and prints."""
    rates: dict[str, float] = {}
    rows: list[tuple[str, str, str]] = []
    for durability in ("memory", "fsync"):
        async with serving(durability) as (path, store_socket, pid):
            for connections in (1, 16, 64, 256):
                used_s = cpu_s(pid)
                latencies, rate = await hammer(path, connections, SECONDS, f"{durability}-{connections}")
                cpu_us = (cpu_s(pid) - used_s) / (rate * SECONDS) * 1e6
                rows.append((
                    f"{durability}: {connections} connections",
                    f"p50 {quantile(latencies, 0.5):.2f} ms, p99 {quantile(latencies, 0.99):.2f} ms, {rate:,.0f} decisions/s, daemon {cpu_us:.0f} us CPU each", "",
                ))  # fmt: skip
                rates[f"{durability}-{connections}"] = rate
                if connections == 1:
                    sent = await captured(store_socket, f"captured-{durability}")
                    direct_ms = direct_p50_ms(store_socket, sent)
                    ratio = quantile(latencies, 0.5) / direct_ms
                    rows.append(
                        (
                            f"{durability}: p50 through the daemon / same script by one client ({direct_ms:.2f} ms)",
                            f"{ratio:.2f}",
                            "<= 2",
                        )
                    )
            if durability == "memory" and (alone := benchmark_rate(store_socket, sent)):
                rows.append(
                    (
                        f"throughput of 64 connections / redis-benchmark -P 16 ({alone:,.0f}/s)",
                        f"{rates['memory-64'] / alone:.2f}",
                        ">= 0.6",
                    )
                )
            if durability == "memory":
                first, last = await growth(path)
                rows.append((f"before at step 10 000 / at step 10 ({first:.2f} ms)", f"{last / first:.2f}", "<= 1.2"))
            else:
                with_trace, without = await memory_of_a_run(path, store_socket)
                rows.append(("memory of a run with 10 calls, with trace", f"{with_trace:.1f} KiB", "<= 10 KiB"))
                rows.append(("the same without its trace, embedded settings", f"{without:.1f} KiB", "<= 2 KiB"))
                rows.append(
                    ("a kill reaching 1 000 watching connections, p99", f"{await kill_p99_ms(path):.1f} ms", "<= 50 ms")
                )
    rows.append(
        ("throughput fsync / memory, 64 connections", f"{rates['fsync-64'] / rates['memory-64']:.2f}", ">= 0.6")
    )
    print("| what | measured | asked |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    uvloop.run(main())
