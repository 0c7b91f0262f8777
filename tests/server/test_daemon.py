"""The daemon as a process: bad peers, many peers, drain, reload, two of them (SPEC 4, 5)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable
from guardd_client.wire import FRAME_BYTES_MAX, Decoder, WireError, encode

from tests.daemons import DaemonProcess, daemon
from tests.servers import Server

HELLO = [0, 1, "hello", {"versions": [1], "client": "raw"}]


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[DaemonProcess]:
    """A daemon process on the session's server."""
    async with daemon(embedded.url, prefix) as running:
        yield running


class Peer:
    """A connection that does what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self._decoder = reader, writer, Decoder()
        self._heard: list[Any] = []

    @classmethod
    async def to(cls, served: DaemonProcess, *, greet: bool = True) -> Peer:
        peer = cls(*await asyncio.open_unix_connection(served.url.removeprefix("unix:")))
        if greet:
            peer.writer.write(encode(HELLO))
            assert (await peer.hear())[2] is None
        return peer

    async def hear(self) -> Any:
        """The next message; None when the daemon closed the connection."""
        while not self._heard:
            try:
                data = await asyncio.wait_for(self.reader.read(65_536), 15)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._heard += self._decoder.receive_data(data)
        return self._heard.pop(0)

    def close(self) -> None:
        self.writer.close()


async def still_serves(served: DaemonProcess) -> None:
    """Others are not harmed."""
    async with AsyncGuard(served.url) as guard:
        assert (await guard.run("healthy").before("t", {"n": 1}, call=f"c{id(guard)}")).action in ("execute", "deny")


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", FRAME_BYTES_MAX + 1), struct.pack(">I", 0xFFFFFFFF), frame(b"\xc1"), frame(b"\xdd\xff\xff\xff\xff"),
        frame(b"\x91" * 500_000), frame(msgpack.packb({"not": "a list"})), frame(msgpack.packb([7, 1, "x", {}])),
        frame(msgpack.packb([0, 2, "before", {"args": DEEP}])), frame(msgpack.packb([0, 2, "x", {"a": msgpack.ExtType(5, b"x")}])),
        frame(b"\x94\x00\x02\xa1x\x82\xa1a\x01\xa1a\x02"), frame(msgpack.packb([0, "id", "x", {}])), frame(b"\xa2\xff\xfe"),
    ],
)  # fmt: skip
async def test_a_frame_that_breaks_the_protocol_closes_its_connection_with_a_reason(
    sent: bytes, served: DaemonProcess
) -> None:
    """Oversized, nested, extension types, duplicate names, other shapes: refused by name; nobody else notices."""
    peer = await Peer.to(served)
    peer.writer.write(sent)
    said = await peer.hear()
    assert said[2]["error"] == "bad_argument"
    assert said[2]["field"] == "frame"
    assert await peer.hear() is None
    peer.close()
    await still_serves(served)


async def test_the_first_call_is_hello(served: DaemonProcess) -> None:
    for params in ({"versions": [99], "client": "x"}, {"versions": [1]}, {"versions": [1], "client": ""}):
        peer = await Peer.to(served, greet=False)
        peer.writer.write(encode([0, 1, "hello", params]))
        assert (await peer.hear())[2]["error"] == "bad_argument"
        peer.writer.write(encode([0, 2, "runs", {}]))
        assert (await peer.hear())[2]["limit"] == "hello"
        peer.close()


@pytest.mark.parametrize("sent", [b"", struct.pack(">I", 100) + b"half"])
async def test_a_silent_or_half_sent_peer_is_closed_in_time(sent: bytes, served: DaemonProcess) -> None:
    """Slow clients hold nothing: hello within 2 s, each frame within 5 s."""
    peer = await Peer.to(served, greet=bool(sent))
    peer.writer.write(sent)
    assert await peer.hear() is None
    assert any(event["event"] == "connection.too_slow" for event in served.log())
    peer.close()


async def test_frames_may_come_in_any_pieces(served: DaemonProcess) -> None:
    peer = await Peer.to(served, greet=False)
    for byte in encode(HELLO) + encode([0, 2, "runs", {}]):
        peer.writer.write(bytes([byte]))
        await peer.writer.drain()
    assert [(await peer.hear())[1] for _ in range(2)] == [1, 2]
    peer.close()


async def test_a_client_that_never_reads_waits_alone(served: DaemonProcess) -> None:
    """Its requests are not read any more; the daemon's memory stays, others are answered."""
    async with AsyncGuard(served.url) as guard:
        run = guard.run("big")
        for number in range(40):
            await run.before("t", {"text": "x" * 1500, "n": number})
    peer = await Peer.to(served)
    request = encode([0, 9, "trace", {"run": "big"}])
    before_kib = _rss_kib(served)
    sent = 0
    try:
        for _ in range(20_000):
            peer.writer.write(request)
            await asyncio.wait_for(peer.writer.drain(), 0.3)
            sent += 1
    except TimeoutError:
        pass
    assert sent < 20_000, "the daemon read on although its replies were not taken"
    await still_serves(served)
    assert _rss_kib(served) - before_kib < 200_000
    peer.close()


