"""F13: peers that send bombs, send nothing, read nothing, or send without end: only they notice."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import statistics
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgpack
import pytest
from guardd_client import AsyncGuard
from guardd_client.wire import FRAME_BYTES_MAX, Decoder, encode

from tests.daemons import DaemonProcess, daemon
from tests.fault.rows import Row, scale
from tests.servers import Server

HELLO = encode([0, 1, "hello", {"versions": [1], "client": "raw"}])
RSS_GROWTH_KIB_MAX = 200_000
IDLE = 10_000


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """As many as this system lets us have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[DaemonProcess]:
    """A daemon process on the session's server."""
    async with daemon(embedded.url, prefix) as running:
        yield running


async def connect(served: DaemonProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(served.url.removeprefix("unix:"), limit=FRAME_BYTES_MAX * 2)


def rss_kib(served: DaemonProcess, field: str = "VmRSS") -> int:
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])


async def latencies_ms(served: DaemonProcess, run: str, count: int) -> list[float]:
    """An honest client beside the others: each of its calls is granted."""
    taken: list[float] = []
    async with AsyncGuard(served.url, deadline_ms=20_000) as guard:
        handle = guard.run(run, limits={"max_steps": None, "max_same_call": None, "max_no_progress": None})
        for number in range(count):
            began = time.perf_counter()
            assert (await handle.before("t", {"n": number}, call=f"{run}-{number}")).action == "execute"
            taken.append((time.perf_counter() - began) * 1000)
    return taken


def p99(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=100)[98]


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def bombs() -> dict[str, bytes]:
    """Frames that are small on the wire and large, deep or endless in memory."""
    maps = b"\xdc\xff\xff" + b"\x80" * 65_535
    return {
        "announced 4 GiB": struct.pack(">I", 0xFFFFFFFF),
        "array of 2^32": frame(b"\xdd\xff\xff\xff\xff"),
        "map of 2^32": frame(b"\xdf\xff\xff\xff\xff"),
        "nested 1,000,000 deep": frame(b"\x91" * 1_000_000),
        "1 MB of empty maps": frame(b"\x94\x00\x02\xa6before" + (b"\xdc\x00\x0f" + maps * 15)),
        "1 MB of empty lists": frame(
            b"\x94\x00\x02\xa6before" + (b"\xdc\x00\x0f" + maps.replace(b"\x80", b"\x90") * 15)
        ),
        "1 MB of small numbers": frame(
            b"\x94\x00\x02\xa6before" + (b"\xdc\x00\x0f" + maps.replace(b"\x80", b"\x01") * 15)
        ),
        "extension types": frame(msgpack.packb([0, 2, "before", {"args": msgpack.ExtType(5, b"x" * 1000)}])),
    }


async def test_bombs_are_refused_and_cost_little(served: DaemonProcess) -> None:
    """Each is answered with `bad_argument` and closed; the daemon's peak of memory stays."""
    await latencies_ms(served, "warm", 50)
    before_kib, sent = rss_kib(served, "VmHWM"), 0
    for _ in range(scale(5)):
        for name, bomb in bombs().items():
            reader, writer = await connect(served)
            writer.write(HELLO + bomb)
            replies = Decoder().receive_data(await asyncio.wait_for(reader.read(), 15))
            assert replies[-1][2]["field"] == "frame", name
            writer.close()
            sent += 1
    granted = await latencies_ms(served, "honest", 50)
    grown_kib = rss_kib(served, "VmHWM") - before_kib
    assert grown_kib < 40_000, grown_kib
    Row(
        "F13", "frame bombs", faults=sent, claims=50, granted=len(granted), note=f"peak memory + {grown_kib} KiB"
    ).write()


