"""The Python client against a real daemon: wrapper, exceptions, replays, restarts, forks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from guardd_client import (
    Answer,
    AsyncGuard,
    Guard,
    RunLost,
    RunStopped,
    ToolDenied,
    ToolMustWait,
)  # fmt: skip
from guardd_client.tools import bind_arguments, key_of

from tests.daemons import DaemonProcess, daemon
from tests.servers import Server


async def in_thread(function: Any, *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


async def states(guard: AsyncGuard, run: str) -> dict[str, str]:
    """Effects of a run by key."""
    return {effect["key"]: effect["state"] for effect in (await guard.call("inspect", {"run": run}))["operations"]}


# ---- The wrapper ---------------------------------------------------------------------


async def test_an_effect_runs_once_and_is_replayed(guard: AsyncGuard) -> None:
    """One decorator: key from arguments, result replayed as it was."""
    ran: list[tuple[str, int]] = []
    run = guard.run("r", agent="w")

    @run.tool(key=["order"])
    async def refund(order: str, cents: int = 5) -> dict[str, Any]:
        ran.append((order, cents))
        return {"order": order, "parts": [1, 2.5, None]}

    first = await refund("a")
    assert await refund("a") == first == {"order": "a", "parts": [1, 2.5, None]}
    await refund("b", cents=7)
    assert ran == [("a", 5), ("b", 7)]
    assert await states(guard, "r") == {'["a"]': "committed", '["b"]': "committed"}


async def test_a_loop_is_refused_as_an_exception_and_as_a_value(guard: AsyncGuard) -> None:
    run = guard.run("r", limits={"max_same_call": 1, "max_denied": 3})

    @run.tool()
    async def look(q: str) -> str:
        return q

    @run.tool("look", refusals="return")
    async def look_softly(q: str) -> Any:
        return q

    await look("x")
    with pytest.raises(ToolDenied, match="change the arguments") as caught:
        await look("x")
    assert (caught.value.answer.reason, caught.value.hint) == ("same_call_repeat", caught.value.answer.hint)
    answer = await look_softly("x")
    assert isinstance(answer, Answer) and answer.evidence["limit"] == 1
    with pytest.raises(RunStopped) as ended:
        await look("x")
    assert ended.value.envelope["next_action"] == "resume_after_change"
    assert run.cancelled.is_set()


@pytest.mark.parametrize(
    ("error", "state"),
    [(ValueError("nothing was sent"), None), (RuntimeError("boom"), "in_doubt"), (TimeoutError(), "in_doubt")],
)
async def test_an_exception_leaves_an_effect_in_doubt_unless_it_proves_that_nothing_was_sent(
    error: Exception, state: str | None, guard: AsyncGuard
) -> None:
    """SPEC 2.6: not_executed names the proofs."""
    run = guard.run("r")

    @run.tool(key=lambda order: order, not_executed=[ValueError])
    async def refund(order: str) -> None:
        raise error

    with pytest.raises(type(error)):
        await refund("a")
    found = await states(guard, "r")
    assert found.get("a") in ({None: {"freed"}, "in_doubt": {"in_doubt"}}[state] | ({None} if state is None else set()))
    with pytest.raises(ToolDenied if state else type(error)):
        await refund("a")


async def test_a_cancelled_tool_leaves_its_effect_in_doubt(guard: AsyncGuard) -> None:
    run, started = guard.run("r"), asyncio.Event()

    @run.tool(key=["order"])
    async def refund(order: str) -> None:
        started.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(refund("a"))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await states(guard, "r") == {'["a"]': "in_doubt"}


async def test_a_generator_that_is_closed_early_leaves_its_effect_in_doubt(
    guard: AsyncGuard, served: DaemonProcess
) -> None:
    """And one that runs to its end commits; a replay yields the same items."""
    run = guard.run("r")

    @run.tool(key=["n"])
    async def send(n: int) -> Any:
        for i in range(n):
            yield i

    assert [i async for i in send(3)] == [0, 1, 2]
    assert [i async for i in send(3)] == [0, 1, 2]
    stream = send(5)
    assert await anext(stream) == 0
    await stream.aclose()
    assert await states(guard, "r") == {"[3]": "committed", "[5]": "in_doubt"}

    def sync_side() -> list[int]:
        with Guard(served.url) as sync:
            other = sync.run("r2")

            @other.tool(key=["n"])
            def send(n: int) -> Any:
                yield from range(n)

            closed = send(4)
            next(closed)
            closed.close()
            return [*send(2), *send(2)]

    assert await in_thread(sync_side) == [0, 1, 0, 1]
    assert await states(guard, "r2") == {"[4]": "in_doubt", "[2]": "committed"}


async def test_a_claim_is_renewed_while_its_tool_runs(guard: AsyncGuard) -> None:
    """The tool takes longer than two leases; nobody else gets its key, and it commits."""
    run = guard.run("r", limits={"claim_lease_ms": 1500})

    @run.tool(key=["order"], lease_ms=1500)
    async def refund(order: str) -> str:
        await asyncio.sleep(3.5)
        return "done"

    task = asyncio.create_task(refund("a"))
    await asyncio.sleep(2.5)
    with pytest.raises(ToolMustWait) as caught:
        await refund("a")
    assert (caught.value.answer.reason, 0 < (caught.value.retry_after_ms or 0) <= 1500) == ("in_flight", True)
    assert await task == "done"
    assert await states(guard, "r") == {'["a"]': "committed"}


async def test_a_function_gets_the_provider_key_and_the_cancellation_it_asks_for(guard: AsyncGuard) -> None:
    run, seen = guard.run("r"), {}

    @run.tool(key=["order"])
    async def refund(order: str, provider_key: str, cancelled: asyncio.Event) -> str:
        seen["key"], seen["cancelled"] = provider_key, cancelled
        return "ok"

    await refund("a")
    assert seen["key"].startswith("guardd-")
    await guard.call("kill", {"run": "r"})
    await asyncio.wait_for(seen["cancelled"].wait(), 5)


async def test_verify_settles_a_doubt_where_the_tool_rule_allows_it(
    embedded: Server, prefix: str, tmp_path: Path
) -> None:
    """The outside system is asked: it happened -> replay; it did not -> run."""
    config = tmp_path / "guardd.toml"
    config.write_text("[tools.refund]\nverify = true\n")
    async with daemon(embedded.url, prefix, "--config", str(config)) as served, AsyncGuard(served.url) as guard:
        run, outside, crash = guard.run("r"), set(), {"now": True}

        @run.tool(key=["order"], verify=lambda order: order in outside)
        async def refund(order: str) -> str:
            if crash["now"]:
                outside.update({order} if order == "sent" else ())
                raise RuntimeError("the connection broke")
            return "run"

        for order in ("sent", "lost"):
            with pytest.raises(RuntimeError):
                await refund(order)
        crash["now"] = False
        assert await refund("sent") is None
        assert await refund("lost") == "run"


async def test_progress_of_a_result_lets_a_poll_go_on(guard: AsyncGuard) -> None:
    run, moves = guard.run("r", limits={"max_same_call": 1}), iter(range(1, 100))

    @run.tool(progress=lambda result: result["version"])
    async def poll(job: int) -> dict[str, int]:
        return {"version": next(moves)}

    for _ in range(5):
        await poll(17)


# ---- Runs -------------------------------------------------------------------------------


async def test_handoffs_budgets_checkpoint_and_finish(guard: AsyncGuard) -> None:
    run = guard.run("r", agent="a", limits={"max_tokens": 100})
    assert (await run.handoff("b")).action == "continue"
    charged = await run.charge(reserve={"tokens": 60})
    assert (await run.charge(reserve={"tokens": 60})).reason == "token_cap"
    assert (await run.settle(charged["op_id"], usage={"tokens": 10})).action == "continue"
    assert (await run.charge(reserve={"tokens": 60})).action == "continue"
    await run.checkpoint(3, "s3://x")
    finished = await run.finish("framework_cap")
    assert finished.envelope["checkpoint"]["ref"] == "s3://x"
    assert (await run.inspect())["counters"]["tokens"] == 10


async def test_a_sub_run_counts_for_its_parent(guard: AsyncGuard) -> None:
    run = guard.run("r")
    child = run.sub_run("kid", agent="k", limits={"max_steps": 2})
    await run.open()
    for number in range(2):
        await child.after((await child.before("t", {"n": number}))["call"], "progress")
    assert (await child.before("t", {"n": 9})).reason == "step_cap"
    assert (await run.inspect())["counters"]["steps"] == 2


async def test_the_run_of_the_environment_is_inherited(guard: AsyncGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GUARDD_RUN_ID", "from-parent")
    assert guard.run().run_id == "from-parent"
    monkeypatch.delenv("GUARDD_RUN_ID")
    with pytest.raises(ValueError, match="name the run"):
        guard.run()


async def test_a_kill_reaches_a_watching_client_without_a_call(guard: AsyncGuard, served: DaemonProcess) -> None:
    """Of an ancestor too."""
    run = guard.run("r/deep")
    await run.open()
    async with AsyncGuard(served.url) as operator:
        await operator.call("kill", {"run": "r"})
    await asyncio.wait_for(run.cancelled.wait(), 5)


async def test_a_run_that_the_store_lost_is_never_made_anew(
    guard: AsyncGuard, embedded: Server, served: DaemonProcess
) -> None:
    run = guard.run("r")
    await run.before("t")
    client = embedded.client()
    client.delete(*(key for key in client.keys(f"{served.prefix}:*") if not key.endswith(":canary")))
    with pytest.raises(RunLost):
        await run.before("t")


# ---- Pure parts ---------------------------------------------------------------------------


def test_arguments_are_bound_by_name_and_keys_are_made_of_them() -> None:
    def tool(self: Any, a: int, b: int = 2, *rest: int, c: int = 3, provider_key: str = "", **more: int) -> None: ...

    named, wanted = bind_arguments(tool, (None, 1), {"d": 4})
    assert (named, wanted) == ({"a": 1, "b": 2, "c": 3, "d": 4}, ["provider_key"])
    assert key_of(["b", "a"], named) == "[2,1]"
    assert key_of("fixed", named) == "fixed"
    with pytest.raises(ValueError, match="argument x"):
        key_of(["x"], named)
