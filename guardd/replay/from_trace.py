"""A scenario from an exported trace: the same operations on fake tools, with the answers that were given then."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from guardd import canonical
from guardd.engine.export import FORMAT
from guardd.model.errors import BadArgument
from guardd.model.limits import LIMITS, parse_limits
from guardd.redaction import CUT
from guardd.replay.effects import Effects

AMOUNTS = ("model_calls", "tokens", "cost_micros")
RENEWALS_A_LEASE = 2
TARGET = "_target"
INVALID = "(a result that broke its schema)"

Op = dict[str, Any]


def read_trace(path: Path) -> dict[str, Any] | None:
    """The document of an exported trace; None: the file is something else.

    Raises: BadArgument: it cannot be read, or its oldest entries are missing.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument(f"{path.name} is no JSON file: {error}", field="FILE", value=str(path)) from error
    if isinstance(document, dict) and isinstance(document.get("trace"), dict):  # what guardd incident writes
        document = document["trace"]
    if not isinstance(document, dict) or "format" not in document:
        return None
    if document["format"] != FORMAT:
        raise BadArgument("a trace of another format", field="format", value=document["format"], limit=FORMAT)
    if not document["is_whole"]:
        raise BadArgument(
            f"{path.name} cannot be played from its start: the oldest entries were dropped; raise trace_max for runs as "
            "long as this one",
            field="is_whole", value=False, limit="a whole trace",
        )  # fmt: skip
    return document


def scenario_of(document: dict[str, Any], title: str = "") -> dict[str, Any]:
    """The members of a scenario file.

    Arguments that were cut or redacted stand as their fingerprint, so calls are equal that were. Results are fakes
    with the verdict that the real ones had; what was read from them as progress is a version now.
    """
    entries = [entry for entry in document["entries"] if entry["op"] != "withdraw"]
    withdrawn = {(e["run"], e["call"]) for e in document["entries"] if e["op"] == "withdraw"}
    entries = [e for e in entries if (e["run"], e.get("call")) not in withdrawn or e["op"] != "before"]
    began = int(document["entries"][0]["ms"])
    played = _Player(document, began)
    for entry in entries:
        played.add(entry)
    played.add_kill()
    executions: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        name = (entry["run"], entry.get("call", ""))
        if entry["op"] == "before" and entry.get("action") == "execute" and name not in seen:
            executions[entry["tool"]] += 1
            seen.add(name)
    ended = {path: run["reason"] for path, run in document["runs"].items() if run["status"] == "ended"}
    return {
        "id": document["run"],
        "title": title or f"as it was: {ended.get(document['run'], document['runs'][document['run']]['status'])}",
        "kind": "incident",
        "source": "trace",
        "limits": _limits(_born_with(document)),
        "tools": played.tools,
        "volatile_args": [],
        "ops": sorted(played.ops, key=lambda op: op["at_ms"]),
        "expect": {"executions": dict(executions + played.effects.executions), "terminal": ended},
    }


def _born_with(document: dict[str, Any]) -> dict[str, Any]:
    """The limits that the root was made with: the first change says what they were before it."""
    changed = (entry["was"] for entry in document["entries"] if entry["run"] == document["run"] and "was" in entry)
    was = next(changed, None)
    return document["limits"] if was is None else parse_limits(was)


def _limits(known: dict[str, Any]) -> dict[str, Any]:
    return {name: known.get(name) for name in LIMITS if name != "mode" or known.get(name)}


