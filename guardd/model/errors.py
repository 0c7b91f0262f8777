"""Every error the guard can raise, in one tree.

    GuardError
    ├── BadArgument         a value is wrong: field, value and limit are named
    ├── CallConflict        one call or op id was used for two different things
    ├── UnknownCall         `after` or `renew` for a call that was never admitted
    ├── UnknownRun          `resume` or `inspect` of a run nobody has seen
    ├── UnknownOperation    `settle` or `resolve` of an operation nobody has seen
    ├── ChangeRequired      a retry or resume names no change that counts
    ├── EffectKeyMissing    an effect needs a key and none can be made
    ├── NotResumable        what ended the run is final
    ├── LimitsNeeded        a cap would stop the resumed run at once
    ├── InFlight            `resolve` of a claim whose lease is alive
    ├── AlreadyCommitted    `resolve` of an effect that is known to have happened
    ├── RunLost             the caller knows the run, the store does not
    ├── ClockNotAllowed     `at_ms` sent to a guard that runs on the server's clock
    ├── NotAllowed          the role of the caller does not reach this far
    ├── AuditUnavailable    the audit cannot be written, so what permits something is refused
    ├── StoreUnavailable    the store did not answer, or cannot be trusted now
    └── StoreRefused        start-up: this server cannot keep the promises

A refusal of a call (`deny`, `wait`, `stop`) is an answer and never an error.
Each error has a stable `name`, a `number` for the wire and a `retry` word:
"never" (the same request fails again), "later" (the same request may succeed),
"same_id" (unknown whether it happened: send it again under the same call id).
"""

from __future__ import annotations

from typing import Any, ClassVar


class GuardError(Exception):
    """The root of all errors of the guard.

    Args:
        message: one sentence: what is wrong and what the caller can do next.
        field:   the parameter that is wrong, as a dotted path, or "".
        value:   the offending value, shortened to 80 characters in `as_dict`.
        limit:   what would be allowed, as a number or a sentence, or None.
    """

    name: ClassVar[str] = "guard_error"
    number: ClassVar[int] = 1
    retry: ClassVar[str] = "never"

    def __init__(self, message: str, *, field: str = "", value: Any = None, limit: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = value
        self.limit = limit

    def as_dict(self) -> dict[str, Any]:
        """The error as it goes over the wire: name, number, message, retry, and what is known of the cause."""
        result: dict[str, Any] = {
            "error": self.name,
            "number": self.number,
            "message": self.message,
            "retry": self.retry,
        }
        if self.field:
            result["field"] = self.field
        if self.value is not None:
            shown = self.value if isinstance(self.value, str) else repr(self.value)
            result["value"] = shown if len(shown) <= 80 else shown[:77] + "..."
        if self.limit is not None:
            result["limit"] = self.limit
        return result


class BadArgument(GuardError):
    """A parameter is missing, of the wrong type or out of range. Nothing was stored."""

    name = "bad_argument"
    number = 10


class CallConflict(GuardError):
    """A call or op id names one attempt of one client (SPEC 2.2); this request is another one."""

    name = "call_conflict"
    number = 11


class UnknownCall(GuardError):
    """The call was never admitted in this run, so it can have no result."""

    name = "unknown_call"
    number = 12


class UnknownRun(GuardError):
    """No run of this name is stored."""

    name = "unknown_run"
    number = 13


class UnknownOperation(GuardError):
    """No effect or charge of this name is stored."""

    name = "unknown_operation"
    number = 14


class ChangeRequired(GuardError):
    """A retry or a resume has to name a real change. Trying again is none."""

    name = "change_required"
    number = 15


class EffectKeyMissing(GuardError):
    """The tool needs an effect key; neither the caller nor the arguments give one."""

    name = "effect_key_missing"
    number = 16


class NotResumable(GuardError):
    """The run was ended for good: by a kill, by its result, or with an ancestor."""

    name = "not_resumable"
    number = 17


class LimitsNeeded(GuardError):
    """A cap is still reached; the resume must bring wider limits."""

    name = "limits_needed"
    number = 18


class InFlight(GuardError):
    """The claim's lease is alive; its owner may still report."""

    name = "in_flight"
    number = 19
    retry = "later"


class AlreadyCommitted(GuardError):
    """The effect is known to have happened; it is not given away again."""

    name = "already_committed"
    number = 20


class RunLost(GuardError):
    """The caller holds an epoch of this run; the store has no such run. It is never made anew."""

    name = "run_lost"
    number = 21


class ClockNotAllowed(GuardError):
    """`at_ms` is only taken by a guard that was started with a virtual clock."""

    name = "clock_not_allowed"
    number = 22


class NotAllowed(GuardError):
    """The caller's role does not allow this operation or this value."""

    name = "not_allowed"
    number = 23


class StoreUnavailable(GuardError):
    """The store gave no trustworthy answer. The tool must not run; whether the request happened is unknown."""

    name = "store_unavailable"
    number = 30
    retry = "same_id"


class AuditUnavailable(GuardError):
    """The audit could not be written, so the action was not taken."""

    name = "audit_unavailable"
    number = 32
    retry = "later"


class AuditStoreUnavailable(AuditUnavailable):
    """The same, because the store is out of reach: it may be back soon, so the same may be sent again."""

    retry = "same_id"


class StoreRefused(GuardError):
    """The server cannot keep what guardd promises (too old, may evict, a replica); the message says the cure."""

    name = "store_refused"
    number = 31


ERRORS: dict[str, type[GuardError]] = {
    kind.name: kind
    for kind in (
        BadArgument, CallConflict, UnknownCall, UnknownRun, UnknownOperation, ChangeRequired, EffectKeyMissing,
        NotResumable, LimitsNeeded, InFlight, AlreadyCommitted, RunLost, ClockNotAllowed, NotAllowed,
        StoreUnavailable, StoreRefused, AuditUnavailable,
    )
}  # fmt: skip
"""Error classes by their stable name."""
