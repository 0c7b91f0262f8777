"""Bad input of every operation: a named error with field, value and limit, and nothing stored (SPEC 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.protocol.operations import OPERATIONS
from guardd.store.connect import OpenedStore

MakeGuard = Callable[..., Engine]

GOOD: dict[str, dict[str, Any]] = {
    "open": {"run": "r"},
    "before": {"run": "r", "call": "c", "tool": "t"},
    "after": {"run": "r", "call": "c", "status": "progress"},
    "renew": {"run": "r", "call": "c"},
    "charge": {"run": "r", "op_id": "o"},
    "settle": {"run": "r", "op_id": "o"},
    "handoff": {"run": "r", "op_id": "o", "from": "a", "to": "b"},
    "checkpoint": {"run": "r", "version": 1},
    "finish": {"run": "r"},
    "kill": {"run": "r"},
    "freeze": {"run": "r"},
    "resume": {"run": "r", "change": "human_input"},
    "resolve": {"run": "r", "tool": "t", "idempotency_key": "k", "state": "committed"},
    "deny_rule": {"id": "d", "tool": "t"},
    "deny_rules": {},
    "export": {"run": "r"},
    "forget": {"run": "r"},
    "inspect": {"run": "r"},
    "runs": {},
    "trace": {"run": "r"},
    "ledger": {},
    "token_new": {"role": "worker"},
    "token_list": {},
    "token_revoke": {"id": "x"},
    "audit": {},
    "confirm": {},
}
DEEP: Any = 0
for _ in range(40):
    DEEP = [DEEP]

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("token_new", {"role": "admin"}, "bad_argument", "role"),
    ("token_new", {"name": "a\nb"}, "bad_argument", "name"),
    ("token_new", {"run_prefix": "a b"}, "bad_argument", "run"),
    ("token_new", {"expires_in_ms": 0}, "bad_argument", "expires_in_ms"),
    ("token_list", {"x": 1}, "bad_argument", "x"),
    ("deny_rules", {"x": 1}, "bad_argument", "x"),
    ("export", {"run": "r/s"}, "bad_argument", "run"),
    ("export", {"run": "nobody"}, "unknown_run", "run"),
    ("runs", {"status": "lost"}, "bad_argument", "status"),
    ("token_revoke", {"id": ""}, "bad_argument", "id"),
    ("confirm", {"note": 1}, "bad_argument", "note"),
    ("before", {"wait_ms": 60_001}, "bad_argument", "wait_ms"),
    ("audit", {"limit": 0}, "bad_argument", "limit"),
    ("open", {"policy": "none"}, "bad_argument", "policy"),
    ("open", {"limits": {"max_stepz": 1}}, "bad_argument", "limits.max_stepz"),
    ("open", {"limits": {"max_steps": -1}}, "bad_argument", "limits.max_steps"),
    ("open", {"limits": {"max_steps": 2**53}}, "bad_argument", "limits.max_steps"),
    ("open", {"limits": {"max_steps": True}}, "bad_argument", "limits.max_steps"),
    ("open", {"limits": {"max_cycle_period": 17}}, "bad_argument", "limits.max_cycle_period"),
    ("open", {"limits": {"claim_lease_ms": None}}, "bad_argument", "limits.claim_lease_ms"),
    ("open", {"limits": {"on_refusal": "maybe"}}, "bad_argument", "limits.on_refusal"),
    ("open", {"progress_version": -1}, "bad_argument", "progress_version"),
    ("open", {"progress_version": 1.5}, "bad_argument", "progress_version"),
    ("open", {"tools": ["a\nb"]}, "bad_argument", "tools"),
    ("before", {"call": ""}, "bad_argument", "call"),
    ("before", {"call": "x" * 129}, "bad_argument", "call"),
    ("before", {"call": "a b"}, "bad_argument", "call"),
    ("before", {"call": None}, "bad_argument", "call"),
    ("before", {"tool": ""}, "bad_argument", "tool"),
    ("before", {"tool": "x" * 256}, "bad_argument", "tool"),
    ("before", {"tool": "a\x00b"}, "bad_argument", "tool"),
    ("before", {"agent": "a\nb"}, "bad_argument", "agent"),
    ("before", {"client": ""}, "bad_argument", "client"),
    ("before", {"client": "x" * 129}, "bad_argument", "client"),
    ("before", {"args": {"a": float("nan")}}, "bad_argument", "args.a"),
    ("before", {"args": {"a": [1, float("inf")]}}, "bad_argument", "args.a[1]"),
    ("before", {"args": {1: 2}}, "bad_argument", "args"),
    ("before", {"args": '{"a": 1, "a": 2}'}, "bad_argument", "args.a"),
    ("before", {"args": '{"a": NaN}'}, "bad_argument", "args.a"),
    ("before", {"args": {"a": b"bytes"}}, "bad_argument", "args.a"),
    ("before", {"args": DEEP}, "bad_argument", "args" + "[0]" * 32),
    ("before", {"args": "[" * 5000 + "]" * 5000}, "bad_argument", "args"),
    ("before", {"args": {"a": "x" * 270_000}}, "bad_argument", "args"),
    ("before", {"args": {"a": "\ud800"}}, "bad_argument", "args.a"),
    ("before", {"idempotency_key": ""}, "bad_argument", "idempotency_key"),
    ("before", {"idempotency_key": "k" * 256}, "bad_argument", "idempotency_key"),
    ("before", {"scope": "world"}, "bad_argument", "scope"),
    ("before", {"scope": "global"}, "effect_key_missing", "idempotency_key"),
    ("before", {"retry": {}}, "bad_argument", "retry.change"),
    ("before", {"retry": {"change": "again"}}, "change_required", "retry.change"),
    ("before", {"usage": {"tokens": -1}}, "bad_argument", "usage.tokens"),
    ("before", {"usage": {"dollars": 1}}, "bad_argument", "usage.dollars"),
    ("before", {"reserve": {"tokens": "many"}}, "bad_argument", "reserve.tokens"),
    ("before", {"epoch": "an-older-life"}, "run_lost", ""),
    ("after", {"status": "ok"}, "bad_argument", "status"),
    ("after", {"call": "never"}, "unknown_call", ""),
    ("after", {"retry_after_ms": -1}, "bad_argument", "retry_after_ms"),
    ("after", {"side_effect_committed": "yes"}, "bad_argument", "side_effect_committed"),
    ("after", {"value": float("nan")}, "bad_argument", "value"),
    ("after", {"operation_id": "x" * 256}, "bad_argument", "operation_id"),
    ("renew", {"lease_ms": 0}, "bad_argument", "lease_ms"),
    ("renew", {"call": "never"}, "unknown_call", ""),
    ("charge", {"op_id": ""}, "bad_argument", "op_id"),
    ("charge", {"usage": 5}, "bad_argument", "usage"),
    ("settle", {"op_id": "never"}, "unknown_operation", "op_id"),
    ("handoff", {"to": ""}, "bad_argument", "to"),
    ("handoff", {"from": "x" * 256}, "bad_argument", "from"),
    ("handoff", {"state": {"a": float("nan")}}, "bad_argument", "state.a"),
    ("checkpoint", {"version": -1}, "bad_argument", "version"),
    ("finish", {"reason": "tired"}, "bad_argument", "reason"),
    ("kill", {"reason": ""}, "bad_argument", "reason"),
    ("kill", {"reason": "two words"}, "bad_argument", "reason"),
    ("kill", {"reason": "x" * 65}, "bad_argument", "reason"),
    ("freeze", {"scope": "some"}, "bad_argument", "scope"),
    ("freeze", {"scope": ""}, "bad_argument", "scope"),
    ("resume", {"change": "try again"}, "change_required", "change"),
    ("resume", {}, "unknown_run", "run"),
    ("resume", {"limits": {"max_steps": "lots"}}, "bad_argument", "limits.max_steps"),
    ("resolve", {"state": "perhaps"}, "bad_argument", "state"),
    ("resolve", {"state": "not_executed"}, "unknown_operation", "idempotency_key"),
    ("resolve", {"idempotency_key": ""}, "bad_argument", "idempotency_key"),
    ("deny_rule", {"tool": None}, "bad_argument", "tool"),
    ("deny_rule", {"id": ""}, "bad_argument", "id"),
    ("deny_rule", {"run_prefix": "a b"}, "bad_argument", "run"),
    ("inspect", {}, "unknown_run", "run"),
    ("runs", {"limit": 0}, "bad_argument", "limit"),
    ("trace", {"limit": 10_001}, "bad_argument", "limit"),
    ("ledger", {"limit": "all"}, "bad_argument", "limit"),
]  # fmt: skip
EVERY = [
    (name, change, error, field)
    for name in OPERATIONS
    for change, error, field in [
        ({"colour": "red"}, "bad_argument", "colour"),
        ({"at_ms": -1}, "bad_argument", "at_ms"),
    ]
]
RUNS = [
    (name, {"run": run}, "bad_argument", "run")
    for name in OPERATIONS
    if "run" in GOOD[name]
    for run in ("", "/", "r/", "r//a", "r{1}", "r 1", "é", "x" * 65, "/".join(["x" * 60] * 7), "r\n", 5)
]


@pytest.mark.parametrize(("name", "change", "error", "field"), [*BAD, *EVERY, *RUNS])
async def test_bad_input_is_named_and_stores_nothing(
    name: str, change: dict[str, Any], error: str, field: str, make_guard: MakeGuard, opened: OpenedStore, prefix: str
) -> None:
    """The error says which field, and nothing is left in the store."""
    with pytest.raises(GuardError) as caught:
        await make_guard().call(name, {**GOOD[name], "at_ms": 0, **change})
    assert (caught.value.name, caught.value.field) == (error, field)
    assert caught.value.message
    if error == "bad_argument":
        assert caught.value.limit is not None
    (keys,) = await opened.store.execute(("KEYS", f"{prefix}:*"))
    assert set(keys) <= {f"{prefix}:runs".encode()}, "only the index of recent runs, a hint, may know the name"


@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_missing_parameter_is_named(name: str, make_guard: MakeGuard) -> None:
    """Each required parameter, one at a time."""
    for field in GOOD[name]:
        if (name, field) == ("deny_rule", "tool"):
            continue
        params = {key: value for key, value in GOOD[name].items() if key != field}
        with pytest.raises(GuardError) as caught:
            await make_guard().call(name, params)
        assert (caught.value.name, caught.value.field) == ("bad_argument", field)


async def test_an_unknown_operation_is_named(make_guard: MakeGuard) -> None:
    """With the list of those there are."""
    with pytest.raises(GuardError, match="no such operation") as caught:
        await make_guard().call("retry", {})
    assert "before" in caught.value.limit


async def test_the_clock_of_a_request_is_refused_without_a_virtual_clock(make_guard: MakeGuard) -> None:
    """SPEC 3: at_ms is for tests and the player."""
    with pytest.raises(GuardError) as caught:
        await make_guard(virtual_clock=False).call("open", {"run": "r", "at_ms": 5})
    assert (caught.value.name, caught.value.field) == ("clock_not_allowed", "at_ms")


@pytest.mark.parametrize(
    "tools",
    [
        {"t": {"colour": "red"}}, {"t": {"max_same_call": 1025}}, {"t": {"max_empty": -1}}, {"t": {"effect_scope": "world"}},
        {"t": {"progress": {"pointer": "cursor", "when": "new"}}}, {"a": {"aliases": ["x"]}, "b": {"aliases": ["x"]}},
    ],
)  # fmt: skip
def test_a_malformed_tool_rule_is_named(tools: dict[str, Any], make_guard: MakeGuard) -> None:
    """At start-up, not at the first call."""
    with pytest.raises(GuardError) as caught:
        make_guard(tools=tools)
    assert caught.value.field.startswith("tools.")
