"""What the guard says: one answer type for all operations (SPEC 2.2), and the envelope of a stopped run (2.9)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Answer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An answer of the guard; members that do not apply are left out.

    action:          execute | replay | wait | deny | stop | continue.
    reason:          why, unless the action is execute or a plain continue.
    hint:            one sentence for a model to read.
    evidence:        what fired: limit, observed, steps (numbers of the earlier calls that match), deny_rule.
    retry_after_ms:  for wait, when known.
    remaining:       what is left of each cap, of the run or of the ancestor that binds first.
    epoch:           names this life of the run; send it back and a lost run is noticed.
    step:            number of the admitted call in its run.
    value, operation_id, result_truncated, value_digest:  of a replay; value is JSON as it was reported.
    provider_key:    idempotency key to hand to providers, for calls with a key.
    lease_ms:        of an admitted call with a key: its claim lasts so long, renew it before.
    claim:           "stale": another owner holds the effect; "renewed" for a renewal.
    would:           observe mode: what enforcing would have answered, as {action, reason}.
    envelope:        with stop: what the run says about itself.
    """

    action: str
    reason: str = ""
    hint: str = ""
    evidence: dict[str, Any] = {}
    retry_after_ms: int | None = None
    remaining: dict[str, int] = {}
    epoch: str = ""
    step: int | None = None
    value: Any | UnsetType = UNSET
    operation_id: str = ""
    result_truncated: bool = False
    value_digest: str = ""
    provider_key: str = ""
    lease_ms: int | None = None
    claim: str = ""
    would: list[dict[str, str]] = []
    policy: str = ""
    limits: dict[str, Any] = {}
    read_only: list[str] = []
    progress_version: int | None = None
    envelope: dict[str, Any] = {}

    def as_dict(self) -> dict[str, Any]:
        """The answer as JSON-like values, without what does not apply."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built
