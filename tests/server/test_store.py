"""Connections and the embedded server: real processes, real signals (SPEC 5)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from guardd.model.errors import BadArgument, CallConflict, StoreRefused, StoreUnavailable
from guardd.store.connect import open_store, shown
from guardd.store.embedded import EmbeddedServer
from guardd.store.errors import UNAVAILABLE, map_error
from guardd.store.pipe import Pipe
from guardd.store.pool import pool_for
from guardd.store.server import ServerStore
from tests.servers import Server, free_port, wait_until


class LossyProxy:
    """Forwards to a Unix socket; while `is_mute` replies are swallowed and the client waits."""

    def __init__(self, target: Path) -> None:
        self.port, self.is_mute, self._target = free_port(), False, target
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._target))
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(65536):
                if not (is_reply and self.is_mute):
                    sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(embedded: Server) -> Iterator[LossyProxy]:
    made = LossyProxy(embedded.socket)
    yield made
    made.close()


async def test_a_lost_reply_is_never_a_second_execution(proxy: LossyProxy, embedded: Server, prefix: str) -> None:
    """SPEC 5: the driver repeats nothing; the caller hears that it may have happened."""
    store = ServerStore(
        pool_for(f"redis://127.0.0.1:{proxy.port}"), kind="standalone", durability="memory", timeout_ms=300
    )
    await store.execute(("INCR", f"{prefix}:n"))
    for _ in range(3):
        proxy.is_mute = True
        with pytest.raises(StoreUnavailable) as caught:
            await store.execute(("INCR", f"{prefix}:n"))
        assert caught.value.retry == "same_id"
        proxy.is_mute = False
        await store.execute(("PING",))  # connects again
    assert await store.execute(("INCR", f"{prefix}:n")) == [5]
    assert embedded.client().get(f"{prefix}:n") == "5"
    await store.close()
    embedded.client().delete(f"{prefix}:n")


def test_no_connection_of_ours_retries() -> None:
    """redis-py's defaults moved before; this notices when they move again."""
    for url in ("redis://127.0.0.1:1", "rediss://127.0.0.1:1", "unix:///nowhere"):
        connection = pool_for(url).make_connection()
        assert connection.retry.get_retries() == 0
        assert not connection.retry_on_error
        assert connection.health_check_interval == 0


async def test_many_callers_on_one_pipe_each_get_their_own_replies(embedded: Server) -> None:
    """Commands travel together; replies do not mix, also when some fail."""
    pipe = Pipe(pool_for(embedded.url), timeout_s=5)

    async def ask(number: int) -> None:
        echo, error = await pipe.execute([("ECHO", number), ("NOSUCH", number)])
        assert echo == str(number).encode()
        assert str(number) in str(error)

    await asyncio.gather(*(ask(number) for number in range(300)))
    await pipe.close()


async def test_after_a_failure_the_next_command_connects_again(embedded: Server) -> None:
    async with await open_store(embedded.url) as opened:
        await opened.store.execute(("PING",))
        embedded.client().client_kill_filter(skipme=True, _type="normal")
        with pytest.raises(StoreUnavailable):
            await opened.store.execute(("PING",))
        assert await opened.store.execute(("PING",)) == [b"PONG"]


@pytest.mark.parametrize("word", UNAVAILABLE)
def test_every_error_reply_has_one_meaning(word: str) -> None:
    """SPEC 5: whatever is no answer means unavailable, with what to do."""
    mapped = map_error(redis.ResponseError(f"{word} something from the server"), where="before")
    assert isinstance(mapped, StoreUnavailable)
    assert mapped.message.startswith(f"{word}: ")
    assert (mapped.value, mapped.retry) == (word, "same_id")


def test_a_scripts_own_error_keeps_its_name_and_facts() -> None:
    text = "GUARD_CALL_CONFLICT no field=call value=c1 limit=5 script: abc, on @user_script:3."
    mapped = map_error(redis.ResponseError(text), where="before")
    assert isinstance(mapped, CallConflict)
    assert (mapped.field, mapped.value, mapped.limit) == ("call", "c1", 5)


async def test_errors_of_a_real_server_fail_closed(tmp_path: Path) -> None:
    """BUSY, OOM, READONLY, NOPERM, WRONGPASS: each mapped, from the real thing."""
    with Server.start(tmp_path, "--busy-reply-threshold", "50") as server:
        client = server.client()
        async with await open_store(server.url, timeout_ms=3000) as opened:
            looping = asyncio.create_task(opened.store.execute(("EVAL", "while true do end", 0)))
            await asyncio.to_thread(wait_until, lambda: _is_busy(client), what="BUSY")
            pipe = Pipe(pool_for(server.url), timeout_s=3)
            (reply,) = await pipe.execute([("PING",)])
            assert map_error(reply, where="x").value == "BUSY"
            client.script_kill()
            with pytest.raises(StoreUnavailable):
                await looping
            client.config_set("maxmemory", 1)
            with pytest.raises(StoreUnavailable, match="OOM"):
                await opened.store.execute(("SET", "a", "b"))
            client.config_set("maxmemory", 0)
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(StoreUnavailable, match="READONLY"):
                await opened.store.execute(("SET", "a", "b"))
            client.replicaof("NO", "ONE")
            client.acl_setuser("low", enabled=True, passwords=["+pw"], commands=["+ping", "+auth", "+hello", "+client"])
            with pytest.raises(StoreUnavailable, match="NOPERM"):
                await open_store(f"unix://low:pw@{server.socket}")
            with pytest.raises(StoreUnavailable, match="WRONGPASS"):
                await open_store(f"unix://low:wrong@{server.socket}")
            await pipe.close()


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