def _rss_kib(served: DaemonProcess) -> int:
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


async def test_a_thousand_idle_connections_are_held(served: DaemonProcess) -> None:
    peers = [await Peer.to(served) for _ in range(1000)]
    await still_serves(served)
    peers[500].writer.write(encode([0, 5, "runs", {}]))
    assert (await peers[500].hear())[1] == 5
    for peer in peers:
        peer.close()


async def test_more_connections_than_allowed_are_closed_at_once(embedded: Server, prefix: str) -> None:
    async with daemon(embedded.url, prefix, "--connections-max", "2") as served:
        peers = [await Peer.to(served) for _ in range(2)]
        extra = await Peer.to(served, greet=False)
        assert await extra.hear() is None
        for peer in (*peers, extra):
            peer.close()


async def test_many_requests_in_flight_on_one_connection_all_get_their_own_answer(served: DaemonProcess) -> None:
    peer = await Peer.to(served)
    for number in range(2, 500):
        peer.writer.write(
            encode([0, number, "charge", {"run": f"r{number}", "op_id": "o", "usage": {"tokens": number}}])
        )
    said = {reply[1]: reply for reply in [await peer.hear() for _ in range(2, 500)]}
    assert set(said) == set(range(2, 500))
    assert all(reply[3]["action"] == "continue" for reply in said.values())
    peer.close()


async def test_a_stopping_daemon_answers_what_is_in_flight(embedded: Server, prefix: str) -> None:
    """SIGTERM while 200 calls are on their way: each is answered or knows that it was not, and none runs twice."""
    async with daemon(embedded.url, prefix) as served:
        async with AsyncGuard(served.url, deadline_ms=1000) as guard:
            run = guard.run("r", limits={"max_steps": None, "max_same_call": None})
            await run.open()
            asked = [asyncio.create_task(run.before("t", {"n": n}, call=f"c{n}")) for n in range(200)]
            await asyncio.sleep(0)
            served.process.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*asked, return_exceptions=True)
        assert await served.process.wait() == 0
        granted = [each for each in answers if not isinstance(each, BaseException)]
        assert all(isinstance(each, GuardUnavailable) for each in answers if isinstance(each, BaseException))
        steps = int(embedded.client().hget(f"{prefix}:{{r}}:run", "steps") or 0)
        assert len(granted) <= steps <= 200
        assert not Path(served.url.removeprefix("unix:")).exists()


async def test_rules_are_reloaded_on_sighup_and_bad_ones_are_refused(
    embedded: Server, prefix: str, tmp_path: Path
) -> None:
    config = tmp_path / "guardd.toml"
    config.write_text("")
    async with daemon(embedded.url, prefix, "--config", str(config)) as served:

        async def config_after(text: str, event: str) -> str:
            seen = sum(each["event"] == event for each in served.log())
            config.write_text(text)
            served.process.send_signal(signal.SIGHUP)
            while sum(each["event"] == event for each in served.log()) == seen:
                await asyncio.sleep(0.01)
            async with AsyncGuard(served.url) as guard:
                await guard.call("runs", {})
                return str(guard.connection.server["config"])

        first = await config_after("", "daemon.reloaded")
        second = await config_after("[tools.pay]\nrequires_key = true\n", "daemon.reloaded")
        assert second != first
        async with AsyncGuard(served.url) as guard:
            with pytest.raises(GuardRequestError, match="effect_key_missing"):
                await guard.run("r").before("pay")
        assert await config_after("[tools.pay]\ncolour = 1\n", "daemon.reload_refused") == second


async def test_two_daemons_on_one_store_are_one_guard(embedded: Server, prefix: str) -> None:
    """A run is asked here and reported there; a kill at one reaches watchers of the other."""
    async with (
        daemon(embedded.url, prefix) as one,
        daemon(embedded.url, prefix) as two,
        AsyncGuard(one.url) as here,
        AsyncGuard(two.url) as there,
    ):
        run = here.run("r", limits={"max_steps": 2})
        answer = await run.before("pay", idempotency_key="k")
        elsewhere = there.run("r")
        await elsewhere.open()
        assert (await elsewhere.before("pay", idempotency_key="k")).reason == "in_flight"
        assert (await elsewhere.after(answer["call"], "progress", value=5)).action == "continue"
        assert (await run.before("pay", idempotency_key="k")).value == 5
        await here.call("deny_rule", {"id": "inc", "tool": "mail.*"})
        for attempt in range(300):
            if (await there.run(f"d{attempt}").before("mail.send")).reason == "policy_blocked":
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("the deny rule did not reach the other daemon")
        await here.call("kill", {"run": "r", "reason": "incident_stop"})
        await asyncio.wait_for(elsewhere.cancelled.wait(), 5)


