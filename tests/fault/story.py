"""One story that runs every script of lua/, by way of the engine, on a virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.answers import Answer
from guardd.model.limits import REFERENCE, Policy
from guardd.model.tools import ToolRules
from guardd.scripts import stubs

Step = Callable[[Engine], Awaitable[Any]]
LEASE_MS = 1000


def step(name: str, at_ms: int, **params: Any) -> Step:
    """One operation."""

    async def play(guard: Engine) -> Any:
        answer = await guard.call(name, {"at_ms": at_ms, **params})
        return f"{answer.action} {answer.reason}".strip() if isinstance(answer, Answer) else "value"

    return play


def call(name: str, at_ms: int, **params: Any) -> Step:
    """A tool call of its own: it repeats no other."""
    given = {"run": "r/s", "tool": "look", "agent": "a", "args": {"n": name}, "client": "w"}
    return step("before", at_ms, **{**given, "call": name, **params})


def result(name: str, at_ms: int, **params: Any) -> Step:
    return step("after", at_ms, **{"run": "r/s", "call": name, "status": "progress", **params})


async def released(guard: Engine) -> Any:
    """A global claim taken back, as when too few replicas have it."""
    keys, context = guard.context.keys, guard.context
    effect = context.shaper.record("r", "post", "g3", "global")
    return (
        await context.link.invoke(
            stubs.release(op_key=keys.global_op(effect.digest), now_ms=6000, settings=context.settings, owner="g3", channel=keys.events)
        )
    )[0].decode()  # fmt: skip


async def withdrawn(guard: Engine) -> Any:
    """An admission taken back, as when too few replicas have it: once it was answered, or when it was answered again."""
    keys, context = guard.context.keys, guard.context
    effect = context.shaper.record("r", "pay", "w1", "run")
    for asked in (1, 2):
        reply = await context.link.invoke(
            stubs.withdraw(
                calls_key=keys.calls("r/s"), trace_key=keys.trace("r/s"), marks_key=keys.marks("r/s"),
                op_key=keys.op("r/s", effect.digest), run_keys=keys.chain("r/s"), now_ms=6000,
                settings=context.settings, channel=keys.events, run="r/s", call="w1", asked=asked,
            )
        )  # fmt: skip
        if reply[0] == b"withdrawn":
            break
    return reply[0].decode()


async def swept(guard: Engine) -> Any:
    """The sweep at a time when leases are over."""
    guard.sweep._swept_ms = 0
    await guard.sweep.once(9000)
    return "swept"


async def deny_rules(guard: Engine) -> Any:
    """The rules read anew."""
    await guard.rules.read()
    return "read"


HELD = {"tokens": 50, "model_calls": 1}
STORY: dict[str, Step] = {
    "open": step("open", 0, run="r", policy="reference", limits={"max_tokens": 100_000}, labels={"team": "a"}),
    "open sub-run": step("open", 1, run="r/s", limits={"max_steps": 90}, progress_version=0),
    "deny rules": deny_rules,
    "admit": call("c1", 10, reserve=HELD, usage={"tokens": 5}),
    "result": result("c1", 20, progress_version=1, usage=HELD),
    "pay": call("p1", 30, tool="pay", idempotency_key="k1"),
    "awaited": call("p1b", 31, tool="pay", args={"n": "p1"}, idempotency_key="k1", client="v", wait_ms=1),
    "renew": step("renew", 31, run="r/s", call="p1", lease_ms=LEASE_MS, usage={"tokens": 1}),
    "paid": result("p1", 31, value={"id": 7}, operation_id="o-1"),
    "replay": call("p2", 60, tool="pay", args={"n": "p1"}, idempotency_key="k1", client="v"),
    "pay and fail": call("p3", 70, tool="pay", idempotency_key="k3"),
    "not paid": result("p3", 80, status="retryable", side_effect_committed=False),
    "pay again": call("p4", 90, tool="pay", args={"n": "p3"}, idempotency_key="k3", retry={"change": "strategy_changed"}),
    "paid again": result("p4", 100, value="ok"),
    "global": call("g1", 110, tool="post", idempotency_key="g1", scope="global"),
    "global renewed": step("renew", 120, run="r/s", call="g1", lease_ms=LEASE_MS),
    "global reported": result("g1", 130, value="posted"),
    "charge": step("charge", 140, run="r/s", op_id="m1", reserve=HELD),
    "charge 2": step("charge", 141, run="r/s", op_id="m2", usage=HELD),
    "settle": step("settle", 150, run="r/s", op_id="m1", usage={"tokens": 40}),
    "handoff": step("handoff", 160, run="r/s", op_id="h1", **{"from": "a", "to": "b"}, state="s1"),
    "handoff back": step("handoff", 161, run="r/s", op_id="h2", **{"from": "b", "to": "c"}, state="s2"),
    "checkpoint": step("checkpoint", 170, run="r/s", version=3, ref="cp-3"),
    "freeze": step("freeze", 180, run="r/s", scope="effects", note="look"),
    "held": call("f1", 190, tool="pay", idempotency_key="k5"),
    "resume": step("resume", 200, run="r/s", change="human_input"),
    "goes on": call("f1", 210, tool="pay", idempotency_key="k5"),
    "ends blank": result("f1", 220, value=None),
    "bad input": call("i1", 230),
    "refused by the tool": result("i1", 240, status="invalid_input"),
    "refused": call("i2", 250, args={"n": "i1"}),
    "person": call("hu", 260),
    "waits for a person": result("hu", 270, status="human_required"),
    "person came": step("resume", 280, run="r/s", change="authorization_renewed"),
    "withdrawn one": call("w1", 5900, tool="pay", idempotency_key="w1", reserve=HELD),
    "withdraw": withdrawn,
    "released one": call("g3", 5950, tool="post", idempotency_key="g3", scope="global"),
    "release": released,
    "lapses": call("l1", 7000, tool="pay", idempotency_key="l1"),
    "lapses too": call("l2", 7001, tool="pay", idempotency_key="l2"),
    "sweep": swept,
    "in doubt": call("l1b", 9010, tool="pay", args={"n": "l1"}, idempotency_key="l1", client="v"),
    "late": result("l1", 9020, value="late"),
    "resolve": step("resolve", 9030, run="r/s", tool="pay", idempotency_key="l2", state="not_executed", note="looked"),
    "freed": call("l2b", 9040, tool="pay", args={"n": "l2"}, idempotency_key="l2", client="v"),
    "too late": result("l2", 9050, value="late"),
    "lapses, reclaimable": call("q1", 9060, tool="redo", idempotency_key="q1"),
    "reclaimed": call("q2", 12_000, tool="redo", args={"n": "q1"}, idempotency_key="q1", client="v"),
    "redone": result("q2", 12_010, value="redone"),
    "finish sub-run": step("finish", 12_020, run="r/s", reason="complete"),
    "kill": step("kill", 12_030, run="r", reason="killed"),
    "killed": call("z", 12_040, run="r"),
}  # fmt: skip


def make_guard(store: Any, prefix: str) -> Engine:
    tools = {"redo": {"on_in_doubt": "reclaim"}}
    policy = Policy(
        "reference",
        {
            **REFERENCE.limits,
            "claim_lease_ms": LEASE_MS,
            "max_denied": None,
            "max_no_progress": None,
            "max_same_call": 6,
        },
        REFERENCE.volatile_args,
    )
    return Engine(store, EngineConfig(policies={"reference": policy}, default_policy="reference", tools=ToolRules(tools), prefix=prefix, virtual_clock=True))  # fmt: skip
