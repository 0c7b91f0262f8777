"""A run's trace as rows: one a call with its result, and which calls a refusal names as its evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = {"execute": "in flight", "replay": "replayed", "deny": "refused", "wait": "waits", "stop": "stopped"}
SIGNS = {
    "executed": "✓", "failed": "!", "in flight": "▶", "replayed": "↺", "refused": "✗", "waits": "⏸", "stopped": "■", "note": "•",
}  # fmt: skip
SUCCESSES = ("progress", "complete")


@dataclass
class Row:
    """One call, or what was done between calls.

    kind: executed | failed | in flight | replayed | refused | waits | stopped | note. after: its result, when it came.
    """

    entry: dict[str, Any]
    kind: str
    after: dict[str, Any] = field(default_factory=dict)


def rows_of(entries: list[dict[str, Any]]) -> list[Row]:
    """Rows, oldest first."""
    rows: list[Row] = []
    by_call: dict[tuple[str, str], Row] = {}
    for entry in entries:
        name = (entry.get("run", ""), entry.get("call", ""))
        if entry["op"] == "after" and name in by_call:
            row = by_call[name]
            row.after = entry
            row.kind = "executed" if entry.get("status") in SUCCESSES and not entry.get("verdict") else "failed"
            continue
        row = Row(entry, KINDS.get(entry.get("action", ""), "note") if entry["op"] == "before" else "note")
        rows.append(row)
        if entry["op"] == "before":
            by_call[name] = row
    return rows


def evidence_of(rows: list[Row]) -> tuple[Row | None, list[Row]]:
    """The last refusal that names steps, and the calls of these steps."""
    refusal = next((row for row in reversed(rows) if row.entry.get("steps")), None)
    if refusal is None:
        return None, []
    steps = set(refusal.entry["steps"].split(","))
    return refusal, [
        row for row in rows if row.entry.get("step") in steps and row.entry.get("run") == refusal.entry.get("run")
    ]
