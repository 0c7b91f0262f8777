"""What the scenarios do not reach: budgets by kind, lost runs, checkpoints, op ids, roles, reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from guardd.engine.core import Engine
from guardd.model.errors import CallConflict, NotAllowed, RunLost, UnknownRun
from guardd.model.limits import AGENT, Policy

MakeGuard = Callable[..., Engine]


async def ask(guard: Engine, name: str, **params: Any) -> Any:
    return await guard.call(name, {"at_ms": 0, **params})


@pytest.mark.parametrize(
    ("amount", "limit", "reason"),
    [("model_calls", "max_model_calls", "model_call_cap"), ("tokens", "max_tokens", "token_cap"), ("cost_micros", "max_cost_micros", "cost_cap")],
)  # fmt: skip
async def test_a_reservation_that_does_not_fit_is_refused_by_its_own_name(
    amount: str, limit: str, reason: str, make_guard: MakeGuard
) -> None:
    """For model calls and for tool calls; the run lives."""
    guard = make_guard(limits={limit: 10})
    assert (await ask(guard, "charge", run="r", op_id="a", reserve={amount: 6})).action == "continue"
    charged = await ask(guard, "charge", run="r", op_id="b", reserve={amount: 6})
    called = await ask(guard, "before", run="r", call="c", tool="t", reserve={amount: 6})
    for answer in (charged, called):
        assert (answer.action, answer.reason, answer.evidence) == ("deny", reason, {"limit": 10, "observed": 12})
    assert (await ask(guard, "before", run="r", call="d", tool="t", reserve={amount: 4})).action == "execute"


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("open", {}), ("before", {"call": "c", "tool": "t"}), ("charge", {"op_id": "o"}), ("handoff", {"op_id": "h", "from": "a", "to": "b"}),
        ("checkpoint", {"version": 1}), ("kill", {}), ("finish", {}), ("freeze", {}),
    ],
)  # fmt: skip
async def test_a_run_that_the_caller_knows_and_the_store_does_not_is_lost(
    name: str, params: dict[str, Any], make_guard: MakeGuard
) -> None:
    """SPEC 3: never made anew, by no operation."""
    guard = make_guard()
    epoch = (await ask(guard, "open", run="r")).epoch
    await guard.context.link.execute(("DEL", guard.context.keys.run("r")))
    with pytest.raises(RunLost):
        await ask(guard, name, run="r", epoch=epoch, **params)
    with pytest.raises(UnknownRun):
        await ask(guard, "inspect", run="r")


async def test_a_checkpoint_is_kept_over_every_state_of_the_run(make_guard: MakeGuard) -> None:
    """The newest version stays; it is in the envelope of the stop."""
    guard = make_guard(limits={"max_depth": 1})
    assert (await ask(guard, "checkpoint", run="r", version=3, ref="s3://a")).action == "continue"
    assert (await ask(guard, "checkpoint", run="r/a/b", version=3)).reason == "handoff_depth"
    await ask(guard, "checkpoint", run="r", version=2, ref="late")
    await ask(guard, "before", run="r", call="c", tool="t")
    await ask(guard, "after", run="r", call="c", status="human_required")
    assert (await ask(guard, "checkpoint", run="r", version=4, ref="s3://b")).reason == "human_required"
    await ask(guard, "freeze", run="r")
    assert (await ask(guard, "checkpoint", run="r", version=5, ref="s3://c")).reason == "frozen"
    await ask(guard, "kill", run="r")
    stopped = await ask(guard, "checkpoint", run="r", version=4, ref="late")
    assert stopped.envelope["checkpoint"] == {"version": 5, "ref": "s3://c", "at": 0}


async def test_one_op_id_names_one_operation(make_guard: MakeGuard) -> None:
    """A charge is no handoff, and belongs to one run."""
    guard = make_guard()
    await ask(guard, "charge", run="r", op_id="x")
    await ask(guard, "handoff", run="r", op_id="y", **{"from": "a", "to": "b"})
    for name, params in (
        ("charge", {"run": "r", "op_id": "y"}),
        ("charge", {"run": "r/kid", "op_id": "x"}),
        ("handoff", {"run": "r", "op_id": "x", "from": "a", "to": "b"}),
        ("handoff", {"run": "r", "op_id": "y", "from": "a", "to": "c"}),
    ):
        with pytest.raises(CallConflict):
            await ask(guard, name, **params)


async def test_a_renewal_hears_of_a_freeze_and_of_a_person_and_keeps_the_claim(make_guard: MakeGuard) -> None:
    guard = make_guard()
    await ask(guard, "before", run="r", call="c", tool="pay", idempotency_key="k")
    await ask(guard, "before", run="r", call="d", tool="ask")
    await ask(guard, "after", run="r", call="d", status="human_required")
    renewed = await guard.call("renew", {"run": "r", "call": "c", "at_ms": 29_000})
    assert (renewed.action, renewed.reason, renewed.claim) == ("wait", "human_required", "renewed")  # type: ignore[union-attr]
    await guard.call("freeze", {"run": "r", "at_ms": 29_000})
    renewed = await guard.call("renew", {"run": "r", "call": "c", "at_ms": 58_000})
    assert (renewed.reason, renewed.claim) == ("frozen", "renewed")  # type: ignore[union-attr]
    (effect,) = (await ask(guard, "inspect", run="r"))["operations"]
    assert effect["state"] == "claimed"
    await ask(guard, "after", run="r", call="c", status="progress")
    assert (await ask(guard, "renew", run="r", call="c")).claim == "reported"


async def test_a_worker_tightens_and_an_operator_loosens(make_guard: MakeGuard) -> None:
    """SPEC 2.10; and a sub-run never gets more than its parent had."""
    guard = make_guard(
        limits={"max_steps": 5, "max_tokens": None},
        policies={"reference": Policy("reference", {**AGENT.limits, "max_steps": 5}, frozenset())},
    )
    for run, limits in (
        ("a", {"max_steps": 6}),
        ("b", {"max_steps": None}),
        ("c", {"mode": "observe"}),
        ("d", {"cycle_window": 2}),
    ):
        with pytest.raises(NotAllowed) as caught:
            await guard.call("open", {"run": run, "limits": limits, "at_ms": 0}, role="worker")
        assert caught.value.field == f"limits.{next(iter(limits))}"
    tight = await guard.call(
        "open", {"run": "e", "limits": {"max_steps": 3, "max_tokens": 7}, "at_ms": 0}, role="worker"
    )
    assert (tight.limits["max_steps"], tight.limits["max_tokens"]) == (3, 7)  # type: ignore[union-attr]
    with pytest.raises(NotAllowed):
        await guard.call("open", {"run": "e/kid", "limits": {"max_steps": 4}, "at_ms": 0}, role="worker")
    wide = await ask(guard, "open", run="f", limits={"max_steps": 500})
    assert wide.limits["max_steps"] == 500
    again = await guard.call("open", {"run": "f", "limits": {"max_steps": 1}, "at_ms": 0}, role="worker")
    assert again.limits["max_steps"] == 500, "the first open sets the limits"  # type: ignore[union-attr]


async def test_a_worker_resolves_only_where_the_tool_rule_says_verify(make_guard: MakeGuard) -> None:
    guard = make_guard(tools={"safe": {"verify": True}})
    params = {"run": "r", "idempotency_key": "k", "state": "committed", "at_ms": 0}
    assert (await guard.call("resolve", {**params, "tool": "safe"}, role="worker")).action == "continue"  # type: ignore[union-attr]
    with pytest.raises(NotAllowed):
        await guard.call("resolve", {**params, "tool": "other"}, role="worker")


async def test_what_happened_can_be_read_and_forgotten(make_guard: MakeGuard) -> None:
    """runs, trace, ledger; and forget erases arguments and results, not counters and digests."""
    guard = make_guard(limits={"max_denied": 1, "max_same_call": 1})
    for run in ("one", "two/kid"):
        await ask(
            guard,
            "before",
            run=run,
            call=f"c-{run}",
            tool="pay",
            args={"iban": "DE1", "token": "s3cret"},
            idempotency_key="k",
        )
    await ask(guard, "after", run="one", call="c-one", status="retryable")
    stopped = await ask(
        guard, "before", run="one", call="c2", tool="pay", args={"iban": "DE1", "token": "s3cret"}, idempotency_key="k"
    )
    assert (stopped.action, stopped.reason) == ("stop", "in_doubt")
    assert stopped.envelope["denied_call"]["tool"] == "pay"
    assert {run["run"] for run in await ask(guard, "runs")} == {"one", "two"}
    assert await ask(guard, "runs", waiting=True) == []
    trace = await ask(guard, "trace", run="one")
    assert [entry["op"] for entry in trace] == ["before", "after", "before"]
    assert "DE1" in trace[0]["args"] and "s3cret" not in str(trace)
    assert await ask(guard, "trace", run="one", after=trace[1]["id"]) == trace[2:]
    assert [entry["run"] for entry in await ask(guard, "trace", run="two/kid")] == ["two/kid"]
    assert {(effect["run"], effect["state"]) for effect in await ask(guard, "ledger")} == {
        ("one", "in_doubt"),
        ("two/kid", "claimed"),
    }
    assert [effect["run"] for effect in await ask(guard, "ledger", in_doubt=True)] == ["one"]
    assert (await ask(guard, "forget", run="one")).action == "continue"
    assert await ask(guard, "trace", run="one") == []
    state = await ask(guard, "inspect", run="one")
    assert "args" not in state["envelope"]["denied_call"] and state["counters"]["steps"] == 1
    with pytest.raises(UnknownRun):
        await ask(guard, "forget", run="nobody")


async def test_a_large_result_is_replayed_by_its_digest(make_guard: MakeGuard) -> None:
    """SPEC 2.6: up to 64 KiB as it was."""
    guard = make_guard()
    for key, size in (("small", 65_000), ("large", 66_000)):
        await ask(guard, "before", run="r", call=key, tool="t", args={"k": key}, idempotency_key=key)
        await ask(guard, "after", run="r", call=key, status="progress", value="x" * size, operation_id=f"tx-{key}")
        replay = await ask(guard, "before", run="r", call=f"{key}-2", tool="t", args={"k": key}, idempotency_key=key)
        assert (replay.action, replay.operation_id, len(replay.value_digest)) == ("replay", f"tx-{key}", 64)
        if key == "small":
            assert replay.value == "x" * size
        else:
            assert replay.result_truncated and "value" not in replay.as_dict()


async def test_observe_mode_records_what_it_would_have_refused(make_guard: MakeGuard) -> None:
    """SPEC 2.10: the call is admitted; kill and ledger are enforced."""
    guard = make_guard(limits={"mode": "observe", "max_same_call": 1, "max_steps": 2, "max_denied": 1})
    answers = [await ask(guard, "before", run="r", call=f"c{n}", tool="t") for n in range(3)]
    assert [answer.action for answer in answers] == ["execute"] * 3
    assert answers[1].would == [{"action": "deny", "reason": "same_call_repeat"}]
    assert {"action": "stop", "reason": "step_cap"} in answers[2].would
    await ask(guard, "kill", run="r")
    assert (await ask(guard, "before", run="r", call="c9", tool="t")).reason == "killed"


async def test_answers_beyond_the_newest_256_are_forgotten_and_calls_in_flight_never(make_guard: MakeGuard) -> None:
    """SPEC 2.2; the store keeps as many ids as it says, and no more."""
    guard = make_guard(limits={"max_steps": None, "max_same_call": None}, calls_max=4, trace_max=0)
    await ask(guard, "before", run="r", call="open", tool="t", args={"n": -1})
    for number in range(10):
        await ask(guard, "before", run="r", call=f"c{number}", tool="t", args={"n": number})
        await ask(guard, "after", run="r", call=f"c{number}", status="progress")
    (stored,) = await guard.context.link.execute(("HKEYS", guard.context.keys.calls("r")))
    assert {name.decode() for name in stored if name.startswith(b"c:")} == {"c:open", "c:c6", "c:c7", "c:c8", "c:c9"}
    assert (await ask(guard, "after", run="r", call="open", status="progress")).action == "continue"
