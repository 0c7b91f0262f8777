"""The canonical form of a call: what makes two calls the same call (SPEC 2.1).

    normalise -> strip -> canonical_json -> fingerprint

Made once, in the daemon, so that all clients agree. Digests join their parts
with lengths and a domain word, so no two different inputs share one joining.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from guardd.model.errors import BadArgument, EffectKeyMissing

NESTING_MAX = 32
ARGS_BYTES_MAX = 262_144
_NOT_JSON_WORDS = frozenset({"NaN", "Infinity", "-Infinity"})
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def normalise(args: object) -> Any:
    """Arguments as a client gave them, in one form; null and volatile members are still there.

    Absent, null or blank arguments are {}. A string that is JSON is parsed (at the top only), another
    stays a string. Strings are NFC without outer white space, member names NFC, integral floats integers.

    Raises: BadArgument: a number that is not finite, a member name twice or not a string, a value that is
        no JSON, more than 32 levels, more than 256 KiB; names the path (`args.a.b[3]`).
    """
    if args is None:
        return {}
    if isinstance(args, str):
        if len(args) > ARGS_BYTES_MAX or len(args.encode("utf-8", "surrogatepass")) > ARGS_BYTES_MAX:
            raise _too_large()
        stripped = args.strip()
        if not stripped:
            return {}
        args = _parse(stripped)
        if args is None:
            return {}
    if isinstance(args, dict) and not args:
        return {}
    return _value(args, "args", 0)


def _parse(text: str) -> object:
    """The value of a JSON text, or the text itself when it is none."""
    if text in _NOT_JSON_WORDS or text[0] not in '{["-0123456789tfn':
        return text
    if text[0] in "{[":
        _check_text_nesting(text)
    try:
        return json.loads(text, object_pairs_hook=_members, parse_constant=_not_finite)
    except json.JSONDecodeError:
        return text
    except RecursionError:
        raise _too_deep("args") from None
    except ValueError:  # an integer with more digits than Python reads
        return text


def _check_text_nesting(text: str) -> None:
    """Refuses deep text before the parser recurses into it."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "{[":
            depth += 1
            if depth > NESTING_MAX:
                raise _too_deep("args")
        elif found[0] in "}]":
            depth -= 1


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadArgument("a member name stands twice", field="args", value=twice, limit="each name once")
    return members


def _not_finite(word: str) -> object:
    raise BadArgument("a number is not finite", field="args", value=word, limit="finite numbers")


def _value(value: object, path: str, depth: int) -> Any:
    if isinstance(value, str):
        return _string(value, path).strip()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadArgument("a number is not finite", field=path, value=repr(value), limit="finite numbers")
        return int(value) if value.is_integer() else value
    if depth >= NESTING_MAX:
        raise _too_deep(path)
    if isinstance(value, dict):
        members: dict[str, Any] = {}
        for name, item in value.items():
            if not isinstance(name, str):
                raise BadArgument("a member name is a string", field=path, value=repr(name), limit="string")
            formed = _string(name, path)
            if formed in members:
                raise BadArgument("a member name stands twice", field=path, value=formed, limit="each name once")
            members[formed] = _value(item, f"{path}.{formed}", depth + 1)
        return members
    if isinstance(value, list | tuple):
        return [_value(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)]
    raise BadArgument(f"{type(value).__name__} is no JSON value", field=path, value=repr(value), limit="JSON")


def _string(text: str, path: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadArgument("text holds half a character", field=path, value=ascii(text), limit="UTF-8") from error
    return unicodedata.normalize("NFC", text)


def strip(value: Any, volatile: frozenset[str]) -> Any:
    """A normalised value without null and volatile members, at every depth; arrays keep their nulls."""
    if isinstance(value, dict):
        return {
            name: strip(item, volatile) for name, item in value.items() if item is not None and name not in volatile
        }
    if isinstance(value, list):
        return [strip(item, volatile) for item in value]
    return value


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical_json(value: Any) -> str:
    """The text of a normalised value: members by code point, no blanks, not ASCII-escaped.

    Numbers that are not integral stand in their shortest form that reads back as the same double; daemons of
    one version agree, whatever language the client is in.
    Raises: BadArgument: more than 256 KiB.
    """
    text = _encode(value)
    if len(text) > ARGS_BYTES_MAX // 4 and len(text.encode()) > ARGS_BYTES_MAX:
        raise _too_large()
    return text


def fingerprint(tool: str, canonical: str) -> str:
    """64 hex digits of a call's tool and canonical arguments."""
    return _digest("call", tool, canonical)


def short(full: str) -> str:
    """The 16 characters (96 bits) by which windows and marks name a fingerprint."""
    return base64.urlsafe_b64encode(bytes.fromhex(full[:24])).decode()


def target(tool: str, normalised: Any, names: Sequence[str]) -> str:
    """The coarse fingerprint of a tool and some of its arguments; a missing member counts as null."""
    members = normalised if isinstance(normalised, dict) else {}
    return short(_digest("target", tool, canonical_json([members.get(name) for name in names])))


def effect_key(normalised: Any, names: Sequence[str]) -> str:
    """The idempotency key that some arguments make: their canonical JSON array, before anything is dropped.

    Raises: EffectKeyMissing: a member is missing or null.
    """
    members = normalised if isinstance(normalised, dict) else {}
    for name in names:
        if members.get(name) is None:
            raise EffectKeyMissing(
                f"the argument {name} makes the effect key and is missing; pass it, or an idempotency_key",
                field=f"args.{name}", limit="not null",
            )  # fmt: skip
    return canonical_json([members[name] for name in names])


def record_digest(owner: str, tool: str, key: str) -> str:
    """40 hex digits that name a ledger record. owner: the root run, or `*` for a global key."""
    return _digest("record", owner, tool, key)[:40]


def provider_key(owner: str, tool: str, key: str) -> str:
    """An idempotency key for providers: stable, and telling nothing of run or key."""
    return "guardd-" + _digest("provider", owner, tool, key)[:32]


def state_digest(state: object) -> str:
    """12 hex digits of any JSON value in canonical form: a handoff's state, a value derived progress has seen."""
    return _digest("state", canonical_json(_value(state, "state", 0)))[:12]


def result_digest(raw: bytes) -> str:
    """64 hex digits of a result's bytes."""
    return hashlib.sha256(raw).hexdigest()


def load_json(text: str) -> Any:
    """A stored JSON text as a value."""
    return json.loads(text)


def _digest(domain: str, *parts: str) -> str:
    joined = hashlib.sha256(f"guardd:{domain}".encode())
    for part in parts:
        raw = part.encode()
        joined.update(b"\x00%d:" % len(raw))
        joined.update(raw)
    return joined.hexdigest()


def _too_deep(path: str) -> BadArgument:
    return BadArgument("arguments are nested too deep", field=path, limit=f"{NESTING_MAX} levels")


def _too_large() -> BadArgument:
    return BadArgument("arguments are too large", field="args", limit=f"{ARGS_BYTES_MAX} bytes")
