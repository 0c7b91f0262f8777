"""`guardd doctor` on stores as operators have them (SPEC 5)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import Server
from tests.topologies import Replicated, Sentinels

Findings = dict[str, tuple[str, str]]


def doctor(folder: Path, *options: str) -> tuple[int, list[dict[str, str]]]:
    command = [sys.executable, "-m", "guardd.cli.main", "doctor", "--json", *options]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert said.stdout, said.stderr
    return said.returncode, json.loads(said.stdout)


def named(findings: list[dict[str, str]], name: str) -> list[tuple[str, str]]:
    return [(finding["level"], finding["text"]) for finding in findings if finding["name"] == name]


def test_the_embedded_store_promises_the_most(tmp_path: Path) -> None:
    """Everything is looked at, nothing is left behind."""
    code, findings = doctor(tmp_path)
    assert code == 0
    assert {finding["level"] for finding in findings} == {"ok"}
    assert named(findings, "promise") == [
        (
            "ok",
            "an acknowledged grant or result survives kill -9 and power loss of this machine, as far as the disk honours fsync",
        )
    ]
    assert "SHA-256 " in named(findings, "server binary")[0][1]
    assert {"not promised", "script round trip", "rights", "clock", "canary"} <= {each["name"] for each in findings}
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_evicts_is_refused_with_the_cure(tmp_path: Path) -> None:
    with Server.start(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        code, findings = doctor(tmp_path, "--store", server.url)
        assert code == 1
        ((level, text),) = named(findings, "maxmemory-policy")
        assert level == "fail"
        assert "CONFIG SET maxmemory-policy noeviction" in text
        server.client().config_set("maxmemory-policy", "noeviction")
        assert doctor(tmp_path, "--store", server.url)[0] == 0


def test_everysec_is_told_what_it_does_not_promise(tmp_path: Path) -> None:
    with Server.start(tmp_path, "--appendonly", "yes", "--appendfsync", "everysec") as server:
        code, findings = doctor(tmp_path, "--store", server.url)
        assert code == 0
        assert "up to about 1 s (more on a slow disk) is lost at power loss" in named(findings, "promise")[0][1]
        code, findings = doctor(tmp_path, "--store", server.url, "--durability", "fsync")
        assert code == 1
        assert "CONFIG SET appendfsync always" in named(findings, "appendfsync")[0][1]


def test_a_replica_is_refused(tmp_path: Path) -> None:
    with Replicated.start(tmp_path, 1) as them:
        code, findings = doctor(tmp_path, "--store", them.replica_urls[0])
        assert code == 1
        assert "name its primary in the store URL" in named(findings, "store")[0][1]


def test_a_sentinel_set_says_how_it_may_lose(tmp_path: Path) -> None:
    """In sync: the risk without WAIT. Out of sync: that, too; and replicated is refused."""
    with Sentinels.start(tmp_path, 1) as them:
        _, findings = doctor(tmp_path, "--store", them.url)
        warned = " ".join(text for _, text in named(findings, "configuration"))
        assert "set durability replicated" in warned
        assert "min-replicas-to-write is 0" in warned
        assert "in sync" not in warned
        code, findings = doctor(tmp_path, "--store", them.url, "--durability", "replicated")
        assert code == 0
        assert "Redis itself gives no proof" in named(findings, "promise")[0][1]
        next(node for node in them.servers if node is not them.primary()).kill()
        code, findings = doctor(tmp_path, "--store", them.url, "--durability", "replicated")
        assert code == 1
        assert "0 of 1 replicas are in sync, durability replicated needs 1" in named(findings, "durability")[0][1]
        _, findings = doctor(tmp_path, "--store", them.url)
        assert any("0 of 1 replicas are in sync" in text for _, text in named(findings, "configuration"))


def test_a_cache_beside_the_guard_is_seen(tmp_path: Path) -> None:
    with Server.start(tmp_path) as server:
        server.client().set("session:1", "somebody else's")
        _, findings = doctor(tmp_path, "--store", server.url)
        ((level, text),) = named(findings, "other keys")
        assert level == "warn"
        assert "session:1" in text


def test_a_missing_right_is_named(tmp_path: Path) -> None:
    with Server.start(tmp_path) as server:
        server.client().execute_command("ACL", "SETUSER", "low", "on", ">pw", "~*", "&*", "+@all", "-zadd")
        code, findings = doctor(tmp_path, "--store", f"unix://low:pw@{server.socket}")
        assert code == 1
        ((level, text),) = named(findings, "rights")
        assert level == "fail"
        assert text.startswith("NOPERM: the ACL user lacks a right")


def test_an_open_state_directory_is_a_failure(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    with Server.start(tmp_path) as server:
        code, findings = doctor(tmp_path, "--store", server.url, "--state-dir", str(state))
        assert code == 1
        assert "chmod 700" in named(findings, "state directory")[0][1]


def test_a_store_out_of_reach_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "guardd.cli.main", "doctor", "--store", "unix:///nowhere.sock"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert said.returncode == 3
    assert "is the server up?" in said.stderr


@pytest.mark.parametrize("kind", ["unix", "embedded"])
def test_a_store_that_was_flushed_is_seen_by_what_the_state_directory_knows(tmp_path: Path, kind: str) -> None:
    """As after a night: the daemon is down, the operator looks before starting it again."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    with Server.start(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as server:
        url = server.url if kind == "unix" else "embedded:"
        store = () if kind == "embedded" else ("--store", url)
        options = (*store, "--state-dir", str(state))
        if kind == "embedded":
            folder = state / "store"
            folder.mkdir(mode=0o700)
            (folder / "store.sock").symlink_to(server.socket)
        assert doctor(tmp_path, *options)[0] == 0
        server.client().flushall()
        code, findings = doctor(tmp_path, *options)
        assert code == 1
        ((level, text),) = named(findings, "canary")
        assert level == "fail"
        assert "guardd doctor --confirm" in text
