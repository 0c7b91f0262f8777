"""Results (SPEC 2.3), and the renewal of a claim."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

from tests.reference.before import Before
from tests.reference.canonical import Misuse
from tests.reference.ledger import outcome
from tests.reference.state import Answer, Call, Family, Params, Run

REFUSALS = ("permission_denied", "policy_blocked")
STATUSES = (
    "progress",
    "complete",
    "retryable",
    "fatal",
    *REFUSALS,
    "invalid_input",
    "human_required",
)


class After(Before):
    """`after` and `renew`: they always pass, and never end a run by a cap."""

    def after(self, tells: Params) -> Answer:
        """Record the result of an admitted call; the second report of one call changes nothing."""
        if tells["status"] not in STATUSES:
            raise Misuse("bad_argument")
        asked = self.admitted(tells)
        if asked.result_answer is None:
            asked.result_answer = self.record(tells, asked)
        return asked.result_answer

    def admitted(self, tells: Params) -> Call:
        """The admitted call of this id in this run, else `unknown_call`."""
        root = self.runs.get(self.lineage(tells["run"])[-1])
        asked = root.calls.get(tells["call"]) if root else None
        if asked is None or asked.run != tells["run"] or asked.admitted_tick is None:
            raise Misuse("unknown_call")
        return asked

    def record(self, tells: Params, asked: Call) -> Answer:
        """The first report. A result for a run that has ended is recorded all the same, but ends nothing."""
        family = self.find(asked.run)
        run, status = family.own, tells["status"]
        assert run is not None
        succeeded = status in ("progress", "complete")
        problem = self.problem(run, asked, tells) if succeeded else None
        had_ended = self.terminal_reason(family) is not None

        self.use(family, tells.get("usage"))
        self.release(family, asked.held)
        run.in_flight[asked.fingerprint] -= 1
        stale = self.settle_effect(tells, asked, succeeded and problem is None)

        progressed = problem is None and self.name_version(run, tells.get("progress_version"))
        if succeeded and problem is None and "value" in tells and self.derive(run, asked, tells["value"]):
            self.progress(run)
            progressed = True
        self.mark(run, asked, tells, problem)
        if not had_ended:
            self.decide(run, asked, status, problem, progressed)
        return self.told(family, problem, stale)

    def problem(self, run: Run, asked: Call, tells: Params) -> str | None:
        """Why a success is none: its value is blank, or breaks the schema of the tool."""
        if "value" not in tells:
            return None
        rule, value = self.rule_of(run, asked.tool), tells["value"]
        blank = value is None or (isinstance(value, str) and not value.strip())
        if blank and not rule.get("allow_empty"):
            return "empty_result"
        schema = rule.get("result_schema")
        if schema is not None and not Draft202012Validator(schema).is_valid(value):
            return "invalid_result"
        return None

    def settle_effect(self, tells: Params, asked: Call, success: bool) -> bool:
        """Settle the effect of the call; True for a late owner, whose word no longer counts (SPEC 2.6)."""
        if asked.key is None:
            return False
        state = outcome(tells["status"], success, tells.get("side_effect_committed"))
        return not self.effects.settle(asked.key, (asked.run.split("/")[0], tells["call"]), state)

    def mark(self, run: Run, asked: Call, tells: Params, problem: str | None) -> None:
        """What is remembered of the tool and of the fingerprint."""
        status, fingerprint = tells["status"], asked.fingerprint
        if problem:
            run.empties[asked.tool] = run.empties.get(asked.tool, 0) + 1
        elif status in ("progress", "complete"):
            run.empties.pop(asked.tool, None)
            run.retries.pop(fingerprint, None)
        run.last_result[fingerprint] = problem or status
        run.retry_at_ms.pop(fingerprint, None)
        if status == "retryable" and tells.get("retry_after_ms") is not None:
            run.retry_at_ms[fingerprint] = self.now + tells["retry_after_ms"]
        if status == "invalid_input" or (status in REFUSALS and run.limits["on_refusal"] == "deny"):
            run.refusals[fingerprint] = status

    def decide(self, run: Run, asked: Call, status: str, problem: str | None, progressed: bool) -> None:
        """End or pause the run, or count a round."""
        if status in ("complete", "fatal") and problem is None:
            self.end(run, status, "result")
        elif status in REFUSALS and run.limits["on_refusal"] == "stop":
            self.end(run, status, "refusal")
        elif status == "human_required":
            run.human = True
            self.mark_pause(run)
        elif not progressed:
            self.count_round(run, asked, status)

    def told(self, family: Family, problem: str | None, stale: bool) -> Answer:
        """Stop, wait, or go on; `claim` tells a late owner."""
        answer: dict[str, Any] = self.state(family)
        if answer["action"] == "continue" and problem:
            answer["reason"] = problem
        if stale:
            answer["claim"] = "stale"
        return answer

    def renew(self, tells: Params) -> Answer:
        """Keep the claim of a running call (SPEC 2.6); a late owner is told so."""
        asked = self.admitted(tells)
        family = self.find(asked.run)
        self.use(family, tells.get("usage"))
        stale = False
        if asked.key and asked.result_answer is None:  # after the result there is nothing left to keep
            assert family.own is not None
            lease_ms = tells.get("lease_ms") or family.own.limits["claim_lease_ms"]
            owner = (asked.run.split("/")[0], tells["call"])
            stale = not self.effects.renew(asked.key, owner, self.now + lease_ms)
        return self.told(family, None, stale)
