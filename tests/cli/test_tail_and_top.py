"""`guardd tail` as a process, `guardd top` by textual's pilot, against a real daemon."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from guardd_client import AsyncGuard
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from guardd.cli.show import harmless
from guardd.cli.top import Ask, Top
from tests.daemons import DaemonProcess, daemon
from tests.servers import Server

FREE = {"max_no_progress": None, "max_same_call": None}


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[DaemonProcess]:
    async with daemon(embedded.url, prefix) as running:
        yield running


class Tail:
    """A running `guardd tail`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        """The next line; fails when none comes."""
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode()


async def tail(url: str, *arguments: str) -> Tail:
    return Tail(
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "guardd.cli.main", "tail", "--url", url, *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )
    )  # fmt: skip


async def loop(guard: AsyncGuard, name: str) -> None:
    run = guard.run(name, limits={"max_denied": 1}, labels={"team": "support"})
    for number in range(8):
        answer = await run.before(("draft", "review")[number % 2], {"file": "plan.md"}, agent=("planner", "critic")[number % 2])  # fmt: skip
        if answer.action == "stop":
            return
        await run.after(answer["call"], "progress", value=1)
    raise AssertionError("it was not stopped")


# ---- tail ------------------------------------------------------------------------------


async def test_tail_follows_a_run_to_its_end(served: DaemonProcess) -> None:
    """What was there last, then what comes; it ends with the run."""
    async with AsyncGuard(served.url) as guard:
        run = guard.run("r", agent="a", limits=FREE)
        for number in range(5):
            await run.before("old", {"n": number})
        following = await tail(served.url, "r", "-n", "2", "--until-end", "--json")
        assert [json.loads(await following.line())["args"] for _ in range(2)] == ['{"n":3}', '{"n":4}']
        await run.before("new", {"secret_key": "AKIAIOSFODNN7EXAMPLE"})
        line = await following.line()
        assert json.loads(line)["tool"] == "new"
        assert "AKIAIOSFODNN7EXAMPLE" not in line
        await guard.call("kill", {"run": "r", "reason": "incident_stop"})
        assert json.loads(await following.line())["op"] == "kill"
        assert await asyncio.wait_for(following.process.wait(), 30) == 0


async def test_tail_of_all_runs_survives_a_restart(served: DaemonProcess) -> None:
    following = await tail(served.url)
    async with AsyncGuard(served.url) as guard:

        async def heard(name: str) -> str:
            """Kills until it is told: the subscription may come after the first."""
            line = asyncio.create_task(following.line())
            for number in range(200):
                await guard.call("kill", {"run": f"{name}-{number}", "reason": "incident_stop"})
                done, _ = await asyncio.wait([line], timeout=0.2)
                if done:
                    break
            return await line

        first = await heard("one")
        assert "ended" in first
        assert "reason=incident_stop" in first
        await served.kill()
        assert following.process.stderr is not None
        assert b"trying again" in await asyncio.wait_for(following.process.stderr.readline(), 60)
        await served.restart()
        assert b"connected to" in await asyncio.wait_for(following.process.stderr.readline(), 60)
        for _ in range(250):
            if "two-" in await heard("two"):
                break
        following.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(following.process.wait(), 30) == 130


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert harmless("a\x1b[2Jb\x9b0m\r\u202ec\n") == "a\\x1b[2Jb\\x9b0m\\r\\u202ec\n"


# ---- top -------------------------------------------------------------------------------


async def until(pilot: Pilot[Any], condition: Any, what: str) -> None:
    """Looks again until it is so."""
    for _ in range(600):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError(what)


def cells(app: Top, column: int = 0) -> list[str]:
    table = app.screen.query_one(DataTable)
    return [str(table.get_row_at(row)[column]) for row in range(table.row_count)]


async def test_top_shows_a_loop_and_kills_a_run(served: DaemonProcess) -> None:
    """In 80 x 24: the list is live, the block is marked, a kill asks why and is carried out."""
    async with AsyncGuard(served.url) as guard, AsyncGuard(served.url) as agent:
        app = Top(guard)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.screen.query(DataTable), "the list")
            await loop(agent, "ticket-42")
            run = agent.run("task", agent="a", limits=FREE)
            assert (await run.before("look", {"n": 1})).action == "execute"
            await until(pilot, lambda: cells(app) == ["task", "ticket-42"], "both runs")
            assert cells(app, 2)[1] == "short_cycle"
            await pilot.press("down", "enter")
            await until(pilot, lambda: ">>" in cells(app), "the refusal")
            assert [mark.strip() for mark in cells(app)] == ["", "*", "*", "*", ">>"]
            head = str(app.screen.query_one("#head", Static).content)
            assert "fired: rule short_cycle" in head
            assert "steps        [#" in head
            await pilot.press("escape", "up", "enter")
            await until(pilot, lambda: "task" in str(app.screen.query_one("#head", Static).content), "the other run")
            await pilot.press("k")
            await until(pilot, lambda: isinstance(app.screen, Ask), "the question")
            await pilot.press("enter")
            await until(pilot, lambda: "please say" in str(app.screen.query_one("#ask-error", Static).content), "a reason is demanded")  # fmt: skip
            assert (await run.before("look", {"n": 2})).action == "execute"
            await pilot.press(*"mails", "enter")
            await until(pilot, lambda: not isinstance(app.screen, Ask), "the kill")
            answer = await run.before("look", {"n": 3})
            assert (answer.action, answer.reason) == ("stop", "incident_stop")


async def test_top_settles_an_effect(served: DaemonProcess) -> None:
    async with AsyncGuard(served.url) as guard, AsyncGuard(served.url) as agent:
        run = agent.run("refund-7", agent="s", limits=FREE)
        answer = await run.before("refund", {"order": 17}, idempotency_key="order-17")
        await run.after(answer["call"], "retryable")
        app = Top(guard)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.screen.query(DataTable), "the list")
            await pilot.press("d")
            await until(pilot, lambda: app.screen.query("#doubts") and cells(app) == ["order-17"], "the doubt")
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, Ask), "the question")
            await pilot.press(*"looked", "enter")
            await until(pilot, lambda: not isinstance(app.screen, Ask) and cells(app) == [], "it is settled")
        assert (await run.before("refund", {"order": 17}, idempotency_key="order-17")).action == "execute"


async def test_top_says_when_the_daemon_is_away(served: DaemonProcess) -> None:
    async with AsyncGuard(served.url, deadline_ms=500) as guard:
        app = Top(guard)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.screen.query(DataTable), "the list")
            await served.stop()
            await until(pilot, lambda: "gave no answer" in app.sub_title, "the sentence")
            await served.restart()
            await until(pilot, lambda: app.sub_title == "", "it is back")
