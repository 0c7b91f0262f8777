"""A scenario file: limits, tool rules, operations with their expected answers, and what must hold at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from guardd.engine.config import EngineConfig
from guardd.model.errors import BadArgument
from guardd.model.limits import AGENT, REFERENCE, Policy, check_limits
from guardd.model.tools import ToolRules
from guardd.replay.from_trace import read_trace, scenario_of

POLICIES = {policy.name: policy for policy in (REFERENCE, AGENT)}


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file. limits: overrides of the policy for every run; null is unlimited.

    ops:    in the order in which they happen, each with `at_ms`, `op`, its parameters and the answer in `expect`.
    expect: after the last one: executions (tool -> count), terminal (run -> reason), ledger (name -> state).
    """

    id: int | str
    title: str
    ops: list[dict[str, Any]]
    kind: str = ""
    source: Any = ""
    report: str = ""
    why: str = ""
    policy: str = "reference"
    limits: dict[str, Any] = {}
    tools: dict[str, Any] = {}
    volatile_args: list[str] | None = None
    expect: dict[str, dict[str, Any]] = {}

    def config(self, prefix: str) -> EngineConfig:
        """The configuration under which this file is played."""
        base = POLICIES[self.policy]
        limits = {**base.limits, **check_limits(self.limits)}
        volatile = base.volatile_args if self.volatile_args is None else frozenset(self.volatile_args)
        policy = Policy(base.name, limits, volatile, base.read_only_defaults)
        return EngineConfig(
            policies={**POLICIES, base.name: policy},
            default_policy=base.name,
            tools=ToolRules(self.tools),
            prefix=prefix,
            virtual_clock=True,
        )


def read_scenario(path: Path, changes: Mapping[str, Any] | None = None) -> Scenario:
    """Reads one file; an exported trace counts as the scenario that is made of it.

    changes: limits that are set in place of the file's, wherever it sets some.

    Raises: BadArgument: it is no scenario; names the file and the member.
    """
    try:
        document = read_trace(path)
        made = scenario_of(document) if document else json.loads(path.read_text(encoding="utf-8"))
        for limits in (
            made.setdefault("limits", {}),
            *(op["limits"] for op in made.get("ops", ()) if op.get("limits")),
        ):
            limits.update(changes or {})
        scenario = msgspec.convert(made, Scenario)
    except (OSError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise BadArgument(f"{path.name} is no scenario file: {error}", field="FILE", value=str(path)) from error
    if scenario.policy not in POLICIES:
        raise BadArgument(
            f"{path.name}: no such policy", field="policy", value=scenario.policy, limit=", ".join(POLICIES)
        )
    for number, op in enumerate(scenario.ops):
        if not isinstance(op.get("op"), str) or not isinstance(op.get("at_ms"), int):
            raise BadArgument(f"{path.name}: an operation needs `op` and `at_ms`", field=f"ops[{number}]", value=op)
    return scenario
