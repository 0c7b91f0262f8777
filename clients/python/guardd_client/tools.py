"""What a guarded function is: its options, its arguments, its key. No rule of the guard."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GIVEN = ("provider_key", "cancelled")
"""Parameters that the wrapper fills when a function has them."""


@dataclass(frozen=True)
class ToolOptions:
    """See AsyncRun.tool."""

    name: str | None
    key: Sequence[str] | Callable[..., str] | str | None
    scope: str | None
    read_only: bool
    not_executed: tuple[type[BaseException], ...]
    refusals: str
    progress: Callable[[Any], int | None] | None
    verify: Callable[..., Any] | None
    lease_ms: int | None
    wait_ms: int

    def __post_init__(self) -> None:
        if self.refusals not in ("raise", "return"):
            raise ValueError(f"refusals is raise or return, not {self.refusals!r}")
        if self.lease_ms is not None and self.lease_ms < 1:
            raise ValueError(f"lease_ms is at least 1, not {self.lease_ms}")


@dataclass(frozen=True)
class Granted:
    """The tool may run. lease_ms: of its claim, None without one. extra: what the wrapper fills in."""

    call: str
    lease_ms: int | None
    extra: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a caller gets without the tool having run: a stored result, or a refusal as a value."""

    value: Any


def bind_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[dict[str, Any], list[str]]:
    """Arguments by name with defaults, without self and what the wrapper fills; and the names it has to fill."""
    signature = inspect.signature(function)
    wanted = [name for name in GIVEN if name in signature.parameters and name not in kwargs]
    bound = signature.bind_partial(*args, **kwargs)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if name in ("self", "cls") or name in GIVEN:
            continue
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            if value:
                named[name] = list(value)
        else:
            named[name] = value
    return named, wanted


def key_of(key: Sequence[str] | Callable[..., str] | str | None, named: dict[str, Any]) -> str | None:
    """The idempotency key of a call.

    Raises: ValueError: an argument that makes the key is missing.
    """
    if key is None or isinstance(key, str):
        return key
    if callable(key):
        return str(key(**named))
    missing = [name for name in key if named.get(name) is None]
    if missing:
        raise ValueError(f"the argument {missing[0]} makes the idempotency key and is missing")
    return json.dumps([named[name] for name in key], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
