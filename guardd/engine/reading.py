"""What operators read: a run, its envelope, its trace, the ledger (SPEC 2.9). Nothing here changes state."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from urllib.parse import unquote

from guardd import canonical
from guardd.engine.config import EngineConfig
from guardd.engine.link import Link
from guardd.keys import Keys
from guardd.model.errors import UnknownRun
from guardd.model.ids import parents
from guardd.model.limits import AMOUNTS, parse_limits
from guardd.model.reasons import envelope_status

_EFFECTS_MAX = 100
_TOOLS_LOOKUP = 500
_ACTIVE_MS = 120_000
_COUNTERS = ("steps", "denied", "no_progress", *AMOUNTS, *(f"held_{name}" for name in AMOUNTS), "handoffs")

Fields = dict[str, str]


class Reader:
    """Reads runs as they are; each answer is one consistent look."""

    def __init__(self, store: Link, keys: Keys, config: EngineConfig) -> None:
        self._store = store
        self._keys = keys
        self._config = config

    @staticmethod
    def now_ms() -> int:
        """This machine's clock; used for hints and for showing, never to decide."""
        return time.time_ns() // 1_000_000

    async def envelope(self, run: str) -> dict[str, Any]:
        """What the run that ended (this one, else its nearest ancestor) says about itself; {} when none has."""
        chain = await self._chain(run)
        for path, fields in reversed(chain):
            if fields.get("status") == "ended":
                return await self._envelope(path, fields)
        return {}

    async def inspect(self, run: str, at_ms: int | None) -> dict[str, Any]:
        """State of one run.

        Raises: UnknownRun: nothing of this name is stored.
        """
        chain = await self._chain(run)
        path, fields = chain[-1]
        if "status" not in fields:
            raise UnknownRun("no run of this name is stored", field="run", value=run)
        calls = await self._calls(run)
        tools = await self._tools(run)
        ended = next((p for p, f in reversed(chain) if f.get("status") == "ended"), None)
        result: dict[str, Any] = {
            "run": path,
            "status": fields["status"],
            "reason": fields.get("reason", ""),
            "ended_by": fields.get("ended_by", ""),
            "ended_run": ended or "",
            "freeze": fields.get("freeze", ""),
            "policy": fields.get("policy", ""),
            "limits": _limits(fields),
            "counters": _counters(fields),
            "progress": _progress(fields),
            "checkpoint": _checkpoint(fields),
            "epoch": fields.get("epoch", ""),
            "labels": _quoted_pairs(fields.get("labels", "")),
            "tools": [unquote(tool) for tool in fields.get("tools", "").split()],
            "started_ms": int(fields.get("started_ms", 0)),
            "last_ms": int(fields.get("last_ms", 0)),
            "window": [
                {"step": step, "tool": tools.get(short, ""), "fingerprint": short} for step, short in _window(fields)
            ],
            "repeats": _repeats(fields, tools),
            "in_flight": _in_flight(calls, path),
            "operations": await self._operations(path, calls),
            "handoff_path": [unquote(holder.rpartition(":")[0]) for holder in chain[0][1].get("path", "").split()],
        }
        if ended or fields["status"] == "waiting":
            result["envelope"] = await self._envelope(*next((p, f) for p, f in chain if p == (ended or path)))
        return result

    async def runs(self, limit: int, is_waiting: bool, run_prefix: str = "") -> list[dict[str, Any]]:
        """Recent root runs, newest first; the index is a hint, so what has expired since is left out."""
        names = await self._one("ZREVRANGE", self._keys.runs, 0, -1 if is_waiting or run_prefix else limit * 8)
        paths = [path for path in (_text(name) for name in names) if "/" not in path and path.startswith(run_prefix)]
        found = await self._store.execute(*(("HGETALL", self._keys.run(path)) for path in paths)) if paths else []
        shown = []
        for path, reply in zip(paths, found, strict=True):
            fields = _fields(reply)
            is_held = fields.get("status") == "waiting" or bool(fields.get("freeze"))
            if "status" not in fields or (is_waiting and not is_held):
                continue
            shown.append(
                {
                    "run": path,
                    "status": fields["status"],
                    "reason": fields.get("reason", ""),
                    "freeze": fields.get("freeze", ""),
                    "policy": fields.get("policy", ""),
                    "labels": _quoted_pairs(fields.get("labels", "")),
                    "counters": _counters(fields),
                    "limits": _limits(fields),
                    "started_ms": int(fields.get("started_ms", 0)),
                    "last_ms": int(fields.get("last_ms", 0)),
                }
            )
            if len(shown) == limit:
                break
        return shown

    async def trace(self, run: str, limit: int, after: str | None, *, is_newest: bool = False) -> list[dict[str, Any]]:
        """Trace entries of a run and its sub-runs, oldest first; `id` goes on from there. is_newest: the last ones."""
        command, start, end = ("XREVRANGE", "+", "-") if is_newest else ("XRANGE", f"({after}" if after else "-", "+")
        shown: list[dict[str, Any]] = []
        while len(shown) < limit:
            entries = await self._one(command, self._keys.trace(run), start, end, "COUNT", min(limit, 1000))
            for entry_id, flat in entries:
                entry = {"id": _text(entry_id), **_fields(flat)}
                start = f"({entry['id']}"
                if entry.get("run", "") == run or entry.get("run", "").startswith(run + "/"):
                    shown.append(entry)
                    if len(shown) == limit:
                        break
            if len(entries) < min(limit, 1000):
                break
        return shown[::-1] if is_newest else shown

    async def ledger(
        self, is_in_doubt: bool, limit: int, at_ms: int | None, run_prefix: str = ""
    ) -> list[dict[str, Any]]:
        """Effects that are claimed or in doubt, oldest lease first."""
        members = await self._one("ZRANGE", self._keys.doubt, 0, -1 if run_prefix else limit * 4)
        keys = [_text(member) for member in members]
        found = await self._store.execute(*(("HGETALL", key) for key in keys)) if keys else []
        now_ms = at_ms if at_ms is not None else self.now_ms()
        shown = []
        for reply in found:
            fields = _fields(reply)
            state = fields.get("state")
            if not fields.get("run", "").startswith(run_prefix):
                continue
            if state == "claimed" and int(fields["until_ms"]) <= now_ms:
                state = "in_doubt"
            if state == "in_doubt" or (state == "claimed" and not is_in_doubt):
                shown.append({**_operation(fields), "state": state, "run": fields.get("run", ""),
                              "owner": fields.get("owner", ""), "until_ms": int(fields.get("until_ms", 0))})  # fmt: skip
        return shown[:limit]

    async def census(self) -> dict[str, int]:
        """Counts over all runs, from the indexes: hints, as they are.

        claimed: leases that run, those included whose effect has been reported since. in_doubt, oldest_ms: claims past
        their lease. active: runs heard of in the last two minutes.
        """
        now_ms, doubt = self.now_ms(), self._keys.doubt
        in_doubt, claimed, oldest, active = await self._store.execute(
            ("ZCOUNT", doubt, "-inf", now_ms), ("ZCOUNT", doubt, f"({now_ms}", "+inf"),
            ("ZRANGE", doubt, 0, 0, "WITHSCORES"), ("ZCOUNT", self._keys.runs, now_ms - _ACTIVE_MS, "+inf"),
        )  # fmt: skip
        oldest_ms = max(0, now_ms - int(float(oldest[1]))) if oldest and in_doubt else 0
        return {"in_doubt": in_doubt, "claimed": claimed, "oldest_ms": oldest_ms, "active": active}

    # ---- Inside ----------------------------------------------------------------

    async def _envelope(self, path: str, fields: Fields) -> dict[str, Any]:
        calls = await self._calls(path)
        is_waiting = fields.get("status") == "waiting"
        reason = "human_required" if is_waiting else fields.get("reason", "")
        ended_by = "result" if is_waiting else fields.get("ended_by", "")
        status, next_action = envelope_status(reason, ended_by)
        guard: dict[str, Any] = {"rule": fields.get("stop_rule", "")}
        guard |= {name: int(fields[f"stop_{name}"]) for name in ("limit", "observed") if f"stop_{name}" in fields}
        denied = {
            name: fields[f"stop_{stored}"]
            for name, stored in (
                ("tool", "tool"),
                ("args", "args"),
                ("agent", "agent"),
                ("fingerprint", "fp"),
                ("call", "call"),
            )
            if f"stop_{stored}" in fields
        }
        return {
            "run": path,
            "status": status,
            "reason": reason,
            "ended_by": ended_by,
            "retryable": False,
            "next_action": next_action,
            "guard": guard if guard["rule"] else {},
            "denied_call": denied,
            "repeats": _repeats(fields, await self._tools(path)),
            "checkpoint": _checkpoint(fields),
            "progress": _progress(fields),
            "counters": _counters(fields),
            "operations": await self._operations(path, calls),
            "in_flight": _in_flight(calls, path),
            "epoch": fields.get("epoch", ""),
            "ended_at": int(fields.get("ended_ms", 0)) or None,
        }

    async def effect(self, key: str) -> dict[str, Any]:
        """One ledger record, by its key in the store; {}: it is gone."""
        fields = _fields(await self._one("HGETALL", key))
        return (
            {**_operation(fields), "run": fields.get("run", ""), "owner": fields.get("owner", "")}
            if fields.get("state")
            else {}
        )

    async def effect_keys(self, run: str) -> list[str]:
        """Keys of the ledger records that the run's tree has named, newest last."""
        return self._effect_keys(run, await self._calls(run))

    def _effect_keys(self, path: str, calls: dict[str, Fields]) -> list[str]:
        named = [(name[2:], record["scope"]) for name, record in calls.items() if name.startswith("e:")][-_EFFECTS_MAX:]
        return [
            self._keys.global_op(digest) if scope == "global" else self._keys.op(path, digest)
            for digest, scope in named
        ]

    async def _operations(self, path: str, calls: dict[str, Fields]) -> list[dict[str, Any]]:
        """The effects of the tree; those of a sub-run only, when it is one that ended."""
        keys = self._effect_keys(path, calls)
        found = await self._store.execute(*(("HGETALL", key) for key in keys)) if keys else []
        records = [_fields(reply) for reply in found]
        return [
            _operation(fields)
            for fields in records
            if fields.get("state") and (f"{fields.get('run', '')}/").startswith(f"{path}/")
        ]

    async def _chain(self, run: str) -> list[tuple[str, Fields]]:
        paths = [*parents(run), run]
        replies = await self._store.transaction(*(("HGETALL", self._keys.run(path)) for path in paths))
        return [(path, _fields(reply)) for path, reply in zip(paths, replies, strict=True)]

    async def _calls(self, run: str) -> dict[str, Fields]:
        stored = _fields(await self._one("HGETALL", self._keys.calls(run)))
        records: dict[str, Fields] = {}
        for name, value in stored.items():
            if name.startswith("e:"):
                records[name] = {"scope": value}
            elif not name.startswith("@"):
                records[name] = dict(part.split("=", 1) for part in value.split())
        return records

    async def _tools(self, run: str) -> dict[str, str]:
        """Tool names by short fingerprint, as far as the newest trace entries tell."""
        entries = await self._one("XREVRANGE", self._keys.trace(run), "+", "-", "COUNT", _TOOLS_LOOKUP)
        names: dict[str, str] = {}
        for _, flat in entries:
            entry = _fields(flat)
            if entry.get("op") == "before" and "fp" in entry:
                names.setdefault(canonical.short(entry["fp"]), entry.get("tool", ""))
        return names

    async def _one(self, *command: Any) -> Any:
        (reply,) = await self._store.execute(command)
        return reply


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _fields(reply: Any) -> Fields:
    return {_text(name): _text(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}


def _counters(fields: Fields) -> dict[str, int]:
    return {name: int(fields.get(name, 0)) for name in _COUNTERS}


def _limits(fields: Fields) -> dict[str, Any]:
    return {name: value for name, value in parse_limits(fields.get("limits", "")).items() if value is not None}


def _progress(fields: Fields) -> dict[str, int | None]:
    return {
        "version": int(fields.get("progress_version", 0)),
        "at": int(fields.get("progress_ms", 0)) or None,
    }


def _checkpoint(fields: Fields) -> dict[str, Any] | None:
    if "checkpoint_ms" not in fields:
        return None
    return {
        "version": int(fields["checkpoint_version"]) if "checkpoint_version" in fields else 0,
        "ref": fields.get("checkpoint_ref", ""),
        "at": int(fields["checkpoint_ms"]),
    }


def _window(fields: Fields) -> list[tuple[int, str]]:
    entries = []
    for part in fields.get("recent", "").split():
        step, _, short = part.replace("~", ":").partition(":")
        entries.append((int(step), short))
    return entries


def _repeats(fields: Fields, tools: dict[str, str]) -> list[dict[str, Any]]:
    counted = Counter(short for _, short in _window(fields))
    return [
        {"tool": tools.get(short, ""), "fingerprint": short, "count": count}
        for short, count in counted.most_common()
        if count > 1
    ]


def _in_flight(calls: dict[str, Fields], path: str) -> list[str]:
    return sorted(
        name[2:]
        for name, record in calls.items()
        if name.startswith("c:")
        and record.get("state") == "open"
        and f"{record.get('run', '')}/".startswith(f"{path}/")
    )


def _operation(fields: Fields) -> dict[str, Any]:
    return {
        "key": fields.get("key", ""),
        "tool": fields.get("tool", ""),
        "scope": fields.get("scope", "run"),
        "state": fields.get("state", ""),
        "operation_id": fields.get("operation_id", ""),
    }


def _quoted_pairs(packed: str) -> dict[str, str]:
    return {unquote(name): unquote(value) for name, _, value in (part.partition("=") for part in packed.split())}
