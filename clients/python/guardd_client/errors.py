"""Errors of the client, in one tree.

GuardClientError
├── GuardUnavailable   no trustworthy answer from the daemon: the tool did not run
├── GuardRequestError  the daemon named an error: name, number, field, value, limit, retry
│   └── RunLost        the run that this client knows is gone from the store
└── Refused            the guard answered something else than execute: `answer`, `hint`
    ├── ToolDenied     choose another way; the run lives
    ├── ToolMustWait   not now; `retry_after_ms` when known
    └── RunStopped     the run is over; `answer.envelope` says why
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guardd_client.answers import Answer


class GuardClientError(Exception):
    """The root of all errors of this client."""


class GuardUnavailable(GuardClientError):
    """No trustworthy answer in time. A tool that is guarded did not run."""


class GuardRequestError(GuardClientError):
    """The daemon refused the request itself; nothing was stored.

    name, number: of the error. field, value, limit: what was wrong. retry: never | later | same_id.
    """

    def __init__(self, error: dict[str, Any]) -> None:
        self.name: str = error.get("error", "unknown")
        self.number: int = error.get("number", 0)
        self.field: str = error.get("field", "")
        self.value: Any = error.get("value")
        self.limit: Any = error.get("limit")
        self.retry: str = error.get("retry", "never")
        details = "".join(f" {name}={error[name]!r}" for name in ("field", "value", "limit") if name in error)
        super().__init__(f"{self.name}: {error.get('message', '')}{details}")
        self.error = error


class RunLost(GuardRequestError):
    """The store has lost this run; it is never made anew under the same id."""


class Refused(GuardClientError):
    """The guard did not let the tool run. `hint` is what a model is told."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.hint = answer.hint
        super().__init__(f"{answer.action} {answer.reason}: {answer.hint}")


class ToolDenied(Refused):
    """This call is refused; the run lives."""


class ToolMustWait(Refused):
    """Not now."""

    @property
    def retry_after_ms(self) -> int | None:
        """When to ask again, ms; None: not known."""
        return self.answer.retry_after_ms


class RunStopped(Refused):
    """The run is over; `answer.envelope` says why."""

    @property
    def envelope(self) -> dict[str, Any]:
        """What the run says about itself."""
        return self.answer.envelope
