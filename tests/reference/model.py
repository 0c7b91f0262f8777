"""The rules of SPEC chapter 2 as dicts and lists: slow, obvious, and nothing of guardd in it.

`ReferenceGuard.call(op, params)` answers as the guard should: action, reason,
retry_after_ms and claim where they apply, or {"error": name}.
"""

from __future__ import annotations

import copy
import json
import unicodedata
from typing import Any

from tests.reference.ledger import Ledger
from tests.reference.tree import Run, Tree

Answer = dict[str, Any]
CHANGES = {"new_cursor", "retry_after_elapsed", "arguments_corrected", "authorization_renewed", "strategy_changed"}
OVER = "over"


class Refused(Exception):
    """An error by its name; nothing is stored."""


def canon(value: Any, volatile: set[str]) -> Any:
    """SPEC 2.1, as far as the tests' arguments go."""
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, dict):
        return {k: canon(v, volatile) for k, v in value.items() if v is not None and k not in volatile}
    return [canon(item, volatile) for item in value] if isinstance(value, list) else value


def answer(action: str, reason: str = "", **extras: Any) -> Answer:
    return {"action": action, **({"reason": reason} if reason else {}), **extras}


class ReferenceGuard:
    """A guard in one process. limits: of every root run; tools: rules by exact name."""

    def __init__(self, limits: dict[str, Any], tools: dict[str, dict[str, Any]], volatile: set[str]) -> None:
        self.limits, self.tools, self.volatile = limits, tools, volatile
        self.trees: dict[str, Tree] = {}
        self.ledger = Ledger()
        self.now = 0

    def call(self, op: str, params: dict[str, Any]) -> Answer:
        self.now = params["at_ms"]
        kept = copy.deepcopy((self.trees, self.ledger))
        try:
            return getattr(self, op)(params)  # type: ignore[no-any-return]
        except Refused as refused:
            self.trees, self.ledger = kept
            return {"error": str(refused)}

    # ---- Runs ------------------------------------------------------------------

    def enter(self, path: str, *, make: bool = True, always: bool = False) -> tuple[list[Run], Answer | None]:
        """The chain, root first, with what is missing made; or the answer that forbids it."""
        names = path.split("/")
        tree = self.trees.get(names[0])
        depth_max = (tree.runs[names[0]].limits if tree and names[0] in tree.runs else self.limits)["max_depth"]
        if depth_max is not None and len(names) - 1 > depth_max:
            return [], answer("deny", "handoff_depth")
        if tree is None:
            tree = Tree(names[0])
            if make:
                self.trees[names[0]] = tree
        chain: list[Run] = []
        for depth in range(1, len(names) + 1):
            name = "/".join(names[:depth])
            if name not in tree.runs:
                if not make or any(run.reason for run in chain):
                    break
                if not always and any("subruns" in run.freeze for run in chain):
                    return chain, answer("wait", "frozen")
                limits = dict(chain[-1].limits if chain else self.limits)
                tree.runs[name] = Run(name, tree, limits, self.now)
            chain.append(tree.runs[name])
        return chain, None

    def state(self, chain: list[Run]) -> Answer:
        return self.ended(chain) or self.paused(chain, {"all"}) or answer("continue")

    def ended(self, chain: list[Run]) -> Answer | None:
        return next((answer("stop", run.reason) for run in reversed(chain) if run.reason), None)

    def paused(self, chain: list[Run], scopes: set[str]) -> Answer | None:
        if any(scopes & run.freeze for run in chain):
            return answer("wait", "frozen")
        return answer("wait", "human_required") if any(run.is_waiting for run in chain) else None

    def end(self, run: Run, reason: str, by: str) -> None:
        if not run.reason:
            run.reason, run.ended_by = reason, by

    def tick(self, root: str) -> None:
        """Time passes for the runs of a tree that are not held (SPEC 2.8)."""
        if root in self.trees:
            self.trees[root].tick(self.now)

    def open(self, p: dict[str, Any]) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"])
        if refused:
            return refused
        own, version = chain[-1], p.get("progress_version")
        if own.path == p["run"] and version is not None:
            if not own.reports and own.version == 0:
                own.reports, own.version = True, version
            else:
                self.progress(own, version)
        return self.state(chain)

    def kill(self, p: dict[str, Any]) -> Answer:
        return self.stop(p, p.get("reason", "killed"), "kill")

    def finish(self, p: dict[str, Any]) -> Answer:
        return self.stop(p, p.get("reason", "complete"), "finish")

    def stop(self, p: dict[str, Any], reason: str, by: str) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"], always=True)
        if refused:
            return refused
        if not self.ended(chain):
            self.end(chain[-1], reason, by)
        return self.ended(chain) or {}

    def freeze(self, p: dict[str, Any]) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"], always=True)
        if refused or self.ended(chain):
            return refused or self.ended(chain) or {}
        chain[-1].freeze = set(p.get("scope", "all").split(","))
        return answer("wait", "frozen")

    def resume(self, p: dict[str, Any]) -> Answer:
        if p["change"] not in CHANGES | {"limits_raised", "human_input"}:
            raise Refused("change_required")
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"], make=False)
        if refused or not chain or chain[-1].path != p["run"]:
            raise Refused("unknown_run")
        own = chain[-1]
        is_open_end = (
            own.ended_by in ("rule", "cap", "refusal") or own.reason == "framework_cap" and own.ended_by == "finish"
        )
        if (own.reason and not is_open_end) or any(run.reason for run in chain[:-1]):
            raise Refused("not_resumable")
        own.limits |= p.get("limits", {})
        if own.reason and self.capped(chain, with_steps=True):
            raise Refused("limits_needed")
        was_only_frozen = bool(own.freeze) and not own.reason and not own.is_waiting
        own.freeze = set()
        if not was_only_frozen:
            own.reason = own.ended_by = ""
            own.is_waiting = False
            own.clear()
            own.refused, own.streaks = {}, {}
        return self.state(chain)

    def checkpoint(self, p: dict[str, Any]) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"])
        return refused or self.state(chain)

    # ---- Budgets, progress, streaks ----------------------------------------------

    def charge_usage(self, chain: list[Run], usage: dict[str, int] | None) -> None:
        for run in chain:
            for name, amount in (usage or {}).items():
                run.used[name] += amount

    def hold(self, chain: list[Run], reserve: dict[str, int] | None, sign: int) -> None:
        for run in chain:
            for name, amount in (reserve or {}).items():
                run.held[name] += sign * amount

    def capped(self, chain: list[Run], *, with_steps: bool) -> tuple[Run, str] | None:
        for run in reversed(chain):
            cap = run.limits
            if with_steps and cap["max_steps"] is not None and run.steps >= cap["max_steps"]:
                return run, "step_cap"
            if cap["max_wall_ms"] is not None and run.elapsed >= cap["max_wall_ms"]:
                return run, "wall_clock_cap"
            for name, limit, reason in AMOUNTS:
                if cap[limit] is not None and (run.used[name] > cap[limit] or cap[limit] == 0):
                    return run, reason
        return None

    def unfit(self, chain: list[Run], reserve: dict[str, int] | None) -> str:
        for run in reversed(chain):
            for name, limit, reason in AMOUNTS:
                wanted, cap = (reserve or {}).get(name, 0), run.limits[limit]
                if wanted and cap is not None and run.used[name] + run.held[name] + wanted > cap:
                    return reason
        return ""

    def progress(self, run: Run, version: int | None) -> bool:
        if version is None:
            return False
        run.reports = True
        if version <= run.version:
            return False
        run.version = version
        run.clear()
        return True

    def refuse(self, run: Run, agent: str, reason: str) -> Answer:
        """A refusal that counts; the one that fills the streak ends the run."""
        run.streaks[agent] = run.streaks.get(agent, 0) + 1
        cap = run.limits["max_denied"]
        if cap is not None and run.streaks[agent] >= cap:
            by = "refusal" if reason in ("permission_denied", "policy_blocked", "invalid_input") else "rule"
            self.end(run, reason, by)
            return answer("stop", reason)
        return answer("deny", reason)

    def charge(self, p: dict[str, Any]) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"])
        if refused and refused["action"] == "deny":
            return refused
        ops = self.trees[p["run"].split("/")[0]].ops
        known = ops.get(p["op_id"])
        if known and (known["run"] != p["run"] or known["op"] != "charge"):
            raise Refused("call_conflict")
        if not known:
            self.charge_usage(chain, p.get("usage"))
        said = self.ended(chain) or refused or self.paused(chain, {"all"})
        if not said and known and known["first"]["action"] in ("continue", "deny"):
            return known["first"]  # type: ignore[no-any-return]
        reserve: dict[str, int] | None = None
        if not said and (found := self.capped(chain, with_steps=False)):
            self.end(found[0], found[1], "cap")
            said = self.ended(chain)
        if not said and (reason := self.unfit(chain, p.get("reserve"))):
            said = answer("deny", reason)
        if not said:
            reserve = p.get("reserve")
            self.hold(chain, reserve, 1)
            said = answer("continue")
        if known and known["first"]["action"] in ("continue", "deny"):
            return said
        ops[p["op_id"]] = {"op": "charge", "run": p["run"], "first": said, "reserve": reserve, "settled": False}
        return said

    def settle(self, p: dict[str, Any]) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, _ = self.enter(p["run"], make=False)
        tree = self.trees.get(p["run"].split("/")[0])
        known = tree.ops.get(p["op_id"]) if tree else None
        if not known or known["run"] != p["run"] or known["op"] != "charge" or known["first"]["action"] != "continue":
            raise Refused("unknown_operation")
        if not known["settled"]:
            known["settled"] = True
            self.charge_usage(chain, p.get("usage"))
            self.hold(chain, known["reserve"], -1)
        return self.state(chain)

    def handoff(self, p: dict[str, Any]) -> Answer:
        self.tick(p["run"].split("/")[0])
        chain, refused = self.enter(p["run"])
        if refused and refused["action"] == "deny":
            return refused
        tree, state = self.trees[p["run"].split("/")[0]], json.dumps(p.get("state", OVER), sort_keys=True)
        known, wanted = tree.ops.get(p["op_id"]), [p["run"], p["from"], p["to"], state]
        if known and (known["op"] != "handoff" or known["wanted"] != wanted):
            raise Refused("call_conflict")
        said = self.ended(chain) or refused or self.paused(chain, {"all", "handoffs"})
        if not said and known and known["first"]["action"] in ("continue", "deny"):
            return known["first"]  # type: ignore[no-any-return]
        if not said and (found := self.capped(chain, with_steps=False)):
            self.end(found[0], found[1], "cap")
            said = self.ended(chain)
        if not said:
            path = (tree.path or [(p["from"], state)]) + [(p["to"], state)]
            returns = sum(agent == p["to"] for agent, _ in path[:-1])
            most, role_most = chain[0].limits["max_handoffs"], chain[0].limits["max_role_returns"]
            if any(path[-n:] == path[-2 * n : -n] for n in range(2, len(path) // 2 + 1)):
                said = self.refuse(chain[-1], p["from"], "handoff_cycle")
            elif (most is not None and tree.handoffs + 1 > most) or (role_most is not None and returns > role_most):
                said = self.refuse(chain[-1], p["from"], "handoff_cap")
            else:
                tree.path, tree.handoffs, said = path, tree.handoffs + 1, answer("continue")
        if known and known["first"]["action"] in ("continue", "deny"):
            return said
        tree.ops[p["op_id"]] = {"op": "handoff", "wanted": wanted, "first": said, "run": p["run"]}
        return said

    # ---- Calls: tests/reference/judging.py ---------------------------------------

    def before(self, p: dict[str, Any]) -> Answer:
        from tests.reference.judging import judge

        return judge(self, p)

    def after(self, p: dict[str, Any]) -> Answer:
        from tests.reference.judging import report

        return report(self, p)

    def resolve(self, p: dict[str, Any]) -> Answer:
        is_global = "global" in (p.get("scope"), self.tools.get(p["tool"], {}).get("effect_scope"))
        owner = "*" if is_global else p["run"].split("/")[0]
        error = self.ledger.resolve((owner, p["tool"], p["idempotency_key"]), p["state"], self.now)
        if error:
            raise Refused(error)
        return answer("continue")


AMOUNTS = (
    ("model_calls", "max_model_calls", "model_call_cap"),
    ("tokens", "max_tokens", "token_cap"),
    ("cost_micros", "max_cost_micros", "cost_cap"),
)
