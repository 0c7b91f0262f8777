"""Effects through the client: claims kept while a tool runs, waiting for another owner, late owners (SPEC 2.6)."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from guardd_client import AsyncGuard, Guard

from tests.daemons import DaemonProcess, daemon
from tests.servers import Server, wait_until

TOOLS = '{"tools": {"pay": {"effect_key": ["order"]}}}'


async def test_a_claim_is_kept_by_the_lease_that_the_answer_names(guard: AsyncGuard) -> None:
    """The tool takes longer than three leases of the run's limit, and was told no lease."""
    run = guard.run("r", limits={"claim_lease_ms": 600})

    @run.tool(key=["order"])
    async def pay(order: int) -> int:
        await asyncio.sleep(2)
        return order

    paid = asyncio.create_task(pay(7))
    seen = set()
    while not paid.done():
        seen |= {record["state"] for record in await guard.call("ledger", {}) if record["run"] == "r"}
        await asyncio.sleep(0.05)
    assert (await paid, seen - {"committed"}) == (7, {"claimed"})


async def test_a_key_that_only_the_daemon_knows_is_kept_as_well(embedded: Server, prefix: str, tmp_path: Path) -> None:
    """A tool rule makes it of the arguments; the client hears of it by the answer."""
    config = tmp_path / "guardd.json"
    config.write_text(TOOLS)
    async with daemon(embedded.url, prefix, "--config", str(config)) as served, AsyncGuard(served.url) as guard:
        run = guard.run("r", limits={"claim_lease_ms": 600})

        @run.tool()
        async def pay(order: int) -> int:
            await asyncio.sleep(1.5)
            return order

        assert await pay(7) == 7
        assert await pay(7) == 7
        counters = (await run.inspect())["counters"]
        assert counters["steps"] == 1, "the second is a replay: the claim was kept until the commit"


async def test_who_waits_at_another_daemon_is_woken_by_the_commit(embedded: Server, prefix: str) -> None:
    """The commit travels by the store: the waiting alone would take a minute."""
    async with (
        daemon(embedded.url, prefix) as here,
        daemon(embedded.url, prefix) as there,
        AsyncGuard(here.url) as first,
        AsyncGuard(there.url) as second,
    ):
        owner = await first.run("r").before("pay", idempotency_key="k")
        waiting = asyncio.create_task(second.run("r").before("pay", idempotency_key="k", wait_ms=60_000))
        client = embedded.client()
        for _ in range(1000):
            if any(client.hexists(key, "awaited_ms") for key in client.keys(f"{prefix}:{{r}}:op:*")):
                break
            await asyncio.sleep(0.01)
        await first.run("r").after(owner["call"], "progress", value="paid")
        answer = await waiting
        assert (answer.action, answer.value) == ("replay", "paid")


async def test_a_tool_may_wait_for_its_other_owner(guard: AsyncGuard, served: DaemonProcess) -> None:
    async with AsyncGuard(served.url) as other:
        started, calls = asyncio.Event(), []

        def wrapped(at: AsyncGuard) -> object:
            @at.run("r").tool("pay", key=["order"], wait_ms=60_000)
            async def pay(order: int) -> str:
                calls.append(order)
                started.set()
                await asyncio.sleep(0.3)
                return "paid"

            return pay

        first = asyncio.create_task(wrapped(guard)(7))  # type: ignore[operator]
        await started.wait()
        assert await wrapped(other)(7) == "paid"  # type: ignore[operator]
        assert (await first, calls) == ("paid", [7])


async def test_an_owner_who_comes_too_late_is_told(served: DaemonProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Its process stood still beyond the lease, an operator settled the effect meanwhile; the result is kept beside."""
    async with AsyncGuard(served.url) as guard:
        run = guard.run("r", limits={"claim_lease_ms": 50})

        @run.tool(key="k")
        async def pay() -> str:
            resolve = {"run": "r", "tool": "pay", "idempotency_key": "k", "state": "not_executed"}
            with Guard(served.url) as operator:  # of a thread of its own, while this one stands still
                wait_until(lambda: operator.call("ledger", {"in_doubt": True}), what="the end of the lease")
                operator.call("resolve", resolve)
            return "late"

        with caplog.at_level(logging.WARNING):
            assert await pay() == "late"
        assert "settled by others" in caplog.text
        (entry,) = [each for each in await guard.call("trace", {"run": "r"}) if each["op"] == "after"]
        assert entry["claim"] == "stale"