@pytest.mark.parametrize(
    ("options", "durability", "words"),
    [
        (("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru"), None, "maxmemory-policy noeviction"),
        (("--replicaof", "127.0.0.1", "1"), None, "name its primary"),
        ((), "fsync", "appendfsync always"),
    ],
)
async def test_a_server_that_cannot_keep_the_promises_is_refused(
    options: tuple[str, ...], durability: str | None, words: str, tmp_path: Path
) -> None:
    """SPEC 5: with the sentence that mends it."""
    with Server.start(tmp_path, *options) as server, pytest.raises(StoreRefused, match=words):
        await open_store(server.url, durability=durability)


async def test_a_server_without_persistence_is_taken_with_a_warning(embedded: Server) -> None:
    async with await open_store(embedded.url) as opened:
        assert opened.report is not None
        assert any("append-only file is off" in warning for warning in opened.report.warnings)


@pytest.mark.parametrize("url", ["mysql://x", "nothing", "redis+sentinel://a", "redis+cluster://a"])
async def test_a_url_of_another_kind_is_refused_by_name(url: str) -> None:
    with pytest.raises((BadArgument, StoreRefused)) as caught:
        await open_store(url)
    assert caught.value.field == "store"


async def test_a_password_never_stands_in_a_message() -> None:
    assert shown("redis://user:hunter2@host:1/0") == "redis://host:1/0"
    with pytest.raises(StoreUnavailable) as caught:
        await open_store(f"redis://user:hunter2@127.0.0.1:{free_port()}")
    assert "hunter2" not in caught.value.message


# ---- The embedded server ---------------------------------------------------------


async def test_the_embedded_server_keeps_its_data_over_restarts_and_kills(tmp_path: Path) -> None:
    """AOF always; SIGKILL of the server; the supervisor starts it again and counts it."""
    async with await open_store(state_dir=tmp_path / "state") as opened:
        assert opened.store.durability == "fsync"
        assert opened.embedded is not None
        await opened.store.execute(("SET", "a", 1))
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
        assert opened.embedded.socket.stat().st_mode & 0o777 == 0o600
        first = opened.embedded.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        while opened.embedded.pid in (None, first) or not opened.embedded.socket.exists():
            await asyncio.sleep(0.01)
        for _ in range(500):
            try:
                assert await opened.store.execute(("GET", "a")) == [b"1"]
                break
            except StoreUnavailable:
                await asyncio.sleep(0.01)
        else:
            pytest.fail("the server did not come back")
        assert opened.embedded.restarts == 1
    async with await open_store(state_dir=tmp_path / "state") as opened:
        assert await opened.store.execute(("GET", "a")) == [b"1"]


async def test_a_second_daemon_on_one_directory_is_refused(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    await server.start()
    try:
        with pytest.raises(StoreRefused, match=f"pid {os.getpid()}"):
            await EmbeddedServer(tmp_path / "state").start()
    finally:
        await server.stop()


async def test_a_directory_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    with pytest.raises(StoreRefused, match="chmod 700"):
        await open_store(state_dir=tmp_path / "state")


async def test_a_deep_directory_gets_a_short_socket(tmp_path: Path) -> None:
    """A socket's path may have about 104 bytes."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.parent.mkdir()
    async with await open_store(state_dir=deep) as opened:
        assert opened.embedded is not None
        assert len(str(opened.embedded.socket)) <= 100
        assert opened.embedded.cli_line == f"redis-cli -s {opened.embedded.socket}"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next guardd ends the orphan")
def test_the_server_ends_with_its_guardd_also_by_sigkill(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom guardd.store.connect import open_store\n"
        "async def main():\n"
        "    opened = await open_store(state_dir=Path(sys.argv[1]))\n"
        "    print(opened.embedded.pid, flush=True)\n    await asyncio.sleep(60)\nasyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not _is_alive(pid), what=f"the end of server {pid}")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


async def test_a_pipe_that_was_closed_before_it_could_send_goes_on(embedded: Server) -> None:
    """A failover reconnects while a request has just come in: it is refused, and the next one is answered."""
    pipe = Pipe(pool_for(embedded.url), timeout_s=5)
    try:
        asked = asyncio.create_task(pipe.execute([("PING",)]))
        await asyncio.sleep(0)  # the request stands in the queue, its sender has not begun
        await pipe.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await asked
        assert await asyncio.wait_for(pipe.execute([("PING",)]), 20) == [b"PONG"]
    finally:
        await pipe.close()
