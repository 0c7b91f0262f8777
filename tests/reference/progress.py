"""Windows, streaks, versions and rounds (SPEC 2.2 step 10 and streak, 2.4)."""

from __future__ import annotations

from typing import Any

from tests.reference.canonical import at_pointer, dumps, normal
from tests.reference.policy import READ_ONLY, Rule, tool_rule
from tests.reference.state import Answer, Call, Entry, Operation, Run, Tree

CYCLE_PERIOD_MAX = 16
SEEN_VALUES_MAX = 1_024


class Progress(Tree):
    """What repeats, and what makes a repeat harmless."""

    def rule_of(self, run: Run, tool: str) -> Rule:
        """The tool's rule over what the run's policy says of read-only tools (SPEC 2.10)."""
        rule = tool_rule(tool, self.tools)
        return READ_ONLY[run.policy] | rule if rule.get("read_only") else rule

    def limit(self, run: Run, tool: str, name: str) -> Any:
        """A limit of the run, unless the tool has its own."""
        rule = self.rule_of(run, tool)
        return rule[name] if name in rule else run.limits[name]

    # ---- Windows (SPEC 2.2 step 10) ----------------------------------------

    def window_of(self, run: Run, tool: str, agent: str) -> list[Entry]:
        """The one window a call belongs to: the run's, the agent's own, or the tree's."""
        scope = self.limit(run, tool, "window_scope")
        if scope == "tree":
            return self.root_of(run.path).tree_window
        if scope == "agent":
            return run.agent_windows.setdefault(agent, [])
        return run.window

    def same_call(self, run: Run, asked: Call) -> bool:
        """Too many equal calls among the newest; the look back is never shorter than the allowance."""
        allowed = self.limit(run, asked.tool, "max_same_call")
        if allowed is None:
            return False
        window = self.window_of(run, asked.tool, asked.agent)
        length = run.limits["cycle_window"]
        newest = window if length is None else window[max(0, len(window) - max(length, allowed)) :]
        return bool([entry.fingerprint for entry in newest].count(asked.fingerprint) >= allowed)

    def same_target(self, run: Run, asked: Call) -> bool:
        """Too many calls of one coarse fingerprint since the last progress (SPEC 2.1)."""
        allowed = self.limit(run, asked.tool, "max_same_target")
        if asked.target is None or allowed is None:
            return False
        return bool(run.targets.get((asked.tool, asked.target), 0) >= allowed)

    def short_cycle(self, run: Run, asked: Call) -> bool:
        """This call would close a second equal lap of some period. n = 2 is A B A + B."""
        if self.rule_of(run, asked.tool).get("cycle_exempt"):
            return False
        longest = run.limits["max_cycle_period"]
        window = self.window_of(run, asked.tool, asked.agent)
        history = [entry.fingerprint for entry in window if not entry.exempt] + [asked.fingerprint]
        for period in range(2, (CYCLE_PERIOD_MAX if longest is None else longest) + 1):
            lap, lap_before = history[-period:], history[-2 * period : -period]
            if lap == lap_before and len(set(lap)) > 1:
                return True
        return False

    # ---- Streaks (SPEC 2.2) ------------------------------------------------

    def refuse(self, run: Run, agent: str, reason: str, asked: Call | Operation | None) -> Answer:
        """A denial that counts: the one that reaches `max_denied` ends the run and is answered `stop`.

        One attempt counts once, however often it is sent (`asked`; None counts always).
        """
        if asked is None or not asked.streak_counted:
            run.streaks[agent] = run.streaks.get(agent, 0) + 1
            if asked is not None:
                asked.streak_counted = True
            allowed = run.limits["max_denied"]
            if allowed is not None and run.streaks[agent] >= max(1, allowed) and not self.observes(run):
                self.end(run, reason, "rule")
                return {"action": "stop", "reason": reason}
        return {"action": "deny", "reason": reason}

    def observes(self, run: Run) -> bool:
        """SPEC 2.10: limits are being tried out, nothing is enforced but kills, pauses and the ledger."""
        return bool(run.limits["mode"] == "observe")

    # ---- Versions (SPEC 2.4) -----------------------------------------------

    def name_version(self, run: Run, version: int | None) -> bool:
        """Take a version that was named; True when it is progress."""
        if version is None:
            return False
        run.reports = True
        higher = version > (run.version or 0)
        run.version = max(version, run.version or 0)
        if higher:
            self.progress(run)
        return higher

    def progress(self, run: Run) -> None:
        """Confirmed external change: what was counted as standing still starts anew."""
        self.clear(run)
        run.round_tick = self.next_tick()

    def clear(self, run: Run) -> None:
        """What progress clears. Retries, retry times, refusals, streaks and the number of handoffs stay."""
        root = self.root_of(run.path)
        run.window.clear()
        run.agent_windows.clear()
        root.tree_window.clear()
        run.empties.clear()
        run.targets.clear()
        run.replays.clear()
        run.no_progress = 0
        del root.handoff_path[:-1]

    def derive(self, run: Run, asked: Call, value: Any) -> bool:
        """Read the progress a tool shows itself; True when the value confirms some (SPEC 2.4)."""
        shown = self.rule_of(run, asked.tool).get("progress")
        found = at_pointer(value, shown["pointer"]) if shown else None
        if shown is None or found is None:
            return False
        if shown["when"] == "new":
            found = dumps(normal(found))
        elif isinstance(found, bool) or not isinstance(found, int | float):
            return False
        run.reports = True
        seen = run.derived.setdefault((asked.tool, asked.target), [])
        if shown["when"] == "increases":
            confirmed = bool(seen) and found > max(seen)
        elif shown["when"] == "decreases":
            confirmed = bool(seen) and found < min(seen)
        else:
            confirmed = bool(seen) and found not in seen and len(seen) < SEEN_VALUES_MAX
        if found not in seen and len(seen) < SEEN_VALUES_MAX:
            seen.append(found)
        return confirmed

    def count_round(self, run: Run, asked: Call, status: str) -> None:
        """A result without progress of a reporting run; too many in a row end the run (SPEC 2.4).

        Calls admitted before the last progress or the last round make none, so that
        parallel siblings count once.
        """
        assert asked.admitted_tick is not None
        if not run.reports or self.rule_of(run, asked.tool).get("no_progress_exempt"):
            return
        if asked.admitted_tick < run.round_tick or (asked.verified_retry and status == "retryable"):
            return
        run.no_progress += 1
        run.round_tick = self.next_tick()
        allowed = run.limits["max_no_progress"]
        if allowed is not None and run.no_progress >= allowed and not self.observes(run):
            self.end(run, "no_progress", "rule")
