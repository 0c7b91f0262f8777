"""ReferenceGuard: the way in, and the operator's operations (SPEC 2.8)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.reference.before import RETRY_CHANGES
from tests.reference.canonical import Misuse
from tests.reference.operations import Operations
from tests.reference.policy import tool_name, tool_rule
from tests.reference.state import Answer, Params, Run

RESUME_CHANGES = RETRY_CHANGES | {"limits_raised", "human_input"}
FREEZE_SCOPES = {"retries", "handoffs", "subruns", "effects", "all"}
FINISH_REASONS = {"complete", "fatal", "cancelled", "framework_cap"}
OPERATIONS = {
    "open",
    "before",
    "after",
    "renew",
    "charge",
    "settle",
    "handoff",
    "checkpoint",
    "finish",
    "kill",
    "freeze",
    "resume",
    "resolve",
    "deny_rule",
}


class ReferenceGuard(Operations):
    """The rules of SPEC 2 on a clock that the caller brings.

    Args:
        default_policy_limits: limits over the policy's, for every run.
        tools:    tool rules by name or glob.
        volatile: replaces the policy's list of volatile members when given.
        policy:   `reference` or `agent`, for runs that name none.
    """

    def call(self, op: str, params: dict[str, Any], at_ms: int) -> Answer:
        """Play one operation at `at_ms` (monotonic). Misuse is answered `{"error": name}` and stores nothing."""
        assert at_ms >= self.now, "the clock goes forward"
        self.now = at_ms
        try:
            if op not in OPERATIONS:
                raise Misuse("bad_argument")
            given = {
                name: value
                for name, value in params.items()
                if name != "at_ms" and (value is not None or name == "value")
            }
            return dict(getattr(self, op)(given))
        except Misuse as misuse:
            return {"error": misuse.name}

    # ---- What a scenario expects at its end --------------------------------

    def executions(self) -> dict[str, int]:
        """Tool -> calls that were executed."""
        return dict(Counter(self.executed))

    def terminal(self) -> dict[str, str]:
        """Run -> its own terminal reason."""
        return {path: run.reason for path, run in self.runs.items() if run.reason}

    def ledger(self) -> dict[str, str]:
        """`scope/tool/key` -> state."""
        return {"/".join(key): record.state for key, record in self.effects.records.items()}

    # ---- Runs from outside -------------------------------------------------

    def open(self, asks: Params) -> Answer:
        """Name a run, its policy, limits and baseline version. The first open counts, even after calls."""
        if self.too_deep(asks["run"]):
            return {"action": "deny", "reason": "handoff_depth"}
        family = self.enter(asks["run"])
        answer = self.halted(family, "open")
        if answer:
            return answer
        run, version = family.own, asks.get("progress_version")
        assert run is not None
        if not run.opened:
            if asks.get("policy"):
                run.policy = asks["policy"]
                run.limits = self.root_limits(run.policy)
            run.limits = run.limits | asks.get("limits", {})
        if not run.opened and run.version is None and version is not None:
            run.version, run.reports = version, True
        else:
            self.name_version(run, version)
        run.opened = True
        return self.state(family)

    def kill(self, asks: Params) -> Answer:
        """End the run and all below it, whether it is known or not."""
        reason = asks.get("reason", "killed")
        if not 1 <= len(reason) <= 64 or not all(c.isascii() and (c.isalnum() or c in "._:-") for c in reason):
            raise Misuse("bad_argument")
        return self.end_from_outside(asks["run"], reason, "kill")

    def finish(self, asks: Params) -> Answer:
        """End the run with what a framework or worker says of it."""
        reason = asks.get("reason", "complete")
        if reason not in FINISH_REASONS:
            raise Misuse("bad_argument")
        return self.end_from_outside(asks["run"], reason, "finish")

    def end_from_outside(self, path: str, reason: str, ended_by: str) -> Answer:
        """Answers with the terminal reason that stands: the first one stays."""
        if self.too_deep(path):
            return {"action": "deny", "reason": "handoff_depth"}
        family = self.enter(path, passes_freeze=True)
        if self.terminal_reason(family) is None:
            assert family.own is not None
            self.end(family.own, reason, ended_by)
        return self.state(family)

    def checkpoint(self, asks: Params) -> Answer:
        """Store the last safe point (SPEC 2.9); it judges nothing."""
        if self.too_deep(asks["run"]):
            return {"action": "deny", "reason": "handoff_depth"}
        return self.state(self.enter(asks["run"], passes_freeze=True))

    def freeze(self, asks: Params) -> Answer:
        """Pause what the comma list names; it replaces the one before."""
        scopes = set(asks.get("scope", "all").split(","))
        if not scopes <= FREEZE_SCOPES:
            raise Misuse("bad_argument")
        if self.too_deep(asks["run"]):
            return {"action": "deny", "reason": "handoff_depth"}
        family = self.enter(asks["run"])
        reason = self.terminal_reason(family)
        if reason:
            return {"action": "stop", "reason": reason}
        if family.own:  # else an ancestor's freeze of `subruns` keeps it from being made
            family.own.freeze = scopes
            self.mark_pause(family.own)
        return {"action": "wait", "reason": "frozen"}

    # ---- Resume ------------------------------------------------------------

    def resume(self, asks: Params) -> Answer:
        """Lift what holds the run, after a named change. What ended it decides, not the word."""
        if asks.get("change") not in RESUME_CHANGES:
            raise Misuse("change_required")
        family = self.find(asks["run"])
        run = family.own
        if run is None:
            raise Misuse("unknown_run")
        if self.final(run) or any(relative.reason for relative in family.chain[1:]):
            raise Misuse("not_resumable")
        limits = run.limits
        run.limits = limits | asks.get("limits", {})
        if run.reason and any(self.reached_cap(relative, counts_steps=True) for relative in family.chain):
            run.limits = limits
            raise Misuse("limits_needed")
        only_frozen = run.reason is None and bool(run.freeze) and not run.human
        run.reason, run.ended_by, run.human = None, "", False
        run.freeze = set()
        self.mark_pause(run)
        if not only_frozen:
            self.start_anew(run)
        return self.state(family)

    def final(self, run: Run) -> bool:
        """Ended by a kill, or by a word of the task itself; rules, caps and refusals can be lifted."""
        if run.ended_by == "finish":
            return run.reason != "framework_cap"
        return run.ended_by in ("kill", "result")

    def start_anew(self, run: Run) -> None:
        """Windows, streaks, counts and refusals start anew; steps, budgets, retries and ledger stay."""
        self.clear(run)
        run.streaks.clear()
        run.refusals.clear()
        run.round_tick = self.next_tick()

    # ---- What is in doubt, and what is forbidden ---------------------------

    def resolve(self, asks: Params) -> Answer:
        """The operator has looked at the outside system (SPEC 2.6). No run is made."""
        if asks.get("state") not in ("committed", "not_executed"):
            raise Misuse("bad_argument")
        self.find(asks["run"])
        tool = tool_name(asks["tool"], self.tools)
        key = self.record_name(asks, tool, tool_rule(tool, self.tools), asks["idempotency_key"])
        self.effects.resolve(key, asks["state"], self.now)
        return {"action": "continue"}

    def deny_rule(self, asks: Params) -> Answer:
        """An emergency rule for all runs; it is in force until it is removed or over."""
        if asks.get("remove"):
            self.deny_rules.pop(asks["id"], None)
        elif asks.get("tool") is None:
            raise Misuse("bad_argument")
        else:
            self.deny_rules[asks["id"]] = asks
        return {"action": "continue"}
