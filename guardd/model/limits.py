"""Limits and policies: every number of SPEC 2.10, declared once.

Lua has no number of its own: the limits of a run travel as one text
(`max_steps=20 max_wall_ms=60000 ...`), sit in the run's hash and are read there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guardd.model.errors import BadArgument

EXACT_INT_MAX = 2**53 - 1
"""Counters, times, amounts and limits are whole numbers from 0 to this."""

AMOUNTS = ("model_calls", "tokens", "cost_micros")
"""What can be charged and reserved; money in micro-units of one currency."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: its range, and its value in the two policies that are built in (None: unlimited)."""

    name: str
    reference: int | str | None
    agent: int | str | None
    help: str
    max: int = EXACT_INT_MAX
    min: int = 0
    words: tuple[str, ...] = ()
    may_be_unlimited: bool = True
    unlimited_is_max: bool = False
    """Unlimited stands for the largest value: how far back a loop is looked for has an end."""


LIMITS: dict[str, Limit] = {
    limit.name: limit
    for limit in (
        Limit("max_steps", 20, 60, "admitted calls of a run and its sub-runs"),
        Limit("max_wall_ms", 60_000, 900_000, "time a run may take, pauses left out, ms"),
        Limit("max_same_call", 2, 3, "equal calls within the window", max=1024),
        Limit("cycle_window", 8, 16, "entries of the window that repeats are counted in", max=1024, unlimited_is_max=True),
        Limit("max_cycle_period", 8, 8, "longest cycle that is looked for, calls", max=16, unlimited_is_max=True),
        Limit("max_no_progress", 3, 8, "results in a row without a higher progress version"),
        Limit("max_denied", 1, 3, "refusals of one agent in a row before the run ends"),
        Limit("max_retries", 3, 3, "declared retries of one call since its last success"),
        Limit("max_depth", 4, 4, "sub-runs below sub-runs"),
        Limit("max_replays", 8, 8, "replays of one finished effect since the last progress"),
        Limit("claim_lease_ms", 30_000, 30_000, "how long a claim is held without a renewal, ms", max=3_600_000, min=1,
              may_be_unlimited=False),
        Limit("max_model_calls", None, None, "model calls of a run and its sub-runs"),
        Limit("max_tokens", None, None, "tokens of a run and its sub-runs"),
        Limit("max_cost_micros", None, None, "money of a run and its sub-runs, micro-units"),
        Limit("max_handoffs", None, None, "handoffs of a tree"),
        Limit("max_role_returns", None, None, "times that control may come back to one agent"),
        Limit("max_empty", None, None, "empty results of one tool in a row"),
        Limit("max_same_target", None, None, "calls on one target since the last progress"),
        Limit("on_refusal", "stop", "deny", "what a permission or policy refusal does", words=("stop", "deny")),
        Limit("window_scope", "run", "run", "who shares a window", words=("run", "agent", "tree")),
        Limit("mode", "enforce", "enforce", "observe: rules are recorded and let the call pass",
              words=("enforce", "observe")),
    )
}  # fmt: skip
"""All limits by name, in the order in which they are stored and shown."""


def check_limits(limits: Mapping[str, Any], *, field_name: str = "limits") -> dict[str, int | str | None]:
    """The limits as given, when every one is known and in range.

    Raises: BadArgument: names the member, its value and what is allowed.
    """
    if not isinstance(limits, Mapping):
        raise BadArgument("limits are an object of names and values", field=field_name, value=limits, limit="object")
    checked: dict[str, int | str | None] = {}
    for name, value in limits.items():
        limit = LIMITS.get(name) if isinstance(name, str) else None
        where = f"{field_name}.{name}"
        if limit is None:
            raise BadArgument("no such limit", field=where, value=value, limit=", ".join(LIMITS))
        if limit.words:
            if value not in limit.words:
                raise BadArgument(f"{name} is a word", field=where, value=value, limit=" | ".join(limit.words))
        elif value is None and limit.unlimited_is_max:
            checked[name] = limit.max
            continue
        elif value is None:
            if not limit.may_be_unlimited:
                raise BadArgument(
                    f"{name} cannot be unlimited", field=where, value="null", limit=f"{limit.min}..{limit.max}"
                )
        elif isinstance(value, bool) or not isinstance(value, int) or not limit.min <= value <= limit.max:
            raise BadArgument(f"{name} is a whole number", field=where, value=value, limit=f"{limit.min}..{limit.max}")
        checked[name] = value
    return checked


def limits_text(limits: Mapping[str, int | str | None]) -> str:
    """All limits as stored: `name=value` in the declared order, unlimited ones left out."""
    return " ".join(f"{name}={limits[name]}" for name in LIMITS if limits.get(name) is not None)


def changes_text(limits: Mapping[str, int | str | None]) -> str:
    """Changed limits as the scripts take them: `-` stands for unlimited."""
    return " ".join(f"{name}={'-' if limits[name] is None else limits[name]}" for name in LIMITS if name in limits)


def parse_limits(text: str) -> dict[str, int | str | None]:
    """The stored text as a mapping; limits that are not there are unlimited (None)."""
    stored = dict(part.split("=", 1) for part in text.split())
    return {
        name: (stored[name] if limit.words else int(stored[name])) if name in stored else None
        for name, limit in LIMITS.items()
    }


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits under a name, the members that are never identity, and what reading tools are spared.

    volatile_args:       members dropped from the arguments at every depth.
    read_only_defaults:  what a `read_only` tool gets unless its rule says otherwise.
    """

    name: str
    limits: Mapping[str, int | str | None]
    volatile_args: frozenset[str]
    read_only_defaults: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The limits as a run stores them."""
        return limits_text(self.limits)


REFERENCE = Policy(
    "reference",
    {name: limit.reference for name, limit in LIMITS.items()},
    frozenset({"request_id", "timestamp", "trace_id"}),
)
AGENT = Policy(
    "agent",
    {name: limit.agent for name, limit in LIMITS.items()},
    frozenset({"request_id", "trace_id"}),  # a date can be identity
    {"window_scope": "agent", "no_progress_exempt": True},
)


# As lua/include/limits.lua has it, where the rule is enforced; here it only tells what has to be written down.
_MORE_IS_TIGHTER = frozenset({"cycle_window", "max_cycle_period"})
_LOOSE_TO_STRICT = {
    "on_refusal": ("deny", "stop"),
    "mode": ("observe", "enforce"),
    "window_scope": ("agent", "run", "tree"),
}


def first_looser(current: Mapping[str, Any], changes: Mapping[str, Any]) -> str | None:
    """The first change, by name, that loosens a limit; None: none does. A value of another kind counts as loose."""
    for name in sorted(map(str, changes)):
        if name != "claim_lease_ms" and _loosens(name, current.get(name), changes.get(name)):
            return name
    return None


def _loosens(name: str, old: Any, new: Any) -> bool:
    if name in _LOOSE_TO_STRICT:
        words = _LOOSE_TO_STRICT[name]
        return new not in words or (old in words and words.index(new) < words.index(old))
    if not (new is None or isinstance(new, int)):
        return True
    if name in _MORE_IS_TIGHTER:
        return new is not None and (old is None or new < old)
    return old is not None and (new is None or new > old)
