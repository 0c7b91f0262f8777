"""Plays one scenario through a guard and says where the answers differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from guardd.model.errors import GuardError, UnknownRun
from guardd.model.ids import parents, root
from guardd.model.tools import ToolRules
from guardd.replay.scenario import Scenario

_NEED_OP_ID = ("charge", "settle", "handoff", "checkpoint")


class Guard(Protocol):
    """Whatever answers operations: an engine, or a client of a daemon."""

    async def call(self, name: str, params: dict[str, Any]) -> Any:
        """The answer as an object with `as_dict`, or as plain values; raises GuardError."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation as it was played. answer: as_dict of the answer or of the error."""

    number: int
    at_ms: int
    op: str
    params: dict[str, Any]
    expected: dict[str, Any]
    answer: dict[str, Any]

    @property
    def differs(self) -> bool:
        """True when a listed member is not equal (of `evidence`, one of those listed), or a reason came where none is due."""
        actual = dict(self.answer)
        if isinstance(evidence := actual.get("evidence"), dict):
            actual["evidence"] = {name: evidence.get(name) for name in self.expected.get("evidence", evidence)}
        if any(actual.get(name) != value for name, value in self.expected.items()):
            return True
        return "action" in self.expected and "reason" not in self.expected and bool(self.answer.get("reason"))


@dataclass(slots=True)
class Played:
    """What a play showed. differences: sentences, empty when the scenario holds."""

    scenario: Scenario
    steps: list[Step] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


async def play(scenario: Scenario, guard: Guard, *, on_step: Callable[[Step], None] | None = None) -> Played:
    """Plays all operations and compares answers and the end state.

    Args: guard: runs under the scenario's configuration and takes `at_ms`.
          on_step: hears of each operation as it is played.
    """
    played = Played(scenario)
    tools = ToolRules(scenario.tools)
    executions: Counter[str] = Counter()
    run_of: dict[str, str] = {}
    runs: dict[str, None] = {}
    for number, described in enumerate(scenario.ops):
        params = {name: value for name, value in described.items() if name not in ("op", "expect")}
        op = described["op"]
        if op in ("after", "renew") and "run" not in params:
            params["run"] = run_of.get(params.get("call", ""), "unknown")
        if op in _NEED_OP_ID:
            params.setdefault("op_id", f"op-{number}")
        answer = await _ask(guard, op, params)
        if "run" in params:
            runs.update(dict.fromkeys((*parents(params["run"]), params["run"])))
        if op == "before" and "error" not in answer:
            run_of.setdefault(params["call"], params["run"])
            is_resend = any(s.op == "before" and s.params["call"] == params["call"] and s.answer.get("action") == "execute"
                            for s in played.steps)  # fmt: skip
            if answer["action"] == "execute" and not is_resend:
                executions[tools.find(params["tool"])[0]] += 1
        step = Step(number, described["at_ms"], op, params, described.get("expect", {}), answer)
        played.steps.append(step)
        if on_step:
            on_step(step)
        if step.differs:
            played.differences.append(
                f"operation {number} at {step.at_ms} ms: {op} {_short(params)}\n"
                f"    expected {_short(step.expected)}\n    actual   {_short(_shown(answer, step.expected))}"
            )
    await _check_end(played, guard, dict(executions), list(runs))
    return played


async def _ask(guard: Guard, op: str, params: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = await guard.call(op, params)
    except GuardError as error:
        return error.as_dict()
    return answer.as_dict() if hasattr(answer, "as_dict") else {"result": answer}


async def _check_end(played: Played, guard: Guard, executions: dict[str, int], runs: list[str]) -> None:
    expect = played.scenario.expect
    terminal: dict[str, str] = {}
    ledger: dict[str, str] = {}
    for run in runs:
        try:
            state = await guard.call("inspect", {"run": run})
        except UnknownRun:
            continue
        if state["status"] == "ended":
            terminal[run] = state["reason"]
        for effect in state["operations"]:
            scope = "*" if effect["scope"] == "global" else root(run)
            if effect["state"] != "freed":
                ledger[f"{scope}/{effect['tool']}/{effect['key']}"] = effect["state"]
    for name, actual in (("executions", executions), ("terminal", terminal), ("ledger", ledger)):
        if name in expect and expect[name] != actual:
            played.differences.append(
                f"{name} at the end\n    expected {_short(expect[name])}\n    actual   {_short(actual)}"
            )


def evidence_text(reason: str, evidence: dict[str, Any]) -> str:
    """What fired, for a reader: `[3 of 3, steps 1, 2, 3]`, `[period 2, steps 1, 2]`; "" when no rule fired."""
    if not reason or ("limit" not in evidence and "steps" not in evidence):
        return ""
    seen, limit = evidence.get("observed", "?"), evidence.get("limit", "?")
    said = f"period {seen}" if reason == "short_cycle" else f"{seen} of {limit}"
    steps = ", ".join(map(str, evidence.get("steps", ())))
    return f"[{said}, steps {steps}]" if steps else f"[{said}]"


def _shown(answer: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    names = ("action", "reason", "error", "message", *expected, "evidence")
    return {name: answer[name] for name in dict.fromkeys(names) if name in answer}


def _short(value: dict[str, Any]) -> str:
    parts = [f"{name}={item}" for name, item in value.items() if name not in ("at_ms", "evidence")]
    parts.append(evidence_text(value.get("reason", ""), value.get("evidence") or {}))
    return " ".join(filter(None, parts)) or "nothing"
