"""The commands, as processes: output, JSON, exit codes, the demo, and a wheel in a new environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from guardd_client import AsyncGuard

from tests.daemons import daemon
from tests.servers import Server

ROOT = Path(__file__).resolve().parents[1]


def guardd(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command."""
    return subprocess.run(
        [sys.executable, "-m", "guardd.cli.main", *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients/python'}", **environment}, timeout=120,
    )  # fmt: skip


async def test_an_operator_finds_stops_and_settles(embedded: Server, prefix: str, tmp_path: Path) -> None:
    """runs, inspect, trace, ledger, freeze, resume, resolve, deny, incident, forget, call: each as text and as JSON."""
    async with daemon(embedded.url, prefix) as served, AsyncGuard(served.url) as guard:
        run = guard.run("job", agent="w", limits={"max_same_call": 1, "max_denied": 2})
        answer = await run.before("pay", {"order": 1, "token": "hunter2"}, idempotency_key="p1")
        await run.after(answer["call"], "retryable")
        await run.before("look", {"q": "x"})
        await run.before("look", {"q": "x"})

        def ask(*arguments: str, code: int = 0) -> str:
            done = guardd(*arguments, cwd=tmp_path, GUARDD_URL=served.url)
            assert done.returncode == code, done.stderr
            json_done = (
                guardd(*arguments, "--json", cwd=tmp_path, GUARDD_URL=served.url)
                if code == 0 and arguments[0] in READS
                else None
            )
            if json_done is not None:
                json.loads(json_done.stdout)
            return done.stdout + done.stderr

        assert "job" in ask("runs")
        assert "in_doubt" in ask("inspect", "job")
        assert "look" in ask("inspect", "job")
        assert "deny same_call_repeat" in ask("trace", "job")
        assert "hunter2" not in ask("trace", "job")
        assert "p1" in ask("ledger", "--in-doubt")
        assert ask("freeze", "job", "--note", "looking") == "wait frozen\n"
        assert "frozen" in ask("runs", "--waiting")
        assert ask("resume", "job", "--change", "human_input", "--limit", "max_steps=9") == "continue\n"
        assert (
            ask("resolve", "job", "pay", "p1", "committed", "--operation-id", "tx9", "--value", '{"ok": true}')
            == "continue\n"
        )
        assert "already_committed" in ask("resolve", "job", "pay", "p1", "committed", code=1)
        assert (await run.before("pay", {"order": 1, "token": "hunter2"}, idempotency_key="p1")).value == {"ok": True}
        assert ask("deny", "inc-1", "mail.*", "--for-s", "60") == "continue\n"
        assert ask("deny", "inc-1", "--remove") == "continue\n"
        assert "stopped (incident_stop)" in ask("incident", "job", "--out", "bundle.json")
        bundle = json.loads((tmp_path / "bundle.json").read_text())
        assert bundle["state"]["run"] == "job" and bundle["trace"] and bundle["killed"]["reason"] == "incident_stop"
        assert "start a new run" in ask("resume", "job", "--change", "human_input", code=1)
        assert ask("forget", "job") == "continue\n"
        assert ask("trace", "job") == "no entries\n"
        assert "committed" in ask("inspect", "job")
        assert json.loads(ask("call", "inspect", '{"run": "job"}'))["status"] == "ended"
        assert "unknown_run" in ask("inspect", "nobody", code=1)
        assert "no JSON" in ask("call", "inspect", "{", code=2)
        assert "NAME=N" in ask("resume", "job", "--change", "human_input", "--limit", "x", code=2)


READS = ("runs", "inspect", "ledger", "trace")


async def test_labels_of_a_wrapped_command_are_shown_and_searched(embedded: Server, prefix: str, tmp_path: Path) -> None:  # fmt: skip
    async with daemon(embedded.url, prefix) as served:

        def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
            return guardd(*arguments, cwd=tmp_path, GUARDD_URL=served.url)

        made = ask("run", "--run-id", "job", "--label", "team=support", "--label", "tier=1", "--", "true")
        assert made.returncode == 0, made.stderr
        assert ask("run", "--run-id", "other", "--", "true").returncode == 0
        assert "labels     team=support tier=1" in ask("inspect", "job").stdout
        found = ask("runs", "--label", "team=support").stdout
        assert "team=support tier=1" in found and "other" not in found
        refused = ask("run", "--run-id", "x", "--label", "team", "--", "true")
        assert refused.returncode == 2 and "NAME=VALUE" in refused.stderr
        refused = ask("run", "--run-id", "y", "--label", "a b=x", "--", "true")
        assert refused.returncode != 0 and "a label's name is malformed" in refused.stderr


def test_without_a_daemon_a_command_says_what_to_do(tmp_path: Path) -> None:
    done = guardd("runs", "--url", f"unix:{tmp_path}/none.sock")
    assert done.returncode == 3
    assert "guardd serve" in done.stderr


def test_settings_are_checked_with_their_source(tmp_path: Path) -> None:
    """File, environment, flag: the later wins, and a bad value names where it stands."""
    good = tmp_path / "guardd.toml"
    good.write_text(
        'store = "fakeredis:"\n[policies.strict]\nmax_steps = 5\nmax_tokens = "unlimited"\n[tools."mail.*"]\nrequires_key = true\n'
    )
    found = json.loads(guardd("check-config", "--config", str(good), "--json", "--prefix", "x").stdout)
    assert found["policies"] == ["agent", "reference", "strict"] and found["store"] == "fakeredis:"
    for text, words in [
        ("colour = 1", "no such setting"), ("trace_max = -1", "out of range"), ('trace_max = "x"', "another kind"),
        ("[policies.x]\nmax_stepz = 1", "max_stepz"), ("[tools.x]\ncolour = 1", "tools.x"), ("= broken", "cannot be read"),
        ('default_policy = "none"', "no such policy"),
    ]:  # fmt: skip
        good.write_text(text)
        done = guardd("check-config", "--config", str(good))
        assert done.returncode == 2, text
        assert words in done.stderr, done.stderr
    done = guardd("check-config", GUARDD_TRACE_MAX="many")
    assert "GUARDD_TRACE_MAX" in done.stderr


def test_init_writes_settings_that_check(tmp_path: Path) -> None:
    """Every setting, commented, with unit and default; a second time nothing is overwritten."""
    assert guardd("init", cwd=tmp_path).returncode == 0
    assert guardd("check-config", cwd=tmp_path).returncode == 0
    text = (tmp_path / "guardd.toml").read_text()
    assert "# store_timeout_ms = 2000" in text
    (tmp_path / "guardd.toml").write_text(
        "\n".join(
            line.removeprefix("# ") if " = " in line or line.startswith("# [") else line for line in text.splitlines()
        )
    )
    assert guardd("check-config", cwd=tmp_path).returncode == 0, "every commented line is a valid one"
    assert guardd("init", cwd=tmp_path).returncode == 2


def test_run_starts_a_guard_around_a_command_and_ends_with_the_envelope(tmp_path: Path) -> None:
    """GUARDD_URL and GUARDD_RUN_ID are set; the exit code is the command's."""
    script = (
        "import os, sys\nfrom guardd_client import Guard, Refused\nrun = Guard().run()\n"
        "assert run.run_id == os.environ['GUARDD_RUN_ID']\n"
        "try:\n    [run.tool('t')(lambda q: q)('x') for _ in range(9)]\nexcept Refused as refused:\n    sys.exit(7)\n"
    )
    done = guardd("run", "--run-id", "wrapped", "--", sys.executable, "-c", script, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert "wrapped" in done.stderr and "steps=3" in done.stderr


def test_the_demo_shows_what_it_says() -> None:
    """Real processes; it fails by itself when the guard misbehaves."""
    done = guardd("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all four as they should be\n")
    assert "deny short_cycle" in done.stdout and "paid outside: 1 time" in done.stdout


def test_version_and_help() -> None:
    assert json.loads(guardd("version", "--json").stdout)["version"]
    assert "exit codes" in guardd("--help").stdout


@pytest.mark.xdist_group("wheels")
def test_the_wheels_work_in_a_new_environment(tmp_path: Path) -> None:
    """Built, installed without this checkout, and the demo runs: lua/ is shipped."""
    for project in (ROOT / "clients/python", ROOT):
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(project)],
            check=True, cwd=tmp_path,
        )  # fmt: skip
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "new")], check=True)
    python = tmp_path / "new/bin/python"
    wheels = [str(path) for path in tmp_path.glob("guardd*.whl")]
    assert len(wheels) == 2
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *wheels],
        check=True,
        cwd=tmp_path,
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(tmp_path / "new/bin/guardd"), "demo"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
