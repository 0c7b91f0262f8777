"""The client when answers are lost, daemons die, processes fork (SPEC 2.2, 5)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading

import pytest
from guardd_client import (
    AsyncGuard,
    Guard,
    GuardRequestError,
    GuardUnavailable,
)  # fmt: skip

from tests.daemons import DaemonProcess, daemon
from tests.servers import Server


async def test_a_lost_answer_is_sent_again_under_the_same_id(guard: AsyncGuard) -> None:
    """The connection breaks before the reply is read: one step, one claim."""
    run = guard.run("r")
    await run.open()
    asked = asyncio.create_task(run.before("pay", idempotency_key="k", call="call-1"))
    await asyncio.sleep(0)
    writer = guard.connection._writer
    assert writer is not None
    writer.transport.abort()
    assert (await asked).action == "execute"
    assert (await run.inspect())["counters"]["steps"] == 1
    assert (await run.after("call-1", "progress")).action == "continue"


async def test_a_daemon_that_is_killed_and_started_again_goes_on_in_the_middle_of_a_run(
    guard: AsyncGuard, served: DaemonProcess
) -> None:
    run = guard.run("r", limits={"max_steps": 2})
    first = await run.before("pay", idempotency_key="k")
    await served.kill()
    reported = asyncio.create_task(run.after(first["call"], "progress", value=1))
    await asyncio.sleep(0.1)
    await served.restart()
    assert (await reported).action == "continue"
    assert (await run.before("pay", idempotency_key="k")).action == "replay"
    await run.before("t")
    assert (await run.before("u")).reason == "step_cap"


async def test_two_clients_with_one_call_id_never_both_run(guard: AsyncGuard, served: DaemonProcess) -> None:
    async with AsyncGuard(served.url) as other:
        first = await guard.run("r").before("pay", idempotency_key="k", call="one-id")
        second = await other.run("r").before("pay", idempotency_key="k", call="one-id")
        assert (first.action, second.action, second.reason) == ("execute", "wait", "in_flight")
        await guard.run("r").before("t", call="another-id")
        with pytest.raises(GuardRequestError, match="call_conflict"):
            await other.run("r").before("t", call="another-id")


async def test_without_a_daemon_no_tool_runs_but_read_only_ones_that_are_allowed() -> None:
    """SPEC 5: fail closed; read-only tools by choice, counted."""
    ran: list[str] = []
    for mode in ("deny", "allow_read_only"):
        async with AsyncGuard("unix:/nowhere/guardd.sock", deadline_ms=100, on_unavailable=mode) as guard:
            run = guard.run("r")

            @run.tool(read_only=True)
            async def read() -> None:
                ran.append("read")

            @run.tool()
            async def write() -> None:
                ran.append("write")

            for tool in (read, write):
                with contextlib.suppress(GuardUnavailable):
                    await tool()
            assert guard.unguarded == (mode == "allow_read_only")
    assert ran == ["read"]


def test_a_forked_child_has_a_connection_of_its_own(embedded: Server, prefix: str) -> None:
    """Same guard object, other client instance; both work, also when the child lets the parent's objects go."""

    async def main() -> None:
        async with daemon(embedded.url, prefix) as served:
            assert await asyncio.to_thread(fork_and_ask, served.url) == 0
            async with AsyncGuard(served.url) as guard:
                assert (await guard.call("inspect", {"run": "r"}))["counters"]["steps"] == 2

    def fork_and_ask(url: str) -> int:
        import subprocess
        import sys

        script = (
            "import os, sys\nfrom guardd_client import Guard\n"
            "guard = Guard(sys.argv[1]); run = guard.run('r')\n"
            "assert run.before('t', {'who': 'parent'}).action == 'execute'\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    assert run.before('t', {'who': 'child'}).action == 'execute'\n"
            "    import gc; gc.collect()\n"
            "    os._exit(0)\n"
            "_, status = os.waitpid(child, 0)\n"
            "assert run.inspect()['counters']['steps'] == 2\n"
            "sys.exit(os.waitstatus_to_exitcode(status))\n"
        )
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, url], check=False, env=dict(os.environ)
        ).returncode

    asyncio.run(main())


async def test_threads_share_one_sync_guard(served: DaemonProcess) -> None:
    """Any thread may call; exactly the allowed steps pass."""

    def work() -> list[str]:
        actions: list[str] = []
        with Guard(served.url) as sync:
            run = sync.run("r", limits={"max_steps": 10, "max_same_call": None, "max_denied": None})
            run.open()

            def ask(number: int) -> None:
                actions.append(run.before("t", {"n": number}).action)

            threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return actions

    actions = await asyncio.to_thread(work)
    assert sorted(actions) == ["execute"] * 10 + ["stop"] * 10
