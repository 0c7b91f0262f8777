"""The table of operations: the one place that says what each takes, who may ask and what can go wrong.

Dispatch, validation, errors, documentation and the types of other languages come from here (SPEC 4).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from guardd.model.errors import BadArgument
from guardd.model.limits import EXACT_INT_MAX
from guardd.model.reasons import RESUME_CHANGES

Whole = Annotated[int, Meta(ge=0, le=EXACT_INT_MAX)]
"""A whole number from 0 to 2^53 - 1."""
Text = Annotated[str, Meta(max_length=4096)]
Role = Literal["reader", "worker", "operator"]
ROLES: tuple[Role, ...] = ("reader", "worker", "operator")
"""From least to most: each may do what those before it may."""


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Amounts used or reserved: model calls, tokens, money in micro-units."""

    model_calls: Whole = 0
    tokens: Whole = 0
    cost_micros: Whole = 0


class Retry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A declared retry names what is different now (SPEC 2.5)."""

    change: str


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every operation may carry. at_ms: the virtual clock, only where it is allowed."""

    at_ms: Whole | None = None


class RunParams(Params, frozen=True, kw_only=True):
    """run: path, `root/child/...`. epoch: what an earlier answer said; a run the store lost is then an error."""

    run: str
    epoch: str | None = None


class Open(RunParams, frozen=True, kw_only=True):
    """Make a run known; the first open sets policy and limits."""

    policy: str | None = None
    limits: dict[str, Any] | None = None
    progress_version: Whole | None = None
    labels: dict[str, str] | None = None
    tools: list[str] | None = None


class Before(RunParams, frozen=True, kw_only=True):
    """May this call run now? wait_ms: how long to wait for an owner of its effect who is at work."""

    call: str
    tool: str
    args: Any = None
    agent: str = ""
    client: str | None = None
    idempotency_key: str | None = None
    scope: Literal["run", "global"] | None = None
    retry: Retry | None = None
    progress_version: Whole | None = None
    usage: Usage | None = None
    reserve: Usage | None = None
    wait_ms: Annotated[int, Meta(ge=0, le=60_000)] = 0


class After(RunParams, frozen=True, kw_only=True):
    """What became of an admitted call. value: UNSET differs from null, which is an empty result."""

    call: str
    status: Literal[
        "progress",
        "complete",
        "retryable",
        "fatal",
        "permission_denied",
        "policy_blocked",
        "invalid_input",
        "human_required",
    ]
    progress_version: Whole | None = None
    side_effect_committed: bool | None = None
    operation_id: Annotated[str, Meta(max_length=255)] | None = None
    retry_after_ms: Whole | None = None
    value: Any | UnsetType = UNSET
    usage: Usage | None = None


class Renew(RunParams, frozen=True, kw_only=True):
    """The tool still runs: keep its claim, hear whether to stop."""

    call: str
    lease_ms: Annotated[int, Meta(ge=1, le=3_600_000)] | None = None
    usage: Usage | None = None


class Charge(RunParams, frozen=True, kw_only=True):
    """Count or reserve the usage of a model call before it is made."""

    op_id: str
    usage: Usage | None = None
    reserve: Usage | None = None


class Settle(RunParams, frozen=True, kw_only=True):
    """What a charge really used; its reservation is let go."""

    op_id: str
    usage: Usage | None = None


class Handoff(RunParams, frozen=True, kw_only=True, rename={"from_": "from"}):
    """Control goes from one agent to another, with a state."""

    op_id: str
    from_: str
    to: str
    state: Any | UnsetType = UNSET


class Checkpoint(RunParams, frozen=True, kw_only=True):
    """The last safe point of the run."""

    version: Whole
    ref: Text | None = None
    op_id: str | None = None


class Finish(RunParams, frozen=True, kw_only=True):
    """End the run from outside."""

    reason: Literal["complete", "fatal", "cancelled", "framework_cap"] = "complete"
    note: Text | None = None


class Kill(RunParams, frozen=True, kw_only=True):
    """End the run and all its sub-runs now."""

    reason: str = "killed"
    note: Text | None = None


