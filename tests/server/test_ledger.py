"""The ledger beyond one script: sweep, waiting for an owner, a crash between the steps of a global key (SPEC 2.6)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from guardd.engine.core import Engine
from guardd.model.errors import InFlight, StoreUnavailable
from guardd.scripts.bind import Invocation

MakeGuard = Callable[..., Engine]
LEASE_MS = 1000


async def ask(guard: Engine, name: str, at_ms: int = 0, **params: Any) -> Any:
    return await guard.call(name, {"at_ms": at_ms, **params})


async def pay(guard: Engine, call: str, at_ms: int = 0, **params: Any) -> Any:
    return await ask(
        guard, "before", at_ms, **{"run": "r", "call": call, "tool": "pay", "idempotency_key": "k", **params}
    )


def limits(**more: Any) -> dict[str, Any]:
    return {"claim_lease_ms": LEASE_MS, "max_denied": None, **more}


# ---- The sweep -------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["run", "global"])
async def test_a_lease_that_ends_is_in_doubt_at_the_next_sweep(make_guard: MakeGuard, scope: str) -> None:
    """The record says so, and it stays listed."""
    guard = make_guard(limits=limits())
    await pay(guard, "c", scope=scope)
    assert await guard.sweep.once(LEASE_MS - 1) == []
    (lapsed,) = await guard.sweep.once(LEASE_MS)
    assert (lapsed["state"], lapsed["run"], lapsed["tool"], lapsed["owner"]) == ("in_doubt", "r", "pay", "c")
    assert await guard.sweep.once(LEASE_MS + 1) == [], "it is told once"
    (listed,) = await ask(guard, "ledger", LEASE_MS, in_doubt=True)
    assert (listed["state"], listed["key"], listed["scope"]) == ("in_doubt", "k", scope)
    assert guard.sweep.lapsed == 1


async def test_a_renewed_lease_is_swept_at_its_new_end(make_guard: MakeGuard) -> None:
    guard = make_guard(limits=limits())
    await pay(guard, "c")
    await ask(guard, "renew", LEASE_MS - 1, run="r", call="c", lease_ms=LEASE_MS)
    assert await guard.sweep.once(LEASE_MS) == []
    assert len(await guard.sweep.once(2 * LEASE_MS)) == 1


@pytest.mark.parametrize("status", ["progress", "invalid_input"])
async def test_a_finished_effect_leaves_the_index(make_guard: MakeGuard, status: str) -> None:
    """Committed or free: the index is of what is claimed or in doubt."""
    guard = make_guard(limits=limits())
    await pay(guard, "c")
    await ask(guard, "after", run="r", call="c", status=status)
    await guard.sweep.once(LEASE_MS)
    assert await guard.context.link.execute(("ZCARD", guard.context.keys.doubt)) == [0]


async def test_a_resolved_effect_leaves_the_index_at_once(make_guard: MakeGuard) -> None:
    guard = make_guard(limits=limits())
    await pay(guard, "c")
    resolve = {"run": "r", "tool": "pay", "idempotency_key": "k", "state": "not_executed"}
    with pytest.raises(InFlight):
        await ask(guard, "resolve", 1, **resolve)
    await ask(guard, "resolve", LEASE_MS, **resolve)
    assert await guard.context.link.execute(("ZCARD", guard.context.keys.doubt)) == [0]
    assert (await pay(guard, "d", LEASE_MS)).action == "execute"
    assert await guard.context.link.execute(("ZCARD", guard.context.keys.doubt)) == [1]


async def test_an_effect_claimed_anew_while_the_sweep_looks_stays_listed(make_guard: MakeGuard) -> None:
    """The sweep saw it free; a claim came before the entry was taken out."""
    guard = make_guard(limits=limits())
    await pay(guard, "c")
    await ask(guard, "after", run="r", call="c", status="invalid_input")
    real = guard.context.link.invoke

    async def invoke(invocation: Invocation, **options: Any) -> Any:
        if invocation.script.name == "unlist":
            guard.context.link.invoke = real  # type: ignore[method-assign]
            assert (await pay(guard, "d", 1, args={"other": 1})).action == "execute"
        return await real(invocation, **options)

    guard.context.link.invoke = invoke  # type: ignore[method-assign]
    await guard.sweep.once(LEASE_MS)
    assert len(await guard.sweep.once(LEASE_MS + 1)) == 1


async def test_more_in_doubt_than_one_look_takes_are_all_found(make_guard: MakeGuard) -> None:
    guard = make_guard(limits=limits(max_steps=None, max_same_call=None, max_cycle_period=0))
    for number in range(450):
        await pay(guard, f"c{number}", idempotency_key=f"k{number}")
    assert len(await guard.sweep.once(LEASE_MS)) == 450


async def test_runs_that_are_gone_leave_the_list_of_runs(make_guard: MakeGuard) -> None:
    guard = make_guard(run_ttl_ms=1000)
    await ask(guard, "open", run="old")
    await guard.sweep.once(500)
    assert await guard.context.link.execute(("ZCARD", guard.context.keys.runs)) == [1]
    other = make_guard(run_ttl_ms=1000)
    await other.sweep.once(5000)
    assert await guard.context.link.execute(("ZCARD", guard.context.keys.runs)) == [0]


@pytest.mark.parametrize("scope", ["run", "global"])
@pytest.mark.parametrize("on_in_doubt", ["deny", "reclaim"])
async def test_a_state_without_a_name_here_is_refused_not_guessed(
    make_guard: MakeGuard, scope: str, on_in_doubt: str
) -> None:
    """A newer guardd may write states of its own; an operator who looked outside may settle such a record."""
    guard = make_guard(limits=limits(), tools={"pay": {"on_in_doubt": on_in_doubt}})
    await pay(guard, "c", scope=scope)
    digest = guard.context.shaper.record("r", "pay", "k", scope).digest
    key = guard.context.keys.global_op(digest) if scope == "global" else guard.context.keys.op("r", digest)
    await guard.context.link.execute(("HSET", key, "state", "something_new"))
    for call in ("d", "c"):
        answer = await pay(guard, call, scope=scope)
        assert (answer.action, answer.reason) == ("deny", "in_doubt")
    said = await ask(guard, "after", run="r", call="c", status="progress", value=1)
    assert said.claim == "stale"
    await guard.sweep.once(LEASE_MS * 2)
    assert await guard.context.link.execute(("HGET", key, "state")) == [b"something_new"]
    await ask(guard, "resolve", run="r", tool="pay", idempotency_key="k", scope=scope, state="committed", note="seen")
    assert (await pay(guard, "e", scope=scope)).action == "replay"


# ---- Waiting for an owner ---------------------------------------------------------------


@pytest.mark.parametrize("scope", ["run", "global"])
async def test_who_waits_gets_the_replay_when_the_owner_commits(make_guard: MakeGuard, scope: str) -> None:
    """Woken by the commit: the waiting alone would take a minute."""
    guard = make_guard(limits={"claim_lease_ms": 60_000})
    await pay(guard, "c", scope=scope)
    waiting = asyncio.create_task(pay(guard, "d", scope=scope, wait_ms=60_000))
    await until_waiting(guard)
    await ask(guard, "after", run="r", call="c", status="progress", value={"id": 7})
    answer = await waiting
    assert (answer.action, answer.reason, answer.value) == ("replay", "already_committed", {"id": 7})


async def test_who_waits_gets_the_claim_when_the_owner_frees_it(make_guard: MakeGuard) -> None:
    guard = make_guard(limits={"claim_lease_ms": 60_000, "max_same_call": 3})
    await pay(guard, "c")
    waiting = asyncio.create_task(pay(guard, "d", wait_ms=60_000))
    await until_waiting(guard)
    await ask(guard, "after", run="r", call="c", status="retryable", side_effect_committed=False)
    assert (await waiting).action == "execute"


async def test_waiting_ends_with_its_time(make_guard: MakeGuard) -> None:
    """The answer is what it would have been."""
    guard = make_guard(limits={"claim_lease_ms": 60_000})
    await pay(guard, "c")
    answer = await pay(guard, "d", wait_ms=20)
    assert (answer.action, answer.reason, answer.retry_after_ms) == ("wait", "in_flight", 60_000)


async def test_waiting_counts_usage_once_and_is_no_step(make_guard: MakeGuard) -> None:
    guard = make_guard(limits={"claim_lease_ms": 60_000})
    await pay(guard, "c")
    await pay(guard, "d", wait_ms=20, usage={"tokens": 5})
    counters = (await ask(guard, "inspect", run="r"))["counters"]
    assert (counters["steps"], counters["tokens"]) == (1, 5)


async def test_a_commit_that_nobody_waits_for_publishes_nothing(make_real: MakeGuard, real: Any) -> None:
    """With a waiter it is one message: seen by a subscriber of the channel."""
    guard = make_real()
    pool = real.event_pool()
    from redis.asyncio import Redis

    client = Redis(connection_pool=pool)
    heard = client.pubsub()
    await heard.subscribe(guard.context.keys.events)
    assert (await heard.get_message(timeout=5))["type"] == "subscribe"
    await pay(guard, "c")
    await ask(guard, "after", run="r", call="c", status="progress")
    await pay(guard, "d", idempotency_key="k2", args={"n": 2})
    waiting = asyncio.create_task(pay(guard, "e", idempotency_key="k2", args={"n": 2}, wait_ms=60_000))
    await until_waiting(guard)
    await ask(guard, "after", run="r", call="d", status="progress")
    await waiting
    message = await heard.get_message(timeout=5)
    record = guard.context.shaper.record("r", "pay", "k2", "run")
    assert message["data"].decode() == f"event=settled key={guard.context.keys.op('r', record.digest)}"
    await heard.aclose()


async def until_waiting(guard: Engine) -> None:
    """Returns when somebody waits, and the store knows."""
    for _ in range(2000):
        keys = list(guard.context.wakeups._waiting)
        if keys and (await guard.context.link.execute(("HEXISTS", keys[0], "awaited_ms")))[0]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("nobody waits")


# ---- A global key takes three scripts; a crash after any of them ----------------------------


@pytest.mark.parametrize("crash_after", ["look", "before", "claim"])
async def test_a_crash_between_the_steps_of_a_global_key_grants_nothing_twice(
    make_guard: MakeGuard, crash_after: str
) -> None:
    """The same id sent again goes on; another id never runs the effect a second time."""
    guard = make_guard(limits=limits())
    await crash(guard, crash_after, run="r", call="c")
    other = make_guard(limits=limits())
    again = await pay(other, "c", scope="global")
    assert again.action == "execute"
    stranger = await pay(other, "d", scope="global", run="other")
    assert (stranger.action, stranger.reason) == ("wait", "in_flight")
    assert (await ask(other, "inspect", run="r"))["counters"]["steps"] == 1


@pytest.mark.parametrize("crash_after", ["look", "before", "claim"])
async def test_who_never_comes_back_leaves_at_most_a_step_or_a_doubt(make_guard: MakeGuard, crash_after: str) -> None:
    """SPEC 2.6: an admitted step without a claim, or a claim that goes in doubt."""
    guard = make_guard(limits=limits())
    await crash(guard, crash_after, run="r", call="c")
    other = make_guard(limits=limits())
    answer = await pay(other, "d", LEASE_MS, scope="global", run="other")
    if crash_after == "claim":
        assert (answer.action, answer.reason) == ("deny", "in_doubt")
    else:
        assert answer.action == "execute"


@pytest.mark.parametrize("crash_after", ["report", "after"])
async def test_a_result_that_crashed_on_its_way_is_sent_again(make_guard: MakeGuard, crash_after: str) -> None:
    """The record has it after the first script; the run after the second."""
    guard = make_guard(limits=limits())
    await pay(guard, "c", scope="global")
    after = {"run": "r", "call": "c", "status": "progress", "value": 1}
    broken = crashing(guard, crash_after)
    with pytest.raises(StoreUnavailable):
        await ask(broken, "after", **after)
    other = make_guard(limits=limits())
    said = await ask(other, "after", **after)
    assert (said.action, said.claim) == ("continue", "")
    assert (await pay(other, "d", scope="global", run="other")).value == 1


async def crash(guard: Engine, name: str, **params: Any) -> None:
    with pytest.raises(StoreUnavailable):
        await pay(crashing(guard, name), scope="global", **params)


def crashing(guard: Engine, name: str) -> Engine:
    """This guard dies when the script of that name has run, before it hears the reply."""
    real, seen = guard.context.link.invoke, 0

    async def invoke(invocation: Invocation, **options: Any) -> Any:
        nonlocal seen
        reply = await real(invocation, **options)
        if invocation.script.name == name:
            seen += 1
            # `after` asks for the record first and goes on with what it said.
            if not (name == "after" and seen == 1):
                raise StoreUnavailable("the daemon died here")
        return reply

    guard.context.link.invoke = invoke  # type: ignore[method-assign]
    return guard
