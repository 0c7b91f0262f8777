"""What the guard answered."""

from __future__ import annotations

from typing import Any

from guardd_client.errors import Refused, RunStopped, ToolDenied, ToolMustWait


class Answer(dict[str, Any]):
    """An answer as the daemon sent it; members that do not apply are not there.

    The common ones are attributes: action, reason, hint, evidence, remaining, retry_after_ms, value,
    operation_id, provider_key, lease_ms, claim, step, epoch, envelope.
    """

    @property
    def action(self) -> str:
        """Execute | replay | wait | deny | stop | continue."""
        return str(self["action"])

    @property
    def reason(self) -> str:
        """Why; "" for execute and a plain continue."""
        return str(self.get("reason", ""))

    @property
    def hint(self) -> str:
        """One sentence for a model to read."""
        return str(self.get("hint", ""))

    @property
    def evidence(self) -> dict[str, Any]:
        """limit, observed, and the steps that match."""
        return dict(self.get("evidence", {}))

    @property
    def remaining(self) -> dict[str, int]:
        """What is left of each cap."""
        return dict(self.get("remaining", {}))

    @property
    def retry_after_ms(self) -> int | None:
        """When to ask again; None: not known."""
        return self.get("retry_after_ms")

    @property
    def value(self) -> Any:
        """The stored result of a replay; None when there is none."""
        return self.get("value")

    @property
    def provider_key(self) -> str:
        """Idempotency key to pass on to providers; "" for calls without a key."""
        return str(self.get("provider_key", ""))

    @property
    def lease_ms(self) -> int | None:
        """How long the claim of an admitted call lasts without a renewal; None: it has none."""
        return self.get("lease_ms")

    @property
    def claim(self) -> str:
        """ "stale" when another owner holds the effect."""
        return str(self.get("claim", ""))

    @property
    def envelope(self) -> dict[str, Any]:
        """With stop: what the run says about itself."""
        return dict(self.get("envelope", {}))

    def as_dict(self) -> dict[str, Any]:
        """The answer as plain values."""
        return dict(self)

    def refusal(self) -> Refused | None:
        """The exception for this answer; None when the tool may run or has a stored result."""
        kind = {"deny": ToolDenied, "wait": ToolMustWait, "stop": RunStopped}.get(self.action)
        return kind(self) if kind else None
