"""Random operations: the Lua against the plain model of the rules, on fakeredis and on a real server.

Several runs and sub-runs, agents and clients; the clock moves, script caches are
flushed, ids are sent again. After every operation the answers must be equal.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from tests.reference.pair import TOOLS, Pair
from tests.servers import Server

EXAMPLES = int(os.environ.get("GUARDD_EXAMPLES", "60"))

RUNS = st.sampled_from(["r1", "r1", "r1", "r1/a", "r1/a", "r1/a/b", "r2"])
AGENTS = st.sampled_from(["w", "w", "v", ""])
CLIENTS = st.sampled_from(["one", "one", "one", "two"])
ARGS = st.fixed_dictionaries({"i": st.integers(0, 1)}, optional={"request_id": st.integers(0, 3)})
KEYS = st.sampled_from([None, None, "k1", "k2"])
STATUSES = st.sampled_from(
    ["progress"] * 14
    + ["retryable"] * 8
    + ["invalid_input"] * 2
    + ["permission_denied", "human_required", "complete", "fatal"]
)
VALUES = st.sampled_from([..., ..., ..., None, " ", [], 0, {"cursor": 1}, {"cursor": 2}, {"cursor": 3}])
VERSIONS = st.sampled_from([None, None, None, 0, 1, 2, 3])
USAGE = st.sampled_from([None, None, {"tokens": 10}, {"model_calls": 1}, {"cost_micros": 5, "tokens": 1}])
RESERVE = st.sampled_from([None, None, None, {"tokens": 20}, {"cost_micros": 10}])
RETRIES = st.sampled_from([None, None, None, {"change": "retry_after_elapsed"}, {"change": "strategy_changed"}])
COMMITTED = st.sampled_from([None, None, None, True, False])
LIMITS = st.fixed_dictionaries(
    {
        "max_steps": st.sampled_from([6, 30, None, None]),
        "max_wall_ms": st.sampled_from([60_000, None, None]),
        "max_same_call": st.sampled_from([1, 2, 3, None]),
        "cycle_window": st.sampled_from([3, 8]),
        "max_cycle_period": st.sampled_from([0, 2, 4]),
        "max_no_progress": st.sampled_from([2, 4, None]),
        "max_denied": st.sampled_from([1, 3, None, None]),
        "max_retries": st.sampled_from([1, 3]),
        "max_depth": st.sampled_from([4] * 5 + [1]),
        "max_replays": st.sampled_from([0, 1, 8]),
        "max_tokens": st.sampled_from([None] * 8 + [0, 50, 200]),
        "max_model_calls": st.sampled_from([None] * 4 + [3]),
        "max_cost_micros": st.sampled_from([None, None, 30]),
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

    @initialize(limits=LIMITS)
    def start(self, limits: dict[str, Any]) -> None:
        self.pair = Pair(self.url, limits)
        self.play, self.fresh = self.pair.play, self.pair.fresh

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()

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

    @rule(target=calls, run=st.sampled_from(["r1", "r1", "r1/a"]), agent=st.sampled_from("wv"), tools=st.lists(
          st.sampled_from(["plain", "plain", "poll", "team", "note", "seen"]), min_size=1, max_size=3), laps=st.integers(1, 3),
          i=st.integers(0, 1), status=STATUSES, version=VERSIONS, value=VALUES, retry=RETRIES)  # fmt: skip
    def a_loop(self, *, run: str, agent: str, tools: list[str], laps: int, i: int, status: str, version: Any, value: Any,
               retry: Any) -> Any:  # fmt: skip
        """Tools in a circle, each call with its result: what the guard is for."""
        requests = []
        for tool in tools * laps:
            call = self.fresh("c")
            request = {
                "run": run,
                "agent": agent,
                "client": "one",
                "call": call,
                "tool": tool,
                "args": {"i": i},
                "retry": retry,
            }
            if self.play("before", **request).get("action") == "execute":
                self.pair.now += 100
                self.play("after", run=run, call=call, status=status, progress_version=version, value=value)
            requests.append(request)
        return multiple(*requests[-2:])

    @rule(target=calls, run=RUNS, tool=st.sampled_from(["pay", "put", "refund"]), key=st.sampled_from(["k1", "k2"]), status=STATUSES,
          committed=COMMITTED, client=CLIENTS, wide=st.booleans(), ms=st.sampled_from([0, 10, 31_000]))  # fmt: skip
    def an_effect(
        self, *, run: str, tool: str, key: str, status: str, committed: Any, client: str, wide: bool, ms: int
    ) -> Any:
        """A keyed call and its result, perhaps after its lease."""
        request = {
            "run": run, "agent": "w", "client": client, "call": self.fresh("c"), "tool": tool, "args": {"i": 0},
            "idempotency_key": key, "scope": "global" if wide else None,
        }  # fmt: skip
        if self.play("before", **request).get("action") == "execute":
            self.pair.now += ms
            self.play("after", run=run, call=request["call"], status=status, side_effect_committed=committed)
        return request

    @rule(request=calls, client=CLIENTS, run=st.sampled_from([None, None, None, "r2"]))
    def before_again(self, request: dict[str, Any], client: str, run: str | None) -> None:
        self.play("before", **{**request, "client": client, "run": run or request["run"]})

    @rule(request=calls, status=STATUSES, version=VERSIONS, committed=COMMITTED, value=VALUES, usage=USAGE,
          retry_after_ms=st.sampled_from([None, None, 500, 5000]))  # fmt: skip
    def after(self, request: dict[str, Any], status: str, version: Any, committed: Any, value: Any, usage: Any,
              retry_after_ms: Any) -> None:  # fmt: skip
        self.play("after", run=request["run"], call=request["call"], status=status, progress_version=version,
                  side_effect_committed=committed, value=value, usage=usage, retry_after_ms=retry_after_ms)  # fmt: skip

    @precondition(lambda self: self.pair.number % 4 == 1)
    @rule(run=RUNS, version=VERSIONS)
    def open(self, run: str, version: Any) -> None:
        self.play("open", run=run, progress_version=version)

    @precondition(lambda self: self.pair.number % 3 == 1)
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

    @precondition(lambda self: self.pair.number % 4 == 3)
    @rule(run=RUNS, scope=FREEZES)
    def freeze(self, run: str, scope: str) -> None:
        self.play("freeze", run=run, scope=scope)

    @rule(run=RUNS, change=st.sampled_from(["human_input", "strategy_changed", "again"]),
          limits=st.sampled_from([None, {"max_steps": 30}, {"max_tokens": 500}]))  # fmt: skip
    def resume(self, run: str, change: str, limits: Any) -> None:
        self.play("resume", run=run, change=change, limits=limits)

    @precondition(lambda self: self.pair.number % 9 == 8)
    @rule(run=RUNS, op=st.sampled_from(["kill", "finish"]))
    def end(self, run: str, op: str) -> None:
        self.play(op, run=run, reason="framework_cap" if op == "finish" else "killed")

    @rule(ms=st.sampled_from([0, 1, 100, 600, 6000, 31_000]))
    def time_passes(self, ms: int) -> None:
        self.pair.now += ms

    @precondition(lambda self: self.pair.number % 7 == 5)
    @rule()
    def scripts_are_forgotten(self) -> None:
        self.pair.flush_scripts()

    @rule()
    def another_daemon_takes_over(self) -> None:
        self.pair.another_daemon()

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "pair"):
            self.pair.agree()


def check(url: str, examples: int) -> None:
    machine = type("Rules", (Rules,), {"url": url})
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, database=None,
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
