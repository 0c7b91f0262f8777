"""From a request to what the script judges: canonical call, effect key, tool rule, worth of a result (SPEC 2.1, 2.3)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple

from jsonschema import exceptions as schema_exceptions
from jsonschema.validators import validator_for
from msgspec import UNSET

from guardd import canonical, redaction
from guardd.engine.config import EngineConfig
from guardd.model.errors import BadArgument, EffectKeyMissing
from guardd.model.ids import check_name
from guardd.model.limits import Policy
from guardd.model.tools import ToolRule
from guardd.protocol.operations import Before
from guardd.scripts.bind import Map, packed

_ORDER_DIGITS = 40
_ORDER_PLACES = 20


class Effect(NamedTuple):
    """A ledger record's name. scope: run | global. digest: of root (or *), tool and key."""

    key: str
    scope: str
    digest: str
    provider_key: str


class Shaped(NamedTuple):
    """A call as the scripts compare it."""

    fingerprint: str
    short: str
    target: str
    trace_args: str


class Shaper:
    """Applies policies and tool rules to requests. Holds caches, no state of runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._volatile: dict[tuple[str, str], frozenset[str]] = {}
        self._rule_maps: dict[tuple[str, str], Map] = {}
        self._validators: dict[int, Any] = {}

    def call(self, tool: str, rule: ToolRule, policy: Policy, normalised: Any) -> Shaped:
        """Fingerprints under one policy, and the redacted arguments for the trace."""
        cache_key = (tool, policy.name)
        volatile = self._volatile.get(cache_key)
        if volatile is None:
            volatile = (policy.volatile_args | set(rule.volatile_args)) - set(rule.keep_args)
            self._bounded(self._volatile)[cache_key] = volatile
        value = canonical.strip(normalised, volatile)
        text = canonical.canonical_json(value)
        fingerprint = canonical.fingerprint(tool, text)
        target = canonical.target(tool, normalised, rule.target_args) if rule.target_args else ""
        return Shaped(fingerprint, canonical.short(fingerprint), target, self._trace_args(value, text, rule))

    def _trace_args(self, value: Any, text: str, rule: ToolRule) -> str:
        if not self._config.trace_max:
            return ""
        if not self._config.trace_originals and (rule.redact or redaction.may_hold_secrets(text)):
            cleaned = redaction.redact(value, key=self._config.redact_key, names=frozenset(rule.redact))
            if cleaned is not value:
                text = canonical.canonical_json(cleaned)
        return redaction.shorten(text)[0]

    def effect(self, request: Before, tool: str, rule: ToolRule, normalised: Any, root: str) -> Effect | None:
        """The effect of a call, or None for a call without one.

        Raises: EffectKeyMissing: a key is required, or a member that makes it is missing or null.
        """
        key = request.idempotency_key
        if key is None and rule.effect_key:
            key = canonical.effect_key(normalised, rule.effect_key)
        if key is None:
            if rule.requires_key or request.scope == "global":
                raise EffectKeyMissing(
                    f"calls of {tool} need an idempotency key; pass one",
                    field="idempotency_key",
                    limit="1..255 bytes",
                )
            return None
        scope = "global" if "global" in (rule.effect_scope, request.scope) else "run"
        return self.record(root, tool, key, scope)

    @staticmethod
    def record(root: str, tool: str, key: str, scope: str) -> Effect:
        """The name of a ledger record (SPEC 2.6)."""
        check_name("idempotency_key", key)
        owner = "*" if scope == "global" else root
        return Effect(key, scope, canonical.record_digest(owner, tool, key), canonical.provider_key(owner, tool, key))

    def rule_map(self, tool: str, rule: ToolRule, policy: Policy) -> Map:
        """What this tool's rule overrides, packed for the script."""
        cache_key = (tool, policy.name)
        found = self._rule_maps.get(cache_key)
        if found is None:
            defaults = policy.read_only_defaults if rule.read_only else {}
            found = packed(
                {
                    "max_same_call": rule.max_same_call,
                    "max_same_target": rule.max_same_target,
                    "max_retries": rule.max_retries,
                    "max_empty": rule.max_empty,
                    "cycle_exempt": "1" if rule.cycle_exempt else "",
                    "window_scope": rule.window_scope or defaults.get("window_scope"),
                    "reclaim": "1" if rule.on_in_doubt == "reclaim" else "",
                    "writes": "" if rule.read_only else "1",
                    "span": self._config.tools.span_max or None,
                }
            )
            self._bounded(self._rule_maps)[cache_key] = found
        return found

    @staticmethod
    def is_round_exempt(rule: ToolRule, policy: Policy) -> bool:
        """True when results of this tool make no round without progress (SPEC 2.4)."""
        if rule.no_progress_exempt is not None:
            return rule.no_progress_exempt
        return bool(rule.read_only and policy.read_only_defaults.get("no_progress_exempt"))

    def verdict(self, status: str, value: Any, rule: ToolRule) -> str:
        """What a success is worth: ok, empty (null or blank), invalid (breaks the rule's JSON Schema) (SPEC 2.3)."""
        if value is UNSET or status not in ("progress", "complete"):
            return "ok"
        if not rule.allow_empty and (value is None or (isinstance(value, str) and not value.strip())):
            return "empty"
        if rule.result_schema is not None and not self._validator(rule.result_schema).is_valid(value):
            return "invalid"
        return "ok"

    def _validator(self, schema: Any) -> Any:
        found = self._validators.get(id(schema))
        if found is None:
            kind = validator_for(schema)
            try:
                kind.check_schema(schema)
            except schema_exceptions.SchemaError as error:
                raise BadArgument(
                    f"result_schema is no JSON Schema: {error.message}", field="tools.result_schema"
                ) from error
            found = self._validators[id(schema)] = kind(schema)
        return found

    def result(self, value: Any) -> tuple[str, Map]:
        """A result as stored: (JSON text, "" beyond the cap; digest, size and mark)."""
        if value is UNSET:
            return "", Map("")
        text = json_text(value, "value")
        raw = text.encode()
        digest, size = canonical.result_digest(raw), len(raw)
        if size > self._config.result_bytes_max:
            return "", packed({"value_digest": digest, "value_bytes": size, "truncated": "1"})
        return text, packed({"value_digest": digest, "value_bytes": size})

    def reading(self, status: str, verdict: str, value: Any, rule: ToolRule) -> Map:
        """The value that derived progress looks at, or nothing when the result has none (SPEC 2.4)."""
        derive = rule.progress
        if derive is None or value is UNSET or verdict != "ok" or status not in ("progress", "complete"):
            return Map("")
        found = resolve_pointer(value, derive.pointer)
        if derive.when == "new":
            seen = "" if found is UNSET or found is None else canonical.state_digest(found)
        else:
            seen = order_key(found)
        if not seen:
            return Map("")
        return packed({"when": derive.when, "value": seen, "seen_max": self._config.seen_max})

    @staticmethod
    def _bounded(cache: dict[Any, Any]) -> dict[Any, Any]:
        if len(cache) >= 4096:  # names come from clients
            cache.clear()
        return cache


