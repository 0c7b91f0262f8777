"""Tool rules: what the owner of a platform says about a tool (SPEC 2.10)."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec

from guardd.model.errors import BadArgument
from guardd.model.limits import EXACT_INT_MAX


class DerivedProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Progress that is read from a tool's result (SPEC 2.4): where, and which change counts."""

    pointer: str
    when: Literal["increases", "decreases", "new"]


class ToolRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule; it belongs to the tool of its exact name, else to tools its glob matches (the longest wins).

    aliases:            other names of the tool, resolved once.
    volatile_args:      members that are not identity, besides the policy's.
    keep_args:          members that are identity although the policy says otherwise.
    target_args:        members that make the coarse fingerprint for max_same_target.
    effect_key:         members that make the idempotency key when the caller gives none.
    effect_scope:       "global": one effect whatever run asks.
    requires_key:       a call without a key is refused.
    read_only:          the tool changes nothing outside.
    allow_empty:        a blank result is a success.
    result_schema:      JSON Schema; a success that breaks it is none.
    progress:           derived progress.
    no_progress_exempt: its results make no round without progress.
    cycle_exempt:       it repeats within its allowance but is no part of a cycle.
    window_scope, max_same_call, max_same_target, max_retries, max_empty: in place of the run's limit.
    on_in_doubt:        "reclaim": an effect in doubt may run again, it is idempotent downstream.
    verify:             workers may resolve its keys with what their check found.
    redact:             members whose values are never stored in clear.
    """

    aliases: tuple[str, ...] = ()
    volatile_args: tuple[str, ...] = ()
    keep_args: tuple[str, ...] = ()
    target_args: tuple[str, ...] = ()
    effect_key: tuple[str, ...] = ()
    effect_scope: Literal["run", "global"] = "run"
    requires_key: bool = False
    read_only: bool = False
    allow_empty: bool = False
    result_schema: dict[str, Any] | bool | None = None
    progress: DerivedProgress | None = None
    no_progress_exempt: bool | None = None
    cycle_exempt: bool = False
    window_scope: Literal["run", "agent", "tree"] | None = None
    max_same_call: int | None = None
    max_same_target: int | None = None
    max_retries: int | None = None
    max_empty: int | None = None
    on_in_doubt: Literal["deny", "reclaim"] = "deny"
    verify: bool = False
    redact: tuple[str, ...] = ()


NO_RULE = ToolRule()


class ToolRules:
    """All rules of a configuration, with look-up by name.

    Raises: BadArgument: a rule is malformed, or an alias belongs to two tools.
    """

    def __init__(self, rules: Mapping[str, Any] | None = None) -> None:
        self.by_name: dict[str, ToolRule] = {}
        self._alias: dict[str, str] = {}
        for name, rule in (rules or {}).items():
            self.by_name[name] = rule if isinstance(rule, ToolRule) else _convert(name, rule)
        for name, parsed in self.by_name.items():
            for alias in parsed.aliases:
                if alias in self.by_name or self._alias.get(alias, name) != name:
                    raise BadArgument(
                        "an alias names one tool only", field=f"tools.{name}.aliases", value=alias, limit="unique"
                    )
                self._alias[alias] = name
        self._globs = sorted(
            (name for name in self.by_name if set(name) & set("*?[")), key=lambda name: (-len(name), name)
        )
        self.span_max = max((rule.max_same_call or 0 for rule in self.by_name.values()), default=0)
        """The longest window that any rule's allowance needs, entries."""
        self._found: dict[str, tuple[str, ToolRule]] = {}

    def find(self, tool: str) -> tuple[str, ToolRule]:
        """The canonical name of a tool and its rule; tools without one get an empty rule."""
        found = self._found.get(tool)
        if found is None:
            name = self._alias.get(tool, tool)
            rule = self.by_name.get(name)
            if rule is None:
                rule = next((self.by_name[glob] for glob in self._globs if fnmatchcase(name, glob)), NO_RULE)
            if len(self._found) >= 4096:  # names come from clients
                self._found.clear()
            found = self._found[tool] = (name, rule)
        return found


def _convert(name: str, rule: object) -> ToolRule:
    try:
        converted = msgspec.convert(rule, ToolRule)
    except msgspec.ValidationError as error:
        raise BadArgument(f"the rule of this tool is malformed: {error}", field=f"tools.{name}", value=rule) from error
    for cap in ("max_same_call", "max_same_target", "max_retries", "max_empty"):
        value = getattr(converted, cap)
        most = 1024 if cap == "max_same_call" else EXACT_INT_MAX
        if value is not None and not 0 <= value <= most:
            raise BadArgument(f"{cap} is out of range", field=f"tools.{name}.{cap}", value=value, limit=f"0..{most}")
    if converted.progress is not None and converted.progress.pointer and not converted.progress.pointer.startswith("/"):
        raise BadArgument(
            "a JSON pointer starts with /", field=f"tools.{name}.progress.pointer", value=converted.progress.pointer
        )
    return converted