class Freeze(RunParams, frozen=True, kw_only=True):
    """Hold a run. scope: comma list of retries, handoffs, subruns, effects, all."""

    scope: str = "all"
    note: Text | None = None


class Resume(RunParams, frozen=True, kw_only=True):
    """Let a run go on after a named change."""

    change: str
    note: Text | None = None
    limits: dict[str, Any] | None = None


class Resolve(RunParams, frozen=True, kw_only=True):
    """Say what is true of an effect in doubt."""

    tool: str
    idempotency_key: str
    scope: Literal["run", "global"] | None = None
    state: Literal["committed", "not_executed"]
    operation_id: Annotated[str, Meta(max_length=255)] | None = None
    value: Any | UnsetType = UNSET
    note: Text | None = None


class DenyRule(Params, frozen=True, kw_only=True):
    """An emergency rule for all runs. tool: a glob. remove: take the rule away. note: why; listed with the rule."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]
    tool: str | None = None
    run_prefix: str | None = None
    until_ms: Whole | None = None
    remove: bool = False
    note: Text | None = None


class DenyRules(Params, frozen=True, kw_only=True):
    """The emergency rules that are not over, by id."""


class Confirm(Params, frozen=True, kw_only=True):
    """An operator has looked: the store may be trusted as it is now, after a flush, a rollback or a failover."""

    note: Text | None = None


class Inspect(RunParams, frozen=True, kw_only=True):
    """Counters, limits, window and envelope of one run."""


class Forget(RunParams, frozen=True, kw_only=True):
    """Erase arguments, results and trace of a tree; counters and the ledger's digests stay."""


class Runs(Params, frozen=True, kw_only=True):
    """Recent root runs, newest first.

    waiting: only those that wait for a person or an operator. status: running | waiting | frozen | ended. label: `name`
    or `name=value`. status, reason and label look among the newest thousand.
    """

    limit: Annotated[int, Meta(ge=1, le=1000)] = 50
    waiting: bool = False
    run_prefix: str | None = None
    status: Literal["running", "waiting", "frozen", "ended"] | None = None
    reason: str | None = None
    label: str | None = None


class Trace(RunParams, frozen=True, kw_only=True):
    """Trace entries of a run and its sub-runs, oldest first. after: id to go on from. newest: the last `limit` of them."""

    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000
    after: str | None = None
    newest: bool = False


class Export(RunParams, frozen=True, kw_only=True):
    """A root run's whole tree as a document that `guardd replay` plays: limits, tool rules, redacted trace."""


class Ledger(Params, frozen=True, kw_only=True):
    """Effects that are claimed or in doubt, oldest lease first. in_doubt: only those without a living owner."""

    in_doubt: bool = False
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    run_prefix: str | None = None


