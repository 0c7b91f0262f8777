"""Plays a scenario file (tests/scenarios/README.md) on the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.reference.model import ReferenceGuard

SCENARIOS = Path(__file__).parent.parent / "scenarios"
Scenario = dict[str, Any]


def scenario_files() -> list[Path]:
    """The given scenario files and those beside them in `extra/`."""
    return sorted(SCENARIOS.glob("*.json")) + sorted(SCENARIOS.glob("extra/*.json"))


def load(file: Path) -> Scenario:
    scenario: Scenario = json.loads(file.read_text(encoding="utf-8"))
    return scenario


def prepared(scenario: Scenario) -> list[dict[str, Any]]:
    """The operations as a guard gets them: `after` and `renew` name the run of their call, an op id is given."""
    run_of: dict[str, str] = {}
    operations = []
    for number, operation in enumerate(scenario["ops"]):
        operation = dict(operation)
        if operation["op"] == "before":
            run_of.setdefault(operation["call"], operation["run"])
        if operation["op"] in ("after", "renew"):
            operation.setdefault("run", run_of.get(operation["call"]))
        if operation["op"] in ("charge", "handoff"):
            operation.setdefault("op_id", f"op-{number}")
        operations.append(operation)
    return operations


def expected_differences(expect: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """What an answer lacks of what is expected. A plain `execute` or `continue` has no reason."""
    wanted = dict(expect)
    if wanted.get("action") in ("execute", "continue"):
        wanted.setdefault("reason", None)
    return [
        f"{name}: expected {value!r}, got {actual.get(name)!r} in {actual}"
        for name, value in wanted.items()
        if actual.get(name) != value
    ]


def play(scenario: Scenario) -> list[str]:
    """Play a scenario; every difference as a line."""
    guard = ReferenceGuard(
        scenario["limits"],
        scenario["tools"],
        scenario.get("volatile_args"),
        scenario.get("policy", "reference"),
    )
    differences = []
    for number, operation in enumerate(prepared(scenario)):
        op, at_ms, expect = operation.pop("op"), operation.pop("at_ms"), operation.pop("expect")
        answer = guard.call(op, operation, at_ms)
        differences += [f"op {number} {op} {line}" for line in expected_differences(expect, answer)]
    ends = {"executions": guard.executions(), "terminal": guard.terminal(), "ledger": guard.ledger()}
    differences += [
        f"{name}: expected {scenario['expect'][name]}, got {actual}"
        for name, actual in ends.items()
        if actual != scenario["expect"][name]
    ]
    return differences
