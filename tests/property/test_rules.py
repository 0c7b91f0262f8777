"""Random operations: the Lua against the plain model of the rules, on fakeredis and on a real server.

Several runs and sub-runs, agents and clients; the clock moves, script caches are
flushed, ids are sent again. After every operation the answers must be equal.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.model.limits import REFERENCE, Policy
from guardd.model.tools import ToolRules
from guardd.store.connect import open_store
from tests.reference.model import ReferenceGuard
from tests.servers import Server

COMPARED = ("action", "reason", "retry_after_ms", "claim", "error")
EXAMPLES = int(os.environ.get("GUARDD_EXAMPLES", "60"))

RUNS = st.sampled_from(["r1", "r1", "r1", "r1/a", "r1/a", "r1/a/b", "r2"])
AGENTS = st.sampled_from(["w", "w", "v", ""])
CLIENTS = st.sampled_from(["one", "one", "one", "two"])
TOOLS = {
    "plain": {},
    "read": {"read_only": True, "no_progress_exempt": True, "window_scope": "agent"},
    "pay": {"effect_key": ["i"]},
    "put": {"on_in_doubt": "reclaim", "requires_key": True},
    "poll": {"cycle_exempt": True, "max_same_call": 5, "progress": {"pointer": "/cursor", "when": "increases"}},
    "seen": {"progress": {"pointer": "/cursor", "when": "new"}, "max_empty": 1},
    "note": {"target_args": ["i"], "max_same_target": 3, "allow_empty": True},
    "team": {"window_scope": "tree", "max_retries": 1},
    "refund": {"effect_scope": "global"},
}
ARGS = st.fixed_dictionaries({"i": st.integers(0, 1)}, optional={"request_id": st.integers(0, 3)})
KEYS = st.sampled_from([None, None, "k1", "k2"])
STATUSES = st.sampled_from(
    ["progress"] * 6 + ["retryable"] * 3 + ["invalid_input", "permission_denied", "human_required"] + ["complete", "fatal"]
)
VALUES = st.sampled_from([..., ..., ..., None, " ", [], 0, {"cursor": 1}, {"cursor": 2}, {"cursor": 3}])
VERSIONS = st.sampled_from([None, None, None, 0, 1, 2, 3])
USAGE = st.sampled_from([None, None, {"tokens": 10}, {"model_calls": 1}, {"cost_micros": 5, "tokens": 1}])
RESERVE = st.sampled_from([None, None, None, {"tokens": 20}, {"cost_micros": 10}])
RETRIES = st.sampled_from([None, None, None, {"change": "retry_after_elapsed"}, {"change": "strategy_changed"}])
COMMITTED = st.sampled_from([None, None, None, True, False])
LIMITS = st.fixed_dictionaries(
    {
        "max_steps": st.sampled_from([6, 20, None]),
        "max_wall_ms": st.sampled_from([60_000, None]),
        "max_same_call": st.sampled_from([1, 2, 3, None]),
        "cycle_window": st.sampled_from([3, 8]),
        "max_cycle_period": st.sampled_from([0, 2, 4]),
        "max_no_progress": st.sampled_from([2, 4, None]),
        "max_denied": st.sampled_from([1, 3, None]),
        "max_retries": st.sampled_from([1, 3]),
        "max_depth": st.sampled_from([1, 4]),
        "max_replays": st.sampled_from([0, 1, 8]),
        "max_tokens": st.sampled_from([None, 0, 50]),
        "max_model_calls": st.sampled_from([None, 3]),
        "max_cost_micros": st.sampled_from([None, 30]),
        "max_handoffs": st.sampled_from([None, 3]),
        "max_role_returns": st.sampled_from([None, 1]),
        "max_empty": st.sampled_from([None, 2]),
        "max_same_target": st.sampled_from([None, 2]),
        "on_refusal": st.sampled_from(["stop", "deny"]),
        "window_scope": st.sampled_from(["run", "run", "agent", "tree"]),
        "claim_lease_ms": st.just(30_000),
    }
)
FREEZES = st.sampled_from(["all", "retries", "handoffs", "subruns", "effects", "retries,effects"])


class Rules(RuleBasedStateMachine):
    """Engine and model side by side."""

    url: ClassVar[str]
    calls = Bundle("calls")
    charges = Bundle("charges")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.opened = self.loop.run_until_complete(open_store(self.url))
        self.now = 1000
        self.number = 0
        self.played: list[Any] = []

    @initialize(limits=LIMITS)
    def start(self, limits: dict[str, Any]) -> None:
        policy = Policy("reference", {**REFERENCE.limits, **limits}, REFERENCE.volatile_args)
        config = EngineConfig(
            policies={"reference": policy}, default_policy="reference", tools=ToolRules(TOOLS),
            prefix=f"p{secrets.token_hex(6)}", virtual_clock=True,
        )  # fmt: skip
        self.prefix = config.prefix
        self.guard = Engine(self.opened.store, config)
        self.model = ReferenceGuard(dict(policy.limits), TOOLS, set(REFERENCE.volatile_args))

    def teardown(self) -> None:
        async def forget() -> None:
            (keys,) = await self.opened.store.execute(("KEYS", f"{self.prefix}:*")) if hasattr(self, "prefix") else ([],)
            if keys:
                await self.opened.store.execute(("UNLINK", *keys))
            await self.opened.close()

        self.loop.run_until_complete(forget())
        self.loop.close()

    def play(self, op: str, **params: Any) -> dict[str, Any]:
        request = {name: value for name, value in params.items() if value is not None} | {"at_ms": self.now}
        if "value" in params:
            request["value"] = params["value"]
        if request.get("value") is ...:
            del request["value"]
        expected = self.model.call(op, request)
        try:
            actual = self.loop.run_until_complete(self.guard.call(op, request)).as_dict()  # type: ignore[union-attr]
        except GuardError as error:
            actual = error.as_dict()
        self.played.append((op, request, expected))
        shown = {name: actual[name] for name in COMPARED if name in actual and actual[name] != "renewed"}
        assert shown == expected, f"{op} {request}: the rules say {expected}, the guard says {shown}"
        return expected

    def fresh(self, kind: str) -> str:
        self.number += 1
        return f"{kind}{self.number}"

    @rule(target=calls, run=RUNS, agent=AGENTS, client=CLIENTS, tool=st.sampled_from(sorted(TOOLS)), args=ARGS, key=KEYS,
          retry=RETRIES, version=VERSIONS, usage=USAGE, reserve=RESERVE, wide=st.booleans())  # fmt: skip
    def before(self, *, run: str, agent: str, client: str, tool: str, args: Any, key: Any, retry: Any, version: Any,
               usage: Any, reserve: Any, wide: bool) -> Any:  # fmt: skip
        request = {
            "run": run, "agent": agent, "client": client, "call": self.fresh("c"), "tool": tool, "args": args,
            "idempotency_key": key, "retry": retry, "progress_version": version, "usage": usage, "reserve": reserve,
            "scope": "global" if wide and key else None,
        }  # fmt: skip
        return request if self.play("before", **request).get("action") else multiple()

    @rule(target=calls, run=st.sampled_from(["r1", "r1/a"]), tool=st.sampled_from(["plain", "plain", "poll", "pay"]))
    def again_and_again(self, run: str, tool: str) -> Any:
        """The plain loop: few fingerprints, so that windows fill."""
        request = {"run": run, "agent": "w", "client": "one", "call": self.fresh("c"), "tool": tool, "args": {"i": 0}}
        return request if self.play("before", **request).get("action") else multiple()

    @rule(request=calls, client=CLIENTS, run=st.sampled_from([None, None, None, "r2"]))
    def before_again(self, request: dict[str, Any], client: str, run: str | None) -> None:
        self.play("before", **{**request, "client": client, "run": run or request["run"]})

    @rule(request=calls, status=STATUSES, version=VERSIONS, committed=COMMITTED, value=VALUES, usage=USAGE,
          retry_after_ms=st.sampled_from([None, None, 500, 5000]))  # fmt: skip
    def after(self, request: dict[str, Any], status: str, version: Any, committed: Any, value: Any, usage: Any,
              retry_after_ms: Any) -> None:  # fmt: skip
        self.play("after", run=request["run"], call=request["call"], status=status, progress_version=version,
                  side_effect_committed=committed, value=value, usage=usage, retry_after_ms=retry_after_ms)  # fmt: skip

    @rule(run=RUNS, version=VERSIONS)
    def open(self, run: str, version: Any) -> None:
        self.play("open", run=run, progress_version=version)

    @rule(target=charges, run=RUNS, usage=USAGE, reserve=RESERVE)
    def charge(self, run: str, usage: Any, reserve: Any) -> Any:
        request = {"run": run, "op_id": self.fresh("o"), "usage": usage, "reserve": reserve}
        self.play("charge", **request)
        return request

    @rule(request=charges)
    def charge_again(self, request: dict[str, Any]) -> None:
        self.play("charge", **request)

    @rule(request=charges, usage=USAGE)
    def settle(self, request: dict[str, Any], usage: Any) -> None:
        self.play("settle", run=request["run"], op_id=request["op_id"], usage=usage)

    @rule(run=RUNS, giver=st.sampled_from("ab"), receiver=st.sampled_from("ab"), state=st.sampled_from([None, 1]))
    def handoff(self, run: str, giver: str, receiver: str, state: Any) -> None:
        self.play("handoff", run=run, op_id=self.fresh("h"), **{"from": giver, "to": receiver}, state=state)

    @rule(run=RUNS, tool=st.sampled_from(["pay", "put", "refund"]), key=st.sampled_from(["k1", "k2", "[0]"]),
          state=st.sampled_from(["committed", "not_executed"]))  # fmt: skip
    def resolve(self, run: str, tool: str, key: str, state: str) -> None:
        scope = "global" if tool == "refund" else None
        self.play("resolve", run=run, tool=tool, idempotency_key=key, state=state, scope=scope)

    @rule(run=RUNS, scope=FREEZES)
    def freeze(self, run: str, scope: str) -> None:
        self.play("freeze", run=run, scope=scope)

    @rule(run=RUNS, change=st.sampled_from(["human_input", "strategy_changed", "again"]),
          limits=st.sampled_from([None, {"max_steps": 30}, {"max_tokens": 500}]))  # fmt: skip
    def resume(self, run: str, change: str, limits: Any) -> None:
        self.play("resume", run=run, change=change, limits=limits)

    @precondition(lambda self: self.number % 5 == 4)
    @rule(run=RUNS, op=st.sampled_from(["kill", "finish"]))
    def end(self, run: str, op: str) -> None:
        self.play(op, run=run, reason="framework_cap" if op == "finish" else "killed")

    @rule(ms=st.sampled_from([0, 1, 100, 600, 6000, 31_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule()
    def scripts_are_forgotten(self) -> None:
        self.loop.run_until_complete(self.opened.store.execute(("SCRIPT", "FLUSH")))

    @rule()
    def another_daemon_takes_over(self) -> None:
        """An engine has caches only: a new one goes on in the middle of a run."""
        self.guard = Engine(self.opened.store, self.guard.context.config)

    @invariant()
    def counters_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for tree in self.model.trees.values():
            for path, run in tree.runs.items():
                state = self.loop.run_until_complete(self.guard.reader.inspect(path, self.now))
                counters = {name: state["counters"][name] for name in ("steps", "tokens", "held_tokens", "cost_micros")}
                assert counters == {"steps": run.steps, "tokens": run.used["tokens"], "held_tokens": run.held["tokens"],
                                    "cost_micros": run.used["cost_micros"]}, path  # fmt: skip
                assert (state["status"], state["reason"]) == (run.status, run.reason), path
                assert state["progress"]["version"] == run.version, path


def check(url: str, examples: int) -> None:
    machine = type("Rules", (Rules,), {"url": url})
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=50, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip
    machine.TestCase().runTest()


@pytest.mark.xdist_group("rules-fake")
def test_the_rules_hold_for_random_operations_on_the_fake() -> None:
    """Fast, and never the only proof."""
    check("fakeredis:", EXAMPLES // 2)


@pytest.mark.xdist_group("rules-server")
def test_the_rules_hold_for_random_operations_on_a_real_server(embedded: Server) -> None:
    """The same on a real server."""
    check(embedded.url, EXAMPLES)