class TokenNew(Params, frozen=True, kw_only=True):
    """Make a token; its text is answered this once. run_prefix: the only runs it may name."""

    role: Role
    name: Annotated[str, Meta(max_length=64)] = ""
    run_prefix: str | None = None
    expires_in_ms: Annotated[int, Meta(ge=1000, le=EXACT_INT_MAX // 1000)] | None = None


class TokenList(Params, frozen=True, kw_only=True):
    """All tokens, without their secrets."""


class TokenRevoke(Params, frozen=True, kw_only=True):
    """Take a token away; its connections are refused within a second."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]


class Audit(Params, frozen=True, kw_only=True):
    """Newest entries of the audit, newest first."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 50


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. role: the least that may ask it (reader < worker < operator)."""

    name: str
    params: type[Params]
    role: Role
    answers: tuple[str, ...] = ()
    """`action` or `action reason`; `stop *`: with the terminal reason of the run, any word."""
    errors: tuple[str, ...] = ()
    """Besides those that every operation can have."""

    @property
    def text(self) -> str:
        """What it is for, in a sentence."""
        return (self.params.__doc__ or "").strip()


COMMON_ERRORS = ("bad_argument", "clock_not_allowed", "not_allowed", "store_unavailable", "audit_unavailable")
_STATE = ("continue", "wait frozen", "wait human_required", "stop *")
_DEPTH = ("deny handoff_depth",)
_RESERVATIONS = ("deny model_call_cap", "deny token_cap", "deny cost_cap")

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation("open", Open, "worker", (*_STATE, *_DEPTH), ("run_lost",)),
        Operation(
            "before", Before, "worker",
            (
                "execute", "replay already_committed", "wait retry_too_early", "wait in_flight", "wait frozen", "wait human_required",
                "deny same_call_repeat", "deny short_cycle", "deny same_target_repeat", "deny in_doubt", "deny key_conflict",
                "deny permission_denied", "deny policy_blocked", "deny invalid_input", "deny empty_result", "deny retry_cap",
                *_RESERVATIONS, *_DEPTH, "stop *",
            ),
            ("call_conflict", "change_required", "effect_key_missing", "run_lost"),
        ),
        Operation("after", After, "worker", (*_STATE, "continue empty_result", "continue invalid_result"), ("unknown_call",)),
        Operation("renew", Renew, "worker", _STATE, ("unknown_call",)),
        Operation("charge", Charge, "worker", (*_STATE, *_RESERVATIONS, *_DEPTH), ("call_conflict", "run_lost")),
        Operation("settle", Settle, "worker", _STATE, ("unknown_operation",)),
        Operation(
            "handoff", Handoff, "worker", (*_STATE, "deny handoff_cycle", "deny handoff_cap", *_DEPTH), ("call_conflict", "run_lost")
        ),
        Operation("checkpoint", Checkpoint, "worker", (*_STATE, *_DEPTH), ("run_lost",)),
        Operation("finish", Finish, "worker", ("stop *", *_DEPTH), ("run_lost",)),
        Operation("kill", Kill, "operator", ("stop *", *_DEPTH), ("run_lost",)),
        Operation("freeze", Freeze, "operator", ("wait frozen", "stop *", *_DEPTH), ("run_lost",)),
        Operation(
            "resume", Resume, "operator", ("continue", "wait frozen", "wait human_required"),
            ("change_required", "unknown_run", "not_resumable", "limits_needed"),
        ),
        Operation(
            "resolve", Resolve, "operator", ("continue",), ("in_flight", "already_committed", "unknown_operation")
        ),
        Operation("deny_rule", DenyRule, "operator", ("continue",)),
        Operation("forget", Forget, "operator", ("continue",), ("unknown_run",)),
        Operation("confirm", Confirm, "operator", ("continue",)),
        Operation("inspect", Inspect, "reader", (), ("unknown_run",)),
        Operation("deny_rules", DenyRules, "reader"),
        Operation("runs", Runs, "reader"),
        Operation("trace", Trace, "reader"),
        Operation("export", Export, "reader", (), ("unknown_run",)),
        Operation("ledger", Ledger, "reader"),
        Operation("token_new", TokenNew, "operator"),
        Operation("token_list", TokenList, "operator"),
        Operation("token_revoke", TokenRevoke, "operator"),
        Operation("audit", Audit, "operator"),
    )
}  # fmt: skip

RESUME_WORDS = frozenset(RESUME_CHANGES)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")


def parse_params(operation: Operation, params: Mapping[str, Any]) -> Params:
    """The request as its type.

    Raises: BadArgument: names the field, its value and what is allowed there.
    """
    try:
        return msgspec.convert(params, operation.params)
    except msgspec.ValidationError as error:
        raise _bad_argument(operation, params, str(error)) from error


def _bad_argument(operation: Operation, params: Mapping[str, Any], text: str) -> BadArgument:
    path = (found[1] if (found := _PATH.search(text)) else "").replace("[...]", "")
    said = _PATH.sub("", text)
    if (found := _MISSING.search(said)) or (found := _UNKNOWN.search(said)):
        path = f"{path}.{found[1]}" if path else found[1]
        if _UNKNOWN.search(said):
            known = ", ".join(field.encode_name for field in msgspec.structs.fields(operation.params))
            return BadArgument(f"{operation.name} has no parameter `{path}`", field=path, limit=f"one of {known}")
    value: Any = params
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return BadArgument(f"{operation.name}: {said}", field=path or "params", value=value, limit=said)
