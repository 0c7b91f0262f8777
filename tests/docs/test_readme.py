"""The commands of README and docs are run, and print what the text says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.store.base import Store
from tests.servers import Server

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n```(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)
COMMANDS = {found["command"]: found["output"] or "" for found in BLOCK.finditer(README)}


def test_the_replay_that_the_readme_shows_prints_what_it_says() -> None:
    """Word for word, on a real server."""
    command = next(command for command in COMMANDS if " replay --show " in command)
    arguments = command.split()[1:]
    done = subprocess.run(
        [sys.executable, "-m", "guardd.cli.main", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == COMMANDS[command].strip()


def test_the_demo_prints_what_the_readme_shows() -> None:
    """But for times and for which of two workers is faster. `make demo` itself is run by .ci/run."""
    done = subprocess.run(
        [sys.executable, "-m", "guardd.cli.main", "demo"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")

    def masked(text: str) -> list[str]:
        return [re.sub(r"worker-[12] *|[\d.]+ ms|\d+ calls", "*", line) for line in text.strip().splitlines()]

    said = masked(COMMANDS["make demo"])
    assert masked(done.stdout)[: len(said)] == said


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """Under `guardd run`, in a folder of its own."""
    command = next(command for command in COMMANDS if command.startswith("guardd run"))
    example = str(ROOT / "examples/refund_agent.py")
    arguments = [
        {"python": sys.executable, "examples/refund_agent.py": example}.get(word, word) for word in command.split()[1:]
    ]
    done = subprocess.run(
        [sys.executable, "-m", "guardd.cli.main", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == COMMANDS[command].strip()
    assert "ended      loop_blocked: same_call_repeat" in done.stderr


def test_the_number_of_scenarios_is_the_one_that_make_replay_counts() -> None:
    """`make replay` itself is run by .ci/run."""
    files = list((ROOT / "tests/scenarios").glob("*.json"))
    assert COMMANDS["make replay"] == "" and f"{len(files)} scenarios, 0 failing" in README


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="needs the distribution's redis-cli")
async def test_a_run_reads_well_in_redis_cli_and_a_word_by_hand_stops_it(embedded: Server, real: Store) -> None:
    """SPEC 2.8: HSET ... kill stops the run at its next call, its sub-runs included."""
    await real.execute(("DEL", "guardd:{run_42}:run", "guardd:{run_42}:calls", "guardd:{run_42}:marks"))
    guard = Engine(real, EngineConfig())
    for call in ("a", "b"):
        answer = await guard.call("before", {"run": "run_42", "call": call, "tool": "search", "args": {"q": "x"}})
        assert answer.action == "execute"
    show, kill = (command for command in COMMANDS if command.startswith("redis-cli"))

    def by_hand(command: str) -> str:
        line = command.replace('"$SOCKET"', str(embedded.socket))
        return subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout

    shown = by_hand(show).splitlines()
    fields = dict(zip(shown[::2], shown[1::2], strict=True))
    said = COMMANDS[show].splitlines()
    for name, value in zip(said[::2], said[1::2], strict=True):
        assert name in fields
        if name in ("status", "policy", "steps"):
            assert fields[name] == value
    assert fields["limits"].startswith("max_steps=60 max_wall_ms=900000 max_same_call=3")
    assert re.fullmatch(r"1:\S{16} 2:\S{16}", fields["recent"])

    by_hand(kill)
    for run in ("run_42/deep", "run_42"):
        stopped = await guard.call("before", {"run": run, "call": f"c-{run}", "tool": "search"})
        assert (stopped.action, stopped.reason) == ("stop", "incident_stop")
    assert stopped.envelope["status"] == "loop_blocked"
    by_hand("redis-cli -s \"$SOCKET\" HSET 'guardd:{run_43}:run' freeze all")
    frozen = await guard.call("before", {"run": "run_43", "call": "d", "tool": "search"})
    assert (frozen.action, frozen.reason) == ("wait", "frozen")
    by_hand("redis-cli -s \"$SOCKET\" HDEL 'guardd:{run_43}:run' freeze")
    assert (await guard.call("before", {"run": "run_43", "call": "d", "tool": "search"})).action == "execute"


def test_every_link_of_the_readme_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
