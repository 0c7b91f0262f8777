"""What the ledger must have held for an answer, and what happened outside a trace to bring it there (SPEC 2.6)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

Op = dict[str, Any]


@dataclass(slots=True)
class _Record:
    """An effect as far as the trace tells. state: free | claimed | committed | in_doubt."""

    state: str = "free"
    run: str = ""
    call: str = ""
    fp: str = ""
    held_ms: int = 0
    is_elsewhere: bool = False


class Effects:
    """Follows the ledger of a trace.

    An operator's `resolve` leaves no entry, nor does another run that holds a global key. Where an answer shows that one
    was there, it is played: as a `resolve`, or as a run `elsewhere-N` on the same fake tool.

    executions: by tool, of those other runs.
    """

    def __init__(self, tools: dict[str, dict[str, Any]], lease_ms: int) -> None:
        self._tools = tools
        self._lease_ms = lease_ms
        self._records: dict[tuple[str, str, str], _Record] = {}
        self._named: dict[tuple[str, str], tuple[str, str, str]] = {}
        self._stopped: set[str] = set()
        self.executions: Counter[str] = Counter()

    def before(self, entry: dict[str, Any], at_ms: int, args: Any) -> list[Op]:
        """What must be played before this call with a key."""
        name = (entry.get("scope", "run"), entry["tool"], entry["key"])
        record = self._records.setdefault(name, _Record())
        needed = self._needed(entry)
        asked = {"at_ms": at_ms, "expect": {}}
        ops: list[Op] = []
        match needed:
            case "free" if record.call != entry["call"] and not self._is_reclaimed(entry, record):
                ops = self._settle(record, name, entry["run"], asked, "free")
            case "committed":
                ops = self._settle(record, name, entry["run"], asked, "committed")
            case "claimed" if record.state == "claimed":
                if at_ms - record.held_ms >= self._lease_ms:
                    ops = [{"op": "renew", **asked, "run": record.run, "call": record.call}]
                    record.held_ms = at_ms
            case "in_doubt" if record.state == "claimed" and record.is_elsewhere:
                ops = [_result(record, asked, "retryable")]
                record.state = "in_doubt"
            case "claimed" | "in_doubt" if name[0] == "global" and record.state not in (needed, "claimed"):
                ops = [
                    *self._settle(record, name, entry["run"], asked, "free"),
                    self._claim(record, name, entry, asked, args),
                ]
                if needed == "in_doubt":
                    ops.append(_result(record, asked, "retryable"))
                    record.state = "in_doubt"
            case "conflict" if name[0] == "global" and record.fp in ("", entry.get("fp")):
                ops = [*self._settle(record, name, entry["run"], asked, "free"), self._claim(record, name, entry, asked, {"other": "arguments"})]  # fmt: skip
                ops.append(_result(record, asked, "progress"))
                record.state, record.fp = "committed", "other"
            case _:
                pass
        if entry["action"] == "execute":
            self._records[name] = _Record("claimed", entry["run"], entry["call"], entry.get("fp", ""), at_ms)
            self._named[entry["run"], entry["call"]] = name
        return ops

    def after(self, entry: dict[str, Any]) -> None:
        """A result; a stale one changes nothing."""
        name = self._named.get((entry["run"], entry["call"]))
        if name is None or entry.get("claim") == "stale" or "outcome" not in entry:
            return
        self._records[name].state = {"commit": "committed", "free": "free", "doubt": "in_doubt"}[entry["outcome"]]

    def see(self, entry: dict[str, Any]) -> None:
        """Any entry, after it was played: a run that has ended asks its ledger no more."""
        if entry["op"] == "resume":
            self._stopped.discard(entry["run"])
        elif entry.get("action") == "stop":
            self._stopped.add(entry["run"])

    # ---- Inside ----------------------------------------------------------------

    def _needed(self, entry: dict[str, Any]) -> str:
        action, reason = entry["action"], entry.get("reason", "")
        if action == "execute":
            return "free"
        if action == "replay":
            return "committed"
        if action == "stop" and entry["run"] in self._stopped:
            return ""
        return {"in_flight": "claimed", "in_doubt": "in_doubt", "key_conflict": "conflict"}.get(reason, "")

    def _is_reclaimed(self, entry: dict[str, Any], record: _Record) -> bool:
        return not record.is_elsewhere and self._tools.get(entry["tool"], {}).get("on_in_doubt") == "reclaim"

    def _settle(self, record: _Record, name: tuple[str, str, str], run: str, asked: Op, state: str) -> list[Op]:
        """Brings a record to `committed` or `free`: by its holder's result elsewhere, else by an operator's word."""
        if record.state in (state, "committed"):
            return []
        was, record.state = record.state, state
        if was == "claimed" and record.is_elsewhere:
            return [_result(record, asked, "progress" if state == "committed" else "invalid_input")]
        says = "committed" if state == "committed" else "not_executed"
        scope, tool, key = name
        return [{"op": "resolve", **asked, "run": run, "tool": tool, "idempotency_key": key, "scope": scope, "state": says, "note": "seen outside"}]  # fmt: skip

    def _claim(self, record: _Record, name: tuple[str, str, str], entry: dict[str, Any], asked: Op, args: Any) -> Op:
        self.executions[entry["tool"]] += 1
        number = self.executions.total()
        record.state, record.is_elsewhere, record.fp = "claimed", True, entry.get("fp", "")
        record.run, record.call, record.held_ms = f"elsewhere-{number}", f"elsewhere-{number}", asked["at_ms"]
        return {"op": "before", **asked, "run": record.run, "call": record.call, "tool": entry["tool"], "args": args, "idempotency_key": name[2], "scope": "global"}  # fmt: skip


def _result(record: _Record, asked: Op, status: str) -> Op:
    return {"op": "after", **asked, "run": record.run, "call": record.call, "status": status}