class _Player:
    """Turns entries into operations, in their order."""

    def __init__(self, document: dict[str, Any], began: int) -> None:
        self._document = document
        self._began = began
        self.ops: list[Op] = []
        self.tools: dict[str, dict[str, Any]] = {name: dict(rule) for name, rule in document["tools"].items()}
        self._versions: Counter[str] = Counter()
        self._claimed: dict[tuple[str, str], int] = {}
        self.effects = Effects(self.tools, int(document["limits"]["claim_lease_ms"]))
        for rule in self.tools.values():
            if "target_args" in rule:
                rule["target_args"] = [TARGET]

    def add(self, entry: dict[str, Any]) -> None:
        """One entry: an operation and what it was answered."""
        make = getattr(self, f"_{entry['op']}", None)
        if make is None:
            raise BadArgument("this guardd does not know an operation of the trace", field="op", value=entry["op"])
        op = {"op": entry["op"], "at_ms": self._at(entry), "run": entry["run"], **make(entry)}
        expect = {name: entry[name] for name in ("action", "reason", "claim") if entry.get(name)}
        if expect.get("claim") == "held":
            del expect["claim"]
        if evidence := _evidence(entry):
            expect["evidence"] = evidence
        self.ops.append({**op, "expect": expect})
        self.effects.see(entry)
        if entry.get("reason") == "policy_blocked" and entry["op"] == "before":
            self._under_a_rule(entry)

    def add_kill(self) -> None:
        """A kill that somebody wrote by hand left no entry: it comes before the first answer that shows it."""
        for path, run in self._document["runs"].items():
            was_asked = any(op["op"] in ("kill", "finish") and op["run"] == path for op in self.ops)
            if run["ended_by"] == "kill" and not was_asked:
                shows = (
                    n
                    for n, op in enumerate(self.ops)
                    if op["run"] == path and op["expect"].get("reason") == run["reason"]
                )
                at = next(shows, len(self.ops))
                at_ms = self.ops[min(at, len(self.ops) - 1)]["at_ms"]
                self.ops.insert(at, {"op": "kill", "at_ms": at_ms, "run": path, "reason": run["reason"], "expect": {"action": "stop", "reason": run["reason"]}})  # fmt: skip

    def _at(self, entry: dict[str, Any]) -> int:
        return int(entry["ms"]) - self._began

    def _under_a_rule(self, entry: dict[str, Any]) -> None:
        """A deny rule was in force for this call, and maybe for no other."""
        rule, at_ms = {"op": "deny_rule", "id": "then", "expect": {}}, self._at(entry)
        self.ops.insert(len(self.ops) - 1, {**rule, "at_ms": at_ms, "tool": entry["tool"]})
        self.ops.append({**rule, "at_ms": at_ms, "remove": True})

    # ---- One method an operation of the trace ------------------------------------

    def _open(self, entry: dict[str, Any]) -> Op:
        limits = _limits(parse_limits(entry["limits"])) if entry.get("limits") else {}
        return {**({"limits": limits} if limits else {}), **_version(entry)}

    def _before(self, entry: dict[str, Any]) -> Op:
        op: Op = {"call": entry["call"], "tool": entry["tool"], "agent": entry.get("agent", ""), "args": _args(entry)}
        if "key" in entry:
            op["idempotency_key"] = entry["key"]
            self.ops += self.effects.before(entry, self._at(entry), op["args"])
            if entry.get("action") == "execute":
                self._claimed[entry["run"], entry["call"]] = self._at(entry)
        if "scope" in entry:
            op["scope"] = entry["scope"]
        if "retry" in entry:
            op["retry"] = {"change": entry["retry"]}
        return op | _version(entry) | _usage(entry) | _reserve(entry)

    def _after(self, entry: dict[str, Any]) -> Op:
        self._renew(entry)
        self.effects.after(entry)
        op: Op = {"call": entry["call"], "status": entry["status"], **_usage(entry)}
        run, verdict = entry["run"], entry.get("verdict", "")
        if "version" in entry:
            self._versions[run] = max(self._versions[run], int(entry["version"]))
            op["progress_version"] = int(entry["version"])
        elif entry.get("moved"):
            self._versions[run] += 1
            op["progress_version"] = self._versions[run]
        elif entry.get("rounds", "0") != "0":
            op["progress_version"] = self._versions[run]
        if verdict == "invalid":
            self.tools.setdefault(entry["tool"], {})["result_schema"] = {"not": {"const": INVALID}}
            op["value"] = INVALID
        elif verdict:
            op["value"] = None
        elif "digest" in entry:
            op["value"] = {"digest": entry["digest"]}
        if entry.get("outcome") in ("commit", "free"):
            op["side_effect_committed"] = entry["outcome"] == "commit"
        if "retry_ms" in entry:
            op["retry_after_ms"] = int(entry["retry_ms"])
        if "operation_id" in entry:
            op["operation_id"] = entry["operation_id"]
        return op

    def _renew(self, entry: dict[str, Any]) -> None:
        """Renewals leave no entry: a result that was in time for its claim had them."""
        claimed_ms = self._claimed.pop((entry["run"], entry["call"]), None)
        lease_ms = int(self._document["limits"]["claim_lease_ms"])
        if claimed_ms is None or entry.get("claim") == "stale":
            return
        for at_ms in range(
            claimed_ms + lease_ms // RENEWALS_A_LEASE, self._at(entry), max(1, lease_ms // RENEWALS_A_LEASE)
        ):
            self.ops.append({"op": "renew", "at_ms": at_ms, "run": entry["run"], "call": entry["call"], "expect": {}})

    def _charge(self, entry: dict[str, Any]) -> Op:
        return {"op_id": entry["call"], **_usage(entry), **_reserve(entry)}

    def _settle(self, entry: dict[str, Any]) -> Op:
        return {"op_id": entry["call"], **_usage(entry)}

    def _handoff(self, entry: dict[str, Any]) -> Op:
        return {"op_id": entry["call"], "from": entry["agent"], "to": entry["to"], "state": entry.get("state", "")}

    def _checkpoint(self, entry: dict[str, Any]) -> Op:
        return {"version": int(entry["version"]), **({"ref": entry["ref"]} if "ref" in entry else {})}

    def _freeze(self, entry: dict[str, Any]) -> Op:
        return {"scope": entry["scope"]}

    def _resume(self, entry: dict[str, Any]) -> Op:
        return {
            "change": entry["change"],
            **({"limits": _limits(parse_limits(entry["limits"]))} if "limits" in entry else {}),
        }

    def _kill(self, entry: dict[str, Any]) -> Op:
        return {"reason": entry["asked"]}

    def _finish(self, entry: dict[str, Any]) -> Op:
        return {"reason": entry["asked"]}


def _args(entry: dict[str, Any]) -> Any:
    """The arguments when they are whole, else their fingerprint; the target where a rule looks at it."""
    text = entry.get("args", "{}")
    is_whole = text != CUT and canonical.fingerprint(entry["tool"], text) == entry.get("fp")
    args = json.loads(text) if is_whole else {"fingerprint": entry.get("fp", "")}
    if "target" in entry:
        args = {**(args if isinstance(args, dict) else {"args": args}), TARGET: entry["target"]}
    return args


def _evidence(entry: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {name: int(entry[name]) for name in ("limit", "observed") if name in entry}
    return found | ({"steps": [int(step) for step in entry["steps"].split(",")]} if "steps" in entry else {})


def _version(entry: dict[str, Any]) -> Op:
    return {"progress_version": int(entry["version"])} if "version" in entry else {}


def _usage(entry: dict[str, Any]) -> Op:
    used = {name: int(entry[name]) for name in AMOUNTS if name in entry}
    return {"usage": used} if used else {}


def _reserve(entry: dict[str, Any]) -> Op:
    held = dict(part.split("=") for part in entry.get("reserve", "").split())
    return {"reserve": {name: int(value) for name, value in held.items()}} if held else {}
