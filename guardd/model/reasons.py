"""Reasons, statuses, changes: the words of SPEC chapter 2 and what a reader is told about them."""

from __future__ import annotations

ACTIONS = ("execute", "replay", "wait", "deny", "stop", "continue")

STATUSES = (
    "progress", "complete", "retryable", "fatal", "permission_denied", "policy_blocked", "invalid_input", "human_required",
)  # fmt: skip

RETRY_CHANGES = (
    "new_cursor", "retry_after_elapsed", "arguments_corrected", "authorization_renewed", "strategy_changed",
)  # fmt: skip
RESUME_CHANGES = (*RETRY_CHANGES, "limits_raised", "human_input")

FREEZE_SCOPES = ("retries", "handoffs", "subruns", "effects", "all")
FINISH_REASONS = ("complete", "fatal", "cancelled", "framework_cap")

NEXT_ACTION: dict[tuple[str, ...], tuple[str, str]] = {
    ("complete",): ("completed", "none"),
    ("fatal",): ("fatal", "human_review"),
    (
        "same_call_repeat", "short_cycle", "same_target_repeat", "no_progress", "empty_result", "retry_cap",
        "handoff_cycle", "handoff_cap",
    ): ("loop_blocked", "resume_after_change"),
    ("in_doubt", "key_conflict", "permission_denied", "policy_blocked", "invalid_input", "human_required"): (
        "needs_human", "human_review",
    ),
    ("step_cap", "wall_clock_cap", "model_call_cap", "token_cap", "cost_cap", "framework_cap"): (
        "budget_exhausted", "resume_after_change",
    ),
    ("incident_stop", "operator_cancelled_loop", "loop_guard_triggered"): ("loop_blocked", "human_review"),
}  # fmt: skip
"""SPEC 2.9: reasons -> (status, next_action) of the envelope. Any other word is a kill: cancelled, human_review."""

_STATUS = {reason: value for reasons, value in NEXT_ACTION.items() for reason in reasons}
_KILL_WORDS = {
    reason: _STATUS[reason] for reason in ("incident_stop", "operator_cancelled_loop", "loop_guard_triggered")
}


def envelope_status(reason: str, ended_by: str) -> tuple[str, str]:
    """(status, next_action) of a run that ended, or waits, for this reason (SPEC 2.9).

    A kill may carry any word, also one of a rule: what ended the run decides, not the word.
    """
    if ended_by == "kill":
        return _KILL_WORDS.get(reason, ("cancelled", "human_review"))
    return _STATUS.get(reason, ("cancelled", "human_review"))


HINTS: dict[str, str] = {
    "same_call_repeat": "This exact call was already made {observed} times without progress; change the arguments or the approach.",
    "short_cycle": "The last calls repeat in a circle of {observed}; break it with a different tool or different arguments.",
    "same_target_repeat": "This target was already worked on {observed} times without progress; leave it and report.",
    "in_doubt": "It is unknown whether this effect already happened; do not send it again, look it up in the outside system first.",
    "key_conflict": "This idempotency key belongs to a call with other arguments; use the original arguments or a new key.",
    "permission_denied": "This call was refused for lack of permission; repeating it cannot help, ask for access or go another way.",
    "policy_blocked": "This call is blocked by policy; choose another way.",
    "invalid_input": "These arguments were rejected as invalid; correct them before calling again.",
    "empty_result": "This tool returned nothing {observed} times in a row; try another tool or source.",
    "retry_cap": "This call was retried {observed} times; stop retrying and change the approach.",
    "handoff_cycle": "Control goes round in a circle of {observed} agents with nothing new; finish or hand over new state.",
    "handoff_cap": "Control was handed over too often; finish the task with the current agent.",
    "handoff_depth": "Sub-agents are nested too deep; do the work in the current agent.",
    "token_cap": "This would exceed the token budget; use fewer tokens or finish.",
    "cost_cap": "This would exceed the cost budget; use a cheaper step or finish.",
    "model_call_cap": "The budget of model calls is used up; finish with what is known.",
    "retry_too_early": "The service asked to wait; call again after {retry_after_ms} ms.",
    "in_flight": "This effect is running in another worker; wait for its result instead of sending it again.",
    "frozen": "An operator holds this run; wait until it is resumed.",
    "human_required": "A person has to decide first; wait until the run is resumed.",
    "already_committed": "This effect already happened; here is its stored result.",
}
"""One sentence for a model to read, by reason; filled with the evidence."""

STOP_HINT = "The run is over ({reason}); make no further calls and report what was reached."


def hint(action: str, reason: str, evidence: dict[str, object], retry_after_ms: int | None) -> str:
    """The sentence for this answer, or "" when nothing needs to be said."""
    if action == "stop":
        return STOP_HINT.format(reason=reason)
    template = HINTS.get(reason, "")
    shown = retry_after_ms if retry_after_ms is not None else "some"
    return template.format(observed=evidence.get("observed", "several"), retry_after_ms=shown)
