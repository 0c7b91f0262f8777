"""Limits and tool rules (SPEC 2.10)."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

Limits = dict[str, Any]
Rule = dict[str, Any]

# None is unlimited everywhere.
COMMON: Limits = {
    "max_retries": 3,
    "max_depth": 4,
    "max_replays": 8,
    "claim_lease_ms": 30_000,
    "max_model_calls": None,
    "max_tokens": None,
    "max_cost_micros": None,
    "max_handoffs": None,
    "max_role_returns": None,
    "max_empty": None,
    "max_same_target": None,
    "window_scope": "run",
    "mode": "enforce",
}
POLICIES: dict[str, Limits] = {
    "reference": COMMON
    | {
        "max_steps": 20,
        "max_wall_ms": 60_000,
        "max_same_call": 2,
        "cycle_window": 8,
        "max_cycle_period": 8,
        "max_no_progress": 3,
        "max_denied": 1,
        "on_refusal": "stop",
    },
    "agent": COMMON
    | {
        "max_steps": 60,
        "max_wall_ms": 900_000,
        "max_same_call": 3,
        "cycle_window": 16,
        "max_cycle_period": 8,
        "max_no_progress": 8,
        "max_denied": 3,
        "on_refusal": "deny",
    },
}
VOLATILE: dict[str, list[str]] = {
    "reference": ["request_id", "timestamp", "trace_id"],
    "agent": ["request_id", "trace_id"],
}
# What a policy says of tools that are `read_only`, unless their own rule says otherwise.
READ_ONLY: dict[str, Rule] = {
    "reference": {},
    "agent": {"window_scope": "agent", "no_progress_exempt": True},
}
# The cap and the reason that belong to each kind of usage, in the order in which they are looked at.
USAGE = {
    "model_calls": ("max_model_calls", "model_call_cap"),
    "tokens": ("max_tokens", "token_cap"),
    "cost_micros": ("max_cost_micros", "cost_cap"),
}


def tool_name(name: str, tools: dict[str, Rule]) -> str:
    """The canonical name of a tool: an alias is resolved once."""
    for canonical_name, rule in tools.items():
        if name in rule.get("aliases", []):
            return canonical_name
    return name


def tool_rule(name: str, tools: dict[str, Rule]) -> Rule:
    """The one rule of a tool: its exact name's, else the longest glob's that matches, else an empty one."""
    if name in tools:
        return tools[name]
    globs = [pattern for pattern in tools if fnmatchcase(name, pattern)]
    return tools[max(globs, key=len)] if globs else {}
