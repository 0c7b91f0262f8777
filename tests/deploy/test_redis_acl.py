"""The ACL user of deploy/redis-acl.txt: enough for all that guardd does, and for nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from guardd.store.connect import open_store
from guardd.store.embedded import find_server
from tests.daemons import daemon
from tests.fault.story import STORY, make_guard
from tests.servers import Server

FILE = Path(__file__).resolve().parents[2] / "deploy" / "redis-acl.txt"
DEBIAN = shutil.which("redis-server")
ELSEWHERE = {
    "hget": "a run with more answered ids than it remembers",
    "zcount": "the metrics",
    "ping": "a connection that was idle",
    "wait": "durability replicated",
    "asking": "a Cluster while it moves slots",
    "cluster|slots": "a Cluster",
    "eval": "told by the server for a script that it does not know yet",
    "auth": "every connection",
    "hello": "every connection",
    "select": "a database other than 0",
}
"""Rights that the test below has no use for, and who has."""


@pytest.fixture(params=["embedded", "redis-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server whose default user is off but for looking at it."""
    if request.param == "redis-server" and DEBIAN is None:
        pytest.skip("no redis-server on PATH")
    binary = find_server() if request.param == "embedded" else Path(str(DEBIAN))
    users = tmp_path / "users.acl"
    users.write_text(FILE.read_text(encoding="utf-8").replace("CHANGE_ME", "secret"), encoding="utf-8")
    with Server.start(tmp_path, "--aclfile", str(users), binary=binary) as started:
        yield started


def as_guardd(server: Server) -> str:
    return server.url.replace("unix://", "unix://guardd:secret@")


def rights() -> set[str]:
    """The commands that the file grants."""
    return set(re.findall(r"\+(\S+)", FILE.read_text(encoding="utf-8")))


def used(client: redis.Redis) -> set[str]:
    """The commands that were sent, by the server's own count."""
    stats: dict[str, Any] = client.info("commandstats")
    return {name.removeprefix("cmdstat_") for name in stats}


def guardd(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "guardd.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)


async def test_the_user_may_do_all_that_guardd_does(server: Server, tmp_path: Path) -> None:
    """Every script, every command of an operator, events, audit; the server's ACL log stays empty."""
    async with await open_store(as_guardd(server)) as opened:
        guard = make_guard(opened.store, "guardd")
        for act in STORY.values():
            await act(guard)
        await opened.prove()
    async with daemon(as_guardd(server), "guardd", "--operator-socket", "unix:FOLDER/o.sock") as served:
        ask = f"unix:{served.folder / 'o.sock'}"
        for arguments in (
            "runs", "inspect r", "trace r", "ledger --in-doubt", "audit", "token new --role worker", "token list",
            "deny no-pay pay", "deny no-pay --remove", "forget r",
        ):  # fmt: skip
            done = guardd(*arguments.split(), "--url", ask, cwd=tmp_path)
            assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    done = guardd("doctor", "--store", as_guardd(server), "--json", cwd=tmp_path)
    assert '"fail"' not in done.stdout, done.stdout
    assert "user guardd may do what the guard does" in done.stdout
    looker = server.client()
    assert looker.acl_log() == []
    granted, sent = rights(), used(looker)
    unexpected = sent - granted - {"acl|log", "client|setinfo"}
    assert unexpected == set(), "sent without a right, beside what this test sends"
    assert granted - sent - set(ELSEWHERE) == set(), "rights that nothing needs"


async def test_the_user_may_do_nothing_else(server: Server) -> None:
    """Neither another's keys and channels, nor the server's own matters."""
    client = redis.Redis(
        unix_socket_path=str(server.socket), username="guardd", password="secret", decode_responses=True
    )
    client.hset("guardd:{x}:h", "name", "value")
    for command in (
        ("HGET", "other:key", "name"), ("HSET", "guard:x", "name", "value"), ("PUBLISH", "news", "x"),
        ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("CONFIG", "SET", "appendfsync", "no"), ("SHUTDOWN",),
        ("ACL", "SETUSER", "guardd", "+@all"), ("SCRIPT", "FLUSH"), ("SCRIPT", "KILL"),
        ("REPLICAOF", "NO", "ONE"), ("MONITOR",), ("CLIENT", "LIST"), ("EVAL", "return redis.call('get', KEYS[1])", 1, "other:key"),
    ):  # fmt: skip
        with pytest.raises(
            (redis.exceptions.NoPermissionError, redis.ResponseError), match=r"(?i)permission|can't access|NOPERM"
        ):
            client.execute_command(*command)
    client.close()


async def test_without_a_right_the_guard_says_which_file_to_read(server: Server, tmp_path: Path) -> None:
    server.client().execute_command("ACL", "SETUSER", "guardd", "-xadd")
    done = guardd("doctor", "--store", as_guardd(server), cwd=tmp_path)
    assert done.returncode == 1
    assert "the ACL user lacks a right; see docs/store.md" in done.stdout


def test_the_page_shows_the_user() -> None:
    page = (FILE.parents[1] / "docs" / "store.md").read_text(encoding="utf-8")
    shown = page.split("```\nuser guardd", 1)[1].split("```", 1)[0]
    assert f"user guardd{shown}".split() == FILE.read_text(encoding="utf-8").split()
