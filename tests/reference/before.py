"""The eleven steps before a call, and what a known call id is told (SPEC 2.2)."""

from __future__ import annotations

from typing import Any

from tests.reference.canonical import Misuse, dropped, dumps, members, normal, parsed
from tests.reference.ledger import Key, Ledger
from tests.reference.policy import USAGE, VOLATILE, Limits, Rule, tool_name, tool_rule
from tests.reference.progress import Progress
from tests.reference.state import Answer, Call, Entry, Family, Params, Run

RETRY_CHANGES = {
    "new_cursor",
    "retry_after_elapsed",
    "arguments_corrected",
    "authorization_renewed",
    "strategy_changed",
}
VERIFIED_BY = {"retryable", "empty_result", "invalid_result"}


class Before(Progress):
    """`before`, and the parts of it that `charge` and `handoff` share."""

    def __init__(
        self,
        default_policy_limits: Limits,
        tools: dict[str, Rule],
        volatile: list[str] | None = None,
        policy: str = "reference",
    ) -> None:
        super().__init__(default_policy_limits, tools, volatile, policy)
        self.effects = Ledger()
        self.executed: list[str] = []

    def before(self, asks: Params) -> Answer:
        """Judge one attempt. Misuse is found before anything is stored."""
        if asks.get("retry") is not None and asks["retry"].get("change") not in RETRY_CHANGES:
            raise Misuse("change_required")
        asked = self.canonical_call(asks)
        if self.too_deep(asked.run):
            return {"action": "deny", "reason": "handoff_depth"}
        root = self.runs.get(asked.run.split("/")[0])
        known = root.calls.get(asks["call"]) if root else None
        if known is None:
            answer = self.judge(asks, asked)
            self.root_of(asked.run).calls[asks["call"]] = asked
        elif known.client == asked.client and known.result_answer is None:
            return self.resend(asks, asked, known)
        else:
            return self.redelivered(asks, asked, known)
        return answer

    # ---- Canonical call (SPEC 2.1, 2.6) ------------------------------------

    def canonical_call(self, asks: Params) -> Call:
        """Tool, fingerprint, target and key of what is asked."""
        path = self.lineage(asks["run"])[0]
        tool = tool_name(asks["tool"], self.tools)
        rule = tool_rule(tool, self.tools)
        args = normal(parsed(asks.get("args")))
        target = dumps(members(args, rule["target_args"])) if "target_args" in rule else None
        fingerprint = f"{tool} {dumps(dropped(args, self.volatile_members(path, rule)))}"
        return Call(
            client=asks.get("client") or "",
            run=path,
            key=self.effect_key(asks, tool, rule, args),
            fingerprint=fingerprint,
            tool=tool,
            agent=asks.get("agent") or "",
            target=target,
        )

    def volatile_members(self, path: str, rule: Rule) -> set[str]:
        """The policy's list (or the one that replaces it) and the rule's, less what the rule keeps."""
        root = self.runs.get(path.split("/", maxsplit=1)[0])
        listed = VOLATILE[root.policy if root else self.policy] if self.volatile is None else self.volatile
        return (set(listed) | set(rule.get("volatile_args", []))) - set(rule.get("keep_args", []))

    def effect_key(self, asks: Params, tool: str, rule: Rule, args: Any) -> Key | None:
        """An explicit key wins over one derived from the arguments (SPEC 2.6)."""
        name = asks.get("idempotency_key")
        if name is None and "effect_key" in rule:
            values = members(args, rule["effect_key"])
            if None in values:
                raise Misuse("effect_key_missing")
            name = dumps(values)
        if name is None:
            if rule.get("requires_key"):
                raise Misuse("effect_key_missing")
            return None
        return self.record_name(asks, tool, rule, name)

    def record_name(self, asks: Params, tool: str, rule: Rule, name: str) -> Key:
        """A call may widen the scope to all runs, never narrow it (SPEC 2.6)."""
        wide = asks.get("scope") == "global" or rule.get("effect_scope") == "global"
        return ("*" if wide else asks["run"].split("/")[0], tool, name)

    # ---- Call ids (SPEC 2.2) -----------------------------------------------

    def resend(self, asks: Params, asked: Call, known: Call) -> Answer:
        """The same client asks again and has not reported: nothing is counted twice."""
        if (known.run, known.key, known.fingerprint) != (asked.run, asked.key, asked.fingerprint):
            raise Misuse("call_conflict")
        settled = known.remembered and known.answer["action"] in ("execute", "deny")
        if not settled:
            return self.judge(asks, known)
        family = self.enter(asked.run)
        stopped = self.stopped_or_waiting(asks, known, family)
        if stopped:
            return stopped
        if known.key is None or known.answer["action"] == "deny":
            return known.answer
        record = self.effects.records.get(known.key)
        owner = (known.run.split("/")[0], asks["call"])
        if record and record.state == "claimed" and record.owner == owner and self.now < record.lease_until_ms:
            return known.answer
        assert family.own is not None
        # An operator freed the key meanwhile: that attempt is over, a new one needs a new id.
        return self.ledger_answer(family.own, known, known) or self.conflict()

    def redelivered(self, asks: Params, asked: Call, known: Call) -> Answer:
        """Reported already, or another client: never `execute`; the ledger alone may answer."""
        if known.run != asked.run or asked.key is None:
            raise Misuse("call_conflict")
        family = self.enter(asked.run)
        answer = self.stopped_or_waiting(asks, asked, family) or self.capped(family, asks.get("reserve"), True)
        if answer:
            return answer
        assert family.own is not None
        return self.ledger_answer(family.own, asked, None) or self.conflict()

    def conflict(self) -> Answer:
        raise Misuse("call_conflict")

    # ---- The steps ---------------------------------------------------------

    def judge(self, asks: Params, asked: Call) -> Answer:
        """Steps 1 to 11; the answer is what a resend is told."""
        asked.answer = self.steps(asks, asked)
        # A deny rule is not remembered: when it is gone, the same attempt is judged again.
        asked.remembered = not self.denied_by_rule(asked.run, asked.tool)
        return asked.answer

    def steps(self, asks: Params, asked: Call) -> Answer:
        """First match wins."""
        family = self.enter(asked.run)
        if not asked.usage_counted:  # 1
            self.use(family, asks.get("usage"))
            asked.usage_counted = True
        stopped = self.stopped_or_waiting(asks, asked, family)  # 2, 3
        if stopped:
            return stopped
        run = family.own
        assert run is not None
        capped = self.capped(family, asks.get("reserve"), counts_steps=True)  # 4
        if capped:
            return capped
        self.name_version(run, asks.get("progress_version"))
        verified = self.verified_retry(run, asks, asked)
        refused = (
            self.refused_before(run, asked)  # 5
            or self.too_early(run, asked)  # 6
            or self.too_many_empty(run, asked)  # 7
            or self.ledger_answer(run, asked, asked)  # 8
            or self.repeated(run, asked, verified)  # 9, 10
        )
        return refused or self.admit(family, asks, asked, verified)

    def stopped_or_waiting(self, asks: Params, asked: Call, family: Family) -> Answer | None:
        """Steps 2 and 3: ends, deny rules, pauses."""
        reason = self.terminal_reason(family)
        if reason:
            return {"action": "stop", "reason": reason}
        if self.denied_by_rule(asked.run, asked.tool):
            return {"action": "deny", "reason": "policy_blocked"}
        scopes = {"all"}
        if asks.get("retry") is not None:
            scopes.add("retries")
        if asked.key or not tool_rule(asked.tool, self.tools).get("read_only"):
            scopes.add("effects")
        reason = "frozen" if family.blocked else self.waiting(family, scopes)
        return {"action": "wait", "reason": reason} if reason else None

    def use(self, family: Family, usage: dict[str, int] | None) -> None:
        """Usage counts for the run and every ancestor."""
        for run in family.chain:
            for name, amount in (usage or {}).items():
                run.used[name] = run.used.get(name, 0) + amount

    def reached_cap(self, run: Run, counts_steps: bool) -> str | None:
        """The first cap this run has reached. Usage may reach its cap; above it, or at a cap of 0, it ends."""
        max_steps, max_wall_ms = run.limits["max_steps"], run.limits["max_wall_ms"]
        if counts_steps and max_steps is not None and run.steps >= max_steps:
            return "step_cap"
        if max_wall_ms is not None and self.elapsed_ms(run) >= max_wall_ms:
            return "wall_clock_cap"
        for name, (cap_name, reason) in USAGE.items():
            cap = run.limits[cap_name]
            if cap is not None and (run.used.get(name, 0) > cap or cap == 0):
                return reason
        return None

    def capped(self, family: Family, reserve: dict[str, int] | None, counts_steps: bool) -> Answer | None:
        """Step 4: the first run of the chain at a cap ends; only when none does, a reservation is looked at."""
        enforced = [run for run in family.chain if not self.observes(run)]
        for run in enforced:
            reason = self.reached_cap(run, counts_steps)
            if reason:
                self.end(run, reason, "cap")
                return {"action": "stop", "reason": reason}
        for run in enforced:
            for name, (cap_name, reason) in USAGE.items():
                wanted, cap = (reserve or {}).get(name, 0), run.limits[cap_name]
                taken = run.used.get(name, 0) + run.held.get(name, 0)
                if wanted and cap is not None and taken + wanted > cap:
                    return {"action": "deny", "reason": reason}
        return None

    def refused_before(self, run: Run, asked: Call) -> Answer | None:
        """Step 5: refusals stick."""
        reason = run.refusals.get(asked.fingerprint)
        return self.refuse(run, asked.agent, reason, asked) if reason and not self.observes(run) else None

    def too_early(self, run: Run, asked: Call) -> Answer | None:
        """Step 6."""
        left_ms = run.retry_at_ms.get(asked.fingerprint, 0) - self.now
        if left_ms <= 0:
            return None
        return {"action": "wait", "reason": "retry_too_early", "retry_after_ms": left_ms}

    def too_many_empty(self, run: Run, asked: Call) -> Answer | None:
        """Step 7."""
        allowed = self.limit(run, asked.tool, "max_empty")
        if allowed is None or run.empties.get(asked.tool, 0) < allowed or self.observes(run):
            return None
        return self.refuse(run, asked.agent, "empty_result", asked)

    def ledger_answer(self, run: Run, asked: Call, counted: Call | None) -> Answer | None:
        """Step 8; None when the key is free. `counted` is the attempt whose replay and denial count once."""
        if asked.key is None:
            return None
        rule = tool_rule(asked.tool, self.tools)
        found, left_ms = self.effects.look(asked.key, asked.fingerprint, rule, self.now)
        if found == "free":
            return None
        if found == "in_flight":
            return {"action": "wait", "reason": "in_flight", "retry_after_ms": left_ms}
        if found in ("in_doubt", "key_conflict"):
            return self.refuse(run, asked.agent, found, counted)
        replays = run.replays.get(asked.key, 0)
        if counted is None or not counted.replay_counted:
            allowed = run.limits["max_replays"]
            if allowed is not None and replays >= allowed:
                return self.refuse(run, asked.agent, "same_call_repeat", counted)
            run.replays[asked.key] = replays + 1
            if counted is not None:
                counted.replay_counted = True
        return {"action": "replay", "reason": "already_committed"}

    def verified_retry(self, run: Run, asks: Params, asked: Call) -> bool:
        """SPEC 2.5: a declared retry of something that failed, or that has no result yet."""
        if asks.get("retry") is None:
            return False
        failed = run.last_result.get(asked.fingerprint) in VERIFIED_BY
        return failed or run.in_flight.get(asked.fingerprint, 0) > 0

    def repeated(self, run: Run, asked: Call, verified: bool) -> Answer | None:
        """Steps 9 and 10: a verified retry has its own cap and is no repeat."""
        reason = None
        if verified:
            allowed = self.limit(run, asked.tool, "max_retries")
            if allowed is not None and run.retries.get(asked.fingerprint, 0) >= allowed:
                reason = "retry_cap"
        elif self.same_call(run, asked):
            reason = "same_call_repeat"
        elif self.same_target(run, asked):
            reason = "same_target_repeat"
        elif self.short_cycle(run, asked):
            reason = "short_cycle"
        return self.refuse(run, asked.agent, reason, asked) if reason and not self.observes(run) else None

    def admit(self, family: Family, asks: Params, asked: Call, verified: bool) -> Answer:
        """Step 11."""
        run = family.own
        assert run is not None
        asked.admitted_tick = self.next_tick()
        asked.verified_retry = verified
        for relative in family.chain:
            relative.steps += 1
        if verified:
            run.retries[asked.fingerprint] = run.retries.get(asked.fingerprint, 0) + 1
        else:
            exempt = bool(self.rule_of(run, asked.tool).get("cycle_exempt"))
            self.window_of(run, asked.tool, asked.agent).append(Entry(asked.fingerprint, exempt))
            run.targets[asked.tool, asked.target] = run.targets.get((asked.tool, asked.target), 0) + 1
        run.in_flight[asked.fingerprint] = run.in_flight.get(asked.fingerprint, 0) + 1
        asked.held = self.hold(family, asks.get("reserve"))
        if asked.key:
            owner = (asked.run.split("/")[0], asks["call"])
            lease_until_ms = self.now + run.limits["claim_lease_ms"]
            self.effects.claim(asked.key, asked.fingerprint, owner, lease_until_ms)
        run.streaks.pop(asked.agent, None)
        self.executed.append(asked.tool)
        return {"action": "execute"}

    def hold(self, family: Family, reserve: dict[str, int] | None) -> dict[str, int]:
        """Reserve for the run and every ancestor, until `after` or `settle`."""
        for run in family.chain:
            for name, amount in (reserve or {}).items():
                run.held[name] = run.held.get(name, 0) + amount
        return dict(reserve or {})

    def release(self, family: Family, held: dict[str, int]) -> None:
        """Give a reservation back."""
        for run in family.chain:
            for name, amount in held.items():
                run.held[name] -= amount
        held.clear()