def json_text(value: Any, field: str) -> str:
    """Compact JSON of a value.

    Raises: BadArgument: it is no JSON (NaN, bytes, member names that are no strings).
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise BadArgument(f"{field} is not JSON: {error}", field=field, limit="any JSON") from error


def resolve_pointer(value: Any, pointer: str) -> Any:
    """The member a JSON pointer (RFC 6901) names; UNSET when there is none."""
    for raw in pointer.split("/")[1:]:
        token = raw.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and token in value:
            value = value[token]
        elif isinstance(value, list) and token.isascii() and token.isdigit() and int(token) < len(value):
            value = value[int(token)]
        else:
            return UNSET
    return value


def order_key(value: Any) -> str:
    """Text that sorts as the numbers do; "" for what is no number or beyond 40 digits.

    Cursors may exceed 2^53, where Lua's numbers lose digits.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    number = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    if not number.is_finite() or abs(number) >= Decimal(10) ** _ORDER_DIGITS:
        return ""
    digits = f"{abs(number):.{_ORDER_PLACES}f}".replace(".", "").zfill(_ORDER_DIGITS + _ORDER_PLACES)
    if number < 0 and digits.strip("0"):
        return "0" + "".join(str(9 - int(digit)) for digit in digits)
    return "1" + digits


def amounts(usage: Any) -> Map:
    """Usage or a reservation as the scripts read it; zeros are left out."""
    if usage is None:
        return Map("")
    return packed({name: getattr(usage, name) or None for name in ("model_calls", "tokens", "cost_micros")})


def pairs(reply: Iterable[Any]) -> dict[str, Any]:
    """A flat list of names and values as a mapping of text."""
    items = iter(reply)
    return {text(name): text(value) for name, value in zip(items, items, strict=True)}


def text(value: Any) -> str:
    """A reply element as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
