"""Deny rules: emergency rules for all runs, held by each engine (SPEC 2.8, 3).

The rules are re-read every second. An engine that could not read them for 5 s
does not know what is forbidden and lets nothing through.
"""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from guardd.engine.link import Link
from guardd.keys import Keys
from guardd.model.errors import BadArgument, StoreUnavailable
from guardd.model.ids import check_name, check_run
from guardd.protocol.operations import DenyRule
from guardd.scripts import stubs

REREAD_S = 1.0
STALE_S = 5.0


class StoredRule(msgspec.Struct, frozen=True):
    """A rule as it stands in the store, JSON."""

    tool: str
    run_prefix: str = ""
    until_ms: int | None = None
    note: str = ""


class DenyRules:
    """The rules in force, as of at most a second ago."""

    def __init__(self, store: Link, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._rules: dict[str, StoredRule] = {}
        self._read_s = float("-inf")
        self._server_ms, self._server_s = 0, 0.0

    async def ensure_fresh(self) -> None:
        """Re-reads the rules when they are older than a second.

        Raises: StoreUnavailable: they are older than 5 s and cannot be read.
        """
        age_s = time.monotonic() - self._read_s
        if age_s < REREAD_S:
            return
        try:
            await self.read()
        except StoreUnavailable:
            if age_s >= STALE_S:
                raise

    async def read(self) -> None:
        """Reads all rules from the store."""
        asked_s = time.monotonic()
        now, *stored = await self._store.invoke(stubs.deny_rules(deny_key=self._keys.deny))
        if asked_s < self._read_s:  # an answer that was overtaken by a younger one
            return
        self._server_ms, self._server_s = int(now), time.monotonic()
        self._rules = {
            (name.decode() if isinstance(name, bytes) else name): msgspec.json.decode(rule, type=StoredRule)
            for name, rule in zip(stored[::2], stored[1::2], strict=True)
        }
        self._read_s = asked_s

    def _now_ms(self) -> int:
        """The server's clock as last heard, and what went by since: a jump of this machine's clock lifts no rule."""
        return self._server_ms + int((time.monotonic() - self._server_s) * 1000)

    def has(self, name: object) -> bool:
        """True when there is a rule of this id, or when it is not known yet whether there is."""
        return self._read_s == float("-inf") or (isinstance(name, str) and name in self._rules)

    def listed(self) -> list[dict[str, Any]]:
        """The rules that are not over, as last read: id, tool, run_prefix ("": all runs), until_ms (None: until removed), note."""
        now_ms = self._now_ms()
        return [
            {"id": name, "tool": rule.tool, "run_prefix": rule.run_prefix, "until_ms": rule.until_ms, "note": rule.note}
            for name, rule in sorted(self._rules.items())
            if rule.until_ms is None or rule.until_ms > now_ms
        ]

    def match(self, tool: str, run: str, at_ms: int | None) -> str:
        """The id of the first rule (by id) that forbids this tool in this run now; "" for none."""
        if not self._rules:
            return ""
        now_ms = at_ms if at_ms is not None else self._now_ms()
        for name, rule in sorted(self._rules.items()):
            if rule.until_ms is not None and now_ms >= rule.until_ms:
                continue
            if run.startswith(rule.run_prefix) and fnmatchcase(tool, rule.tool):
                return name
        return ""

    async def change(self, request: DenyRule) -> None:
        """Stores or removes a rule and reads all of them again.

        Raises: BadArgument: no tool pattern.
        """
        check_name("id", request.id)
        if request.remove:
            await self._store.execute(("HDEL", self._keys.deny, request.id))
        else:
            if not request.tool:
                raise BadArgument(
                    "a deny rule needs a tool pattern, or remove = true",
                    field="tool",
                    value=request.tool,
                    limit="a glob",
                )
            check_name("tool", request.tool)
            if request.run_prefix:
                check_run(request.run_prefix.rstrip("/"))
            rule = StoredRule(request.tool, request.run_prefix or "", request.until_ms, request.note or "")
            await self._store.execute(("HSET", self._keys.deny, request.id, msgspec.json.encode(rule)))
        await self.read()