async def test_slow_peers_are_closed_and_hold_nothing(served: DaemonProcess) -> None:
    """Silent before hello, half a frame, a byte a second: closed within the limits while others are served."""
    peers = [await connect(served) for _ in range(scale(300, least=30))]
    for number, (_, writer) in enumerate(peers):
        writer.write((b"", HELLO + struct.pack(">I", 1000) + b"half", HELLO[:9])[number % 3])

    async def drip() -> None:
        _, writer = await connect(served)
        writer.write(HELLO + struct.pack(">I", 1000))
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.2)

    began = time.monotonic()
    dripping = asyncio.create_task(drip())
    granted = await latencies_ms(served, "honest", 200)
    for reader, writer in peers:
        with contextlib.suppress(OSError):  # closed with bytes of ours unread: no end, but an error
            await asyncio.wait_for(reader.read(), 12)
        writer.close()
    await asyncio.wait_for(dripping, 12)
    assert time.monotonic() - began < 12
    Row(
        "F13", "slow-loris", faults=len(peers) + 1, claims=200, granted=len(granted), note=f"p99 {p99(granted):.1f} ms"
    ).write()


async def test_idle_connections_cost_little(served: DaemonProcess) -> None:
    """Ten thousand, or as many as the system lets us open; an honest client among them."""
    alone = await latencies_ms(served, "alone", 200)
    count = min(scale(IDLE), 9_990, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)
    before_kib, peers = rss_kib(served), []
    for _ in range(count):
        reader, writer = await connect(served)
        writer.write(HELLO)
        peers.append((reader, writer))
        assert await asyncio.wait_for(reader.read(1), 30)
    among = await latencies_ms(served, "among", 200)
    grown_kib = rss_kib(served) - before_kib
    for _, writer in peers:
        writer.close()
    assert grown_kib < count * 30, grown_kib
    Row(
        "F13", "idle connections", faults=count, claims=400, granted=len(alone) + len(among),
        note=f"{grown_kib / count:.1f} KiB each, p99 {p99(among) / p99(alone):.2f} x",
    ).write()  # fmt: skip


async def test_one_client_at_full_speed_is_not_alone(served: DaemonProcess) -> None:
    """It sends without waiting for answers; others are granted theirs, and memory stays."""
    alone = await latencies_ms(served, "alone", 60)
    before_kib = rss_kib(served)
    reader, writer = await connect(served)
    writer.write(HELLO)
    answered = 0

    async def hear() -> None:
        nonlocal answered
        decoder = Decoder()
        while data := await reader.read(65_536):
            answered += len(decoder.receive_data(data))

    async def flood() -> None:
        number = 1
        while True:
            number += 1
            writer.write(encode([0, number, "charge", {"run": "flood", "op_id": f"o{number}", "usage": {"tokens": 1}}]))
            if number % 50 == 0:
                await writer.drain()
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(hear()), asyncio.create_task(flood())]
    beside = await latencies_ms(served, "beside", 60)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    writer.close()
    grown_kib = rss_kib(served) - before_kib
    assert answered > 300
    assert grown_kib < RSS_GROWTH_KIB_MAX, grown_kib
    Row(
        "F13", "one client at full speed", faults=answered, claims=120, granted=len(alone) + len(beside),
        note=f"p99 {p99(beside) / p99(alone):.2f} x, memory + {grown_kib} KiB",
    ).write()  # fmt: skip


async def test_peers_that_never_read_hold_a_bounded_part(served: DaemonProcess) -> None:
    """Many at once, each asking for large replies: not read on, and closed when too much waits."""
    async with AsyncGuard(served.url) as guard:
        run = guard.run("big", limits={"max_steps": None})
        for number in range(200):
            await run.before("t", {"text": "x" * 1900, "n": number})
    before_kib = rss_kib(served)
    peers = [await connect(served) for _ in range(scale(10, least=4))]
    request = encode([0, 9, "trace", {"run": "big"}])
    for _, writer in peers:
        writer.write(HELLO + request * 500)
    granted = await latencies_ms(served, "honest", 100)
    await asyncio.sleep(3)
    grown_kib = rss_kib(served, "VmHWM") - before_kib
    for _, writer in peers:
        writer.close()
    assert grown_kib < len(peers) * 16_000 + 100_000, grown_kib
    Row(
        "F13", "peers that never read", faults=len(peers), claims=100, granted=len(granted),
        note=f"peak memory + {grown_kib // 1024} MiB",
    ).write()  # fmt: skip
