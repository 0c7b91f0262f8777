"""An incident becomes a test: export, replay as it was, replay under another limit, a scenario file of it."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from guardd_client import AsyncGuard

from guardd.engine.core import Engine
from tests.daemons import DaemonProcess, daemon
from tests.servers import Server
from tests.unit.test_redaction import SECRETS

FREE = {"max_no_progress": None}
TOOLS = """
[tools.edit]
target_args = ["path"]
max_same_target = 3
[tools.poll]
progress = {pointer = "/done", when = "increases"}
[tools.look]
read_only = true
"""


@pytest.fixture
async def served(embedded: Server, prefix: str, tmp_path: Path) -> AsyncIterator[DaemonProcess]:
    (tmp_path / "guardd.toml").write_text(TOOLS, encoding="utf-8")
    async with daemon(embedded.url, prefix, "--config", str(tmp_path / "guardd.toml")) as running:
        yield running


async def guardd(*arguments: object, code: int = 0) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "guardd.cli.main", *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == code, said.decode()
    return said.decode()


async def exported(served: DaemonProcess, run: str, folder: Path) -> Path:
    file = folder / f"{run}.trace.json"
    said = await guardd("trace", run, "--export", file, "--url", served.url)
    assert f"wrote {file}" in said
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return file


# ---- Stories ---------------------------------------------------------------------------


async def circle(guard: AsyncGuard) -> None:
    """A B A B, with a sub-run, until the rule ends it."""
    run, below = guard.run("r", limits={"max_denied": 1}), guard.run("r/sub", agent="s", limits={"max_steps": 5})
    answer = await below.before("look", {"q": 1})
    await below.after(answer["call"], "progress", value="found")
    for number in range(8):
        answer = await run.before(("draft", "review")[number % 2], {"file": "plan.md"}, agent="ab"[number % 2])
        if answer.action == "stop":
            return
        await run.after(answer["call"], "progress", value=number, usage={"tokens": 100})


async def budget(guard: AsyncGuard) -> None:
    """Model calls are charged with reservations until the tokens are used up; then a person raises the limit."""
    run = guard.run("r", limits={**FREE, "max_tokens": 1000})
    for number in range(3):
        op = f"m{number}"
        answer = await guard.call("charge", {"run": "r", "op_id": op, "reserve": {"tokens": 400, "model_calls": 1}})
        if answer.action == "continue":
            await guard.call("settle", {"run": "r", "op_id": op, "usage": {"tokens": 390, "model_calls": 1}})
        answer = await run.before("look", {"n": number}, usage={"tokens": 60})
        if answer.action == "execute":
            await run.after(answer["call"], "progress", value="x")
    await guard.call("resume", {"run": "r", "change": "limits_raised", "limits": {"max_tokens": 5000}})
    answer = await run.before("look", {"n": 9})
    await run.after(answer["call"], "complete", value="done")


async def refund(guard: AsyncGuard) -> None:
    """Effects: in doubt, replayed, freed, retried; the agent insists and is stopped."""
    run = guard.run("r", agent="s", limits={**FREE, "max_denied": 2})
    answer = await run.before("refund", {"order": 1}, idempotency_key="o1")
    await run.after(answer["call"], "progress", value={"id": 7}, operation_id="tx1")
    assert (await run.before("refund", {"order": 1}, idempotency_key="o1")).action == "replay"
    answer = await run.before("refund", {"order": 2}, idempotency_key="o2")
    await run.after(answer["call"], "retryable", side_effect_committed=False)
    answer = await run.before("refund", {"order": 2}, idempotency_key="o2", retry="strategy_changed")
    await run.after(answer["call"], "retryable")
    for _ in range(2):
        answer = await run.before("refund", {"order": 2}, idempotency_key="o2")
    assert (answer.action, answer.reason) == ("stop", "in_doubt")


async def editing(guard: AsyncGuard) -> None:
    """One target with ever new arguments, some of them secret or long; then a handoff circle and a frozen while."""
    run = guard.run("r", agent="e", limits={**FREE, "max_denied": 3})
    for number in range(4):
        answer = await run.before("edit", {"path": "a.txt", "text": str(number) * 3000, "password": f"hunter{number}"})
        if answer.action == "execute":
            await run.after(answer["call"], "progress", value="ok")
    assert answer.reason == "same_target_repeat"
    for number, (giver, receiver) in enumerate((("a", "b"), ("b", "a"), ("a", "b"), ("b", "a"))):
        await guard.call("handoff", {"run": "r", "op_id": f"h{number}", "from": giver, "to": receiver, "state": "same"})
    await guard.call("freeze", {"run": "r", "scope": "effects"})
    assert (await run.before("pay", {"n": 1}, idempotency_key="p")).reason == "frozen"
    await guard.call("kill", {"run": "r", "reason": "incident_stop"})


async def polling(guard: AsyncGuard) -> None:
    """Progress that is read from results; it stalls, and rounds without progress end the run."""
    run = guard.run("r", agent="p", limits={"max_no_progress": 3, "max_same_call": None})
    for done in (1, 2, 3, 3, 3, 3, 3):
        answer = await run.before("poll", {"job": 1})
        if answer.action == "stop":
            return
        await run.after(answer["call"], "progress", value={"done": done})


async def forbidden(guard: AsyncGuard) -> None:
    """A deny rule that comes and goes, a blank result, a broken one, a run that waits for a person."""
    run = guard.run("r", agent="f", limits={**FREE, "max_empty": 2, "max_denied": 3})
    for _ in range(3):
        answer = await run.before("search", {"q": "x"})
        if answer.action == "execute":
            await run.after(answer["call"], "progress", value="  ")
    assert answer.reason == "empty_result"
    await guard.call("deny_rule", {"id": "inc", "tool": "pay*"})
    assert (await run.before("pay", {"n": 1})).reason == "policy_blocked"
    await guard.call("deny_rule", {"id": "inc", "remove": True})
    answer = await run.before("pay", {"n": 1})
    await run.after(answer["call"], "human_required")
    assert (await run.before("pay", {"n": 2})).reason == "human_required"


STORIES = [circle, budget, refund, editing, polling, forbidden]


@pytest.mark.parametrize("story", STORIES)
async def test_a_trace_plays_as_it_was(story: Any, served: DaemonProcess, tmp_path: Path) -> None:
    """Every answer, the executions and the terminal reason; and so does the scenario that is made of it."""
    async with AsyncGuard(served.url) as guard:
        await story(guard)
    file = await exported(served, "r", tmp_path)
    assert "1 scenarios, 0 failing" in await guardd("replay", file)
    made = tmp_path / "r.scenario.json"
    await guardd("scenario", "from-trace", file, "-o", made, "--title", story.__name__)
    assert json.loads(made.read_text())["title"] == story.__name__
    assert "1 scenarios, 0 failing" in await guardd("replay", made)
    assert "1 scenarios, 0 failing" in await guardd("replay", made, "--through-daemon")


@pytest.mark.parametrize(
    ("story", "change", "first"),
    [
        (
            circle,
            "max_cycle_period=1",
            "expected action=stop reason=short_cycle [period 2, steps 2, 3, 4]\n    actual   action=execute",
        ),
        (
            budget,
            "max_tokens=10000",
            "expected action=deny reason=token_cap [1300 of 1000]\n    actual   action=continue",
        ),
        (polling, "max_no_progress=2", "expected action=continue\n    actual   action=stop reason=no_progress"),
        (refund, "max_denied=9", "expected action=stop reason=in_doubt\n    actual   action=deny reason=in_doubt"),
    ],
)
async def test_under_another_limit_it_differs_and_says_where(
    story: Any, change: str, first: str, served: DaemonProcess, tmp_path: Path
) -> None:
    async with AsyncGuard(served.url) as guard:
        await story(guard)
    file = await exported(served, "r", tmp_path)
    said = await guardd("replay", file, "--set", change, code=1)
    assert first in said
    assert said.count("expected") == 1, "the first difference; what follows from it is only counted"
    assert "1 scenarios, 1 failing" in said


async def test_an_export_holds_no_secret(served: DaemonProcess, tmp_path: Path) -> None:
    async with AsyncGuard(served.url) as guard:
        run = guard.run("r", agent="a", limits={**FREE, "max_same_call": None, "max_steps": None})
        for secret in SECRETS:
            answer = await run.before("send", {"text": f"use {secret} now", "api_key": secret})
            await run.after(answer["call"], "progress", value={"echo": secret})
    text = (await exported(served, "r", tmp_path)).read_text(encoding="utf-8")
    assert [secret for secret in SECRETS if secret in text] == []


async def test_a_trace_without_its_beginning_is_not_played(embedded: Server, prefix: str, tmp_path: Path) -> None:
    async with daemon(embedded.url, prefix, "--trace-max", "10") as served, AsyncGuard(served.url) as guard:
        run = guard.run("r", agent="a", limits={**FREE, "max_steps": None})
        for number in range(300):
            await run.before("look", {"n": number})
        file = tmp_path / "cut.json"
        assert "cannot be played from its start" in await guardd("trace", "r", "--export", file, "--url", served.url)
    assert "the oldest entries were dropped" in await guardd("replay", file, code=2)


async def test_an_incident_file_plays_too(served: DaemonProcess, tmp_path: Path) -> None:
    async with AsyncGuard(served.url) as guard:
        run = guard.run("r", agent="a", limits=FREE)
        await run.before("mail", {"n": 1})
    file = tmp_path / "incident.json"
    await guardd("incident", "r", "--out", file, "--url", served.url)
    assert "1 scenarios, 0 failing" in await guardd("replay", file)


async def test_a_kill_by_hand_is_played(served: DaemonProcess, embedded: Server, tmp_path: Path) -> None:
    async with AsyncGuard(served.url) as guard:
        run = guard.run("r", agent="a", limits=FREE)
        await run.before("mail", {"n": 1})
        embedded.client().hset(f"{served.prefix}:{{r}}:run", "kill", "incident_stop")
        assert (await run.before("mail", {"n": 2})).action == "stop"
    file = await exported(served, "r", tmp_path)
    assert "1 scenarios, 0 failing" in await guardd("replay", file)


async def test_only_rules_that_decide_are_exported(make_guard: Callable[..., Engine]) -> None:
    """Of the tools in the trace; a policy's defaults for reading tools are written out."""
    guard = make_guard(
        tools={"look": {"read_only": True, "redact": ["q"]}, "edit": {"max_same_call": 7}, "other": {"max_empty": 1}}
    )
    for number, tool in enumerate(("look", "edit", "plain")):
        await guard.call("before", {"at_ms": number, "run": "r", "call": tool, "tool": tool})
    document = await guard.call("export", {"run": "r"})
    assert isinstance(document, dict)
    assert (document["format"], document["is_whole"], len(document["entries"])) == ("guardd-trace/1", True, 3)
    assert document["tools"]["edit"] == {"max_same_call": 7}
    assert document["tools"]["look"]["read_only"] is True
    assert set(document["tools"]) == {"look", "edit"}


async def test_a_sub_run_names_its_root(served: DaemonProcess, tmp_path: Path) -> None:
    async with AsyncGuard(served.url) as guard:
        await guard.run("r/s", agent="a").before("mail", {"n": 1})
    said = await guardd("trace", "r/s", "--export", tmp_path / "x.json", "--url", served.url, code=1)
    assert "limit='r'" in said
