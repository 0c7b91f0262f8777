"""The guard and the model of its rules, asked the same things; every answer must be equal."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.model.limits import REFERENCE, Policy
from guardd.model.tools import ToolRules
from guardd.store.connect import open_store
from tests.reference.model import ReferenceGuard

COMPARED = ("action", "reason", "retry_after_ms", "claim", "error")
TOOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "read": {"read_only": True, "no_progress_exempt": True, "window_scope": "agent"},
    "pay": {"effect_key": ["i"]},
    "put": {"on_in_doubt": "reclaim", "requires_key": True},
    "poll": {"cycle_exempt": True, "max_same_call": 5, "progress": {"pointer": "/cursor", "when": "increases"}},
    "seen": {"progress": {"pointer": "/cursor", "when": "new"}, "max_empty": 1},
    "note": {"target_args": ["i"], "max_same_target": 3, "allow_empty": True},
    "team": {"window_scope": "tree", "max_retries": 1},
    "refund": {"effect_scope": "global"},
}


class Pair:
    """One guard on one store beside one model. `now` is the clock of both."""

    def __init__(self, url: str, limits: dict[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self.opened = self.loop.run_until_complete(open_store(url))
        policy = Policy("reference", {**REFERENCE.limits, **limits}, REFERENCE.volatile_args)
        self.config = EngineConfig(
            policies={"reference": policy}, default_policy="reference", tools=ToolRules(TOOLS),
            prefix=f"p{secrets.token_hex(6)}", virtual_clock=True,
        )  # fmt: skip
        self.model = ReferenceGuard(limits, TOOLS, None)
        self.now = 1000
        self._number = 0
        self.another_daemon()

    def another_daemon(self) -> None:
        """An engine has caches only: a new one goes on in the middle of a run."""
        self.guard = Engine(self.opened.store, self.config)

    def flush_scripts(self) -> None:
        """The server forgets all scripts."""
        self.loop.run_until_complete(self.opened.store.execute(("SCRIPT", "FLUSH")))

    def fresh(self, kind: str) -> str:
        """An id nobody has used."""
        self._number += 1
        return f"{kind}{self._number}"

    @property
    def number(self) -> int:
        """How many ids were used."""
        return self._number

    def play(self, op: str, **params: Any) -> dict[str, Any]:
        """Asks both and compares; `value=...` (Ellipsis) leaves the value out."""
        request = {name: value for name, value in params.items() if value is not None or name == "value"} | {
            "at_ms": self.now
        }
        if request.get("value") is ...:
            del request["value"]
        expected = self.model.call(op, request, self.now)
        try:
            actual = self.loop.run_until_complete(self.guard.call(op, request)).as_dict()  # type: ignore[union-attr]
        except GuardError as error:
            actual = error.as_dict()
        shown = {name: actual[name] for name in COMPARED if name in actual}
        assert shown == expected, f"{op} {request}: the rules say {expected}, the guard says {shown}"
        return expected

    def agree(self) -> None:
        """Counters, status and version of every run are those of the model."""
        for path, run in self.model.runs.items():
            state = self.loop.run_until_complete(self.guard.reader.inspect(path, self.now))
            counters = state["counters"]
            actual = (
                counters["steps"], counters["tokens"], counters["held_tokens"], counters["cost_micros"],
                state["status"], state["reason"], state["progress"]["version"],
            )  # fmt: skip
            status = "ended" if run.reason else "waiting" if run.human else "running"
            expected = (
                run.steps, run.used.get("tokens", 0), run.held.get("tokens", 0), run.used.get("cost_micros", 0),
                status, run.reason or "", run.version or 0,
            )  # fmt: skip
            assert actual == expected, f"{path}: the rules say {expected}, the guard says {actual}"

    def close(self) -> None:
        """Removes the keys and closes the connection."""

        async def forget() -> None:
            (keys,) = await self.opened.store.execute(("KEYS", f"{self.config.prefix}:*"))
            if keys:
                await self.opened.store.execute(("UNLINK", *keys))
            await self.opened.close()

        self.loop.run_until_complete(forget())
        self.loop.close()