async def test_a_second_daemon_on_one_socket_or_state_directory_is_refused(embedded: Server, prefix: str) -> None:
    """With who holds it."""
    async with daemon("embedded:", prefix) as served:
        for options in (
            ("--listen", f"unix:{served.folder}/other.sock"),
            ("--listen", served.url, "--store", embedded.url),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "guardd.cli.main", "serve",
                "--state-dir", str(served.folder / "state"), *options, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, said = await process.communicate()
            assert process.returncode in (2, 3)
            assert b"another" in said
        await still_serves(served)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://10.0.0.1:5", "nonsense", "tcp://127.0.0.1:x"])
async def test_an_address_that_is_open_to_others_is_refused(address: str, embedded: Server, tmp_path: Path) -> None:
    """SPEC 5: without tokens only loopback and the socket."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "guardd.cli.main", "serve", "--store", embedded.url, "--listen", address,
        "--state-dir", str(tmp_path / "state"), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"listen" in said


async def test_tcp_on_loopback_serves(embedded: Server, prefix: str) -> None:
    async with daemon(embedded.url, prefix, "--listen", "tcp://127.0.0.1:0") as served:
        address = next(event for event in served.log() if event["event"] == "daemon.started")["listen"][1]
        async with AsyncGuard(address) as guard:
            assert (await guard.run("r").before("t")).action == "execute"


async def test_a_store_that_is_gone_fails_closed_and_comes_back(tmp_path: Path, prefix: str) -> None:
    """SIGKILL of the server under a daemon: no grant; afterwards the daemon goes on by itself."""
    (tmp_path / "s").mkdir()
    with Server.start(tmp_path / "s", "--appendonly", "yes", "--appendfsync", "always") as server:
        async with daemon(server.url, prefix) as served, AsyncGuard(served.url, deadline_ms=700) as guard:
            run = guard.run("r")
            await run.before("pay", idempotency_key="k", call="c1")
            server.kill()
            with pytest.raises(GuardUnavailable, match="store_unavailable"):
                await run.before("t")
            with Server.start(tmp_path / "s", "--appendonly", "yes"):
                for _ in range(100):
                    try:
                        assert (await run.before("pay", idempotency_key="k")).reason == "in_flight"
                        break
                    except GuardUnavailable:
                        await asyncio.sleep(0.05)
                else:
                    pytest.fail("the daemon did not find the store again")


async def test_several_workers_serve_one_socket_and_a_dead_one_is_replaced(prefix: str) -> None:
    """SIGKILL of a worker: clients reconnect, nothing is counted twice; SIGHUP and SIGTERM reach all."""
    async with daemon("embedded:", prefix, "--workers", "2") as served:
        guards = [AsyncGuard(served.url) for _ in range(8)]
        runs = [guard.run("r", limits={"max_same_call": None, "max_denied": None}) for guard in guards]
        await asyncio.gather(*(run.before("t", {"n": n}) for n, run in enumerate(runs)))
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().split()
        workers = [pid for pid in children if b"guardd.cli.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(int(workers[0]), signal.SIGKILL)
        answers = await asyncio.gather(*(run.before("t", {"n": n}) for n, run in enumerate(runs, 100)))
        assert [answer.action for answer in answers] == ["execute"] * 8
        assert (await runs[0].inspect())["counters"]["steps"] == 16
        while not any(event["event"] == "worker.died" for event in served.log()):
            await asyncio.sleep(0.01)
        for guard in guards:
            await guard.close()
        assert await served.stop() == 0
        assert not Path(served.url.removeprefix("unix:")).exists()


async def test_the_log_has_one_line_an_event_and_no_arguments(served: DaemonProcess) -> None:
    async with AsyncGuard(served.url) as guard:
        await guard.run("r").before("t", {"password": "hunter2"})
    await served.stop()
    text = json.dumps(served.log())
    assert [event["event"] for event in served.log()][-1] == "daemon.stopped"
    assert "hunter2" not in text


def test_the_decoder_refuses_before_it_reads() -> None:
    """An oversized frame is refused when its length is announced."""
    with pytest.raises(WireError, match="at most 10"):
        Decoder(frame_bytes_max=10).receive_data(struct.pack(">I", 11))
    with pytest.raises(WireError, match="cannot be sent"):
        encode([1, 1, None, {1, 2}])
    with pytest.raises(WireError, match="at most"):
        encode([1, 1, None, "x" * (FRAME_BYTES_MAX + 1)])
