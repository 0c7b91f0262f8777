"""A run's tree as a document that can be played again: its limits, its tools' rules, its trace (SPEC 2.9)."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from guardd import canonical, redaction
from guardd.engine.context import Context
from guardd.model.ids import root
from guardd.model.limits import Policy
from guardd.model.tools import ToolRule

FORMAT = "guardd-trace/1"
_READ = 10_000
_TEXTS = ("agent", "to", "tool", "call", "key", "operation_id", "note", "ref")
"""Members that others wrote. Run names and words of reasons are bounded alphabets, and name files and rules."""
_RULES = (
    "target_args", "read_only", "allow_empty", "no_progress_exempt", "cycle_exempt", "window_scope", "max_same_call",
    "max_same_target", "max_retries", "max_empty", "on_in_doubt",
)  # fmt: skip
"""What of a rule decides by what the trace holds; keys, fingerprints and verdicts are in the trace as they came out."""


async def export(context: Context, run: str) -> dict[str, Any]:
    """The whole tree that a run belongs to.

    is_whole: False when the oldest entries were dropped (`trace_max`): it cannot be played from its start.
    limits:   of the root as they are now; an entry of `open` or `resume` says what it set, and what was before (`was`).
    tools:    the rules of the tools in the trace, as far as they decide by what the trace holds.
    entries:  as `trace` answers them, redacted once more: a store may hold originals (`trace_originals`), a file may not.
              Arguments that the trace had to cut are left out, for the cut may be inside a secret.
    runs:     how each run of the tree stands.

    Raises: UnknownRun.
    """
    tree = root(run)
    state = await context.reader.inspect(tree, None)
    entries: list[dict[str, Any]] = []
    while read := await context.reader.trace(tree, _READ, entries[-1]["id"] if entries else None):
        entries += read
    runs = {}
    for path in dict.fromkeys((tree, *(entry["run"] for entry in entries))):
        found = state if path == tree else await context.reader.inspect(path, None)
        runs[path] = {name: found[name] for name in ("status", "reason", "ended_by")}
    names = sorted({entry["tool"] for entry in entries if "tool" in entry})
    policy = context.policy(state["policy"])
    found_rules = {name: context.config.tools.find(name)[1] for name in names}
    key = context.config.redact_key
    rules = {redaction.redact_text(name, key=key): _rule(rule, policy) for name, rule in found_rules.items()}
    cleaned = [_clean(entry, found_rules.get(entry.get("tool", ""), ToolRule()), key) for entry in entries]
    return {
        "format": FORMAT,
        "run": tree,
        "is_whole": bool(entries) and int(entries[0]["ms"]) <= state["started_ms"],
        "policy": state["policy"],
        "limits": state["limits"],
        "tools": {name: rule for name, rule in rules.items() if rule},
        "runs": runs,
        "entries": cleaned,
    }


def _clean(entry: dict[str, Any], rule: ToolRule, key: bytes) -> dict[str, Any]:
    """An entry that may leave the store. Equal texts stay equal, so what belongs together still does."""
    clean = {name: redaction.redact_text(value, key=key) if name in _TEXTS else value for name, value in entry.items()}
    hidden = frozenset(rule.redact)
    if "key" in entry and hidden.intersection(rule.effect_key):
        clean |= redaction.redact({"key": entry["key"]}, key=key, names=frozenset({"key"}))
    if "args" in entry:
        try:
            value = json.loads(entry["args"])
        except ValueError:
            clean["args"] = redaction.CUT
        else:
            kept = redaction.redact(value, key=key, names=hidden)
            clean["args"] = entry["args"] if kept is value else canonical.canonical_json(kept)
    return clean


def _rule(rule: ToolRule, policy: Policy) -> dict[str, Any]:
    """What differs from no rule; the policy's defaults for reading tools are written out."""
    kept: dict[str, Any] = {
        name: getattr(rule, name) for name in _RULES if getattr(rule, name) != getattr(ToolRule(), name)
    }
    if rule.read_only:
        for name, value in policy.read_only_defaults.items():
            if name in _RULES and kept.get(name) is None:
                kept[name] = value
    return dict(msgspec.to_builtins(kept))
