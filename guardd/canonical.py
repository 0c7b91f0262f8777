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
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from guardd.model.errors import BadArgument, EffectKeyMissing

NESTING_MAX = 32
ARGS_BYTES_MAX = 262_144
INTEGER_DIGITS_MAX = 4_300  # more take quadratic time to write, and Python refuses them

_INTEGER_MAX = 10**INTEGER_DIGITS_MAX
_PATH_SEGMENT_CHARS_MAX = 64
_CONTAINERS = (dict, list)
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


class _Members(list[tuple[str, Any]]):
    """The members of an object in JSON text as they stand there, so that a name that stands twice is seen."""


class _Wrong(Exception):
    """A value that has no canonical form. Its path grows on the way up, so right values pay nothing for it."""

    def __init__(self, message: str, value: str | None, limit: str) -> None:
        super().__init__(message)
        self.message = message
        self.value = value
        self.limit = limit
        self.path: list[str] = []

    def named(self, root: str) -> BadArgument:
        return BadArgument(self.message, field=root + "".join(reversed(self.path)), value=self.value, limit=self.limit)


_decode = json.JSONDecoder(object_pairs_hook=_Members).decode
_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode


# ---- Normalised values -----------------------------------------------------


def normalise(args: object) -> Any:
    """Arguments as a client gave them, in one form; null and volatile members are still there.

    Absent, null or blank arguments are {}. A string that is JSON is parsed, once and only at the top; one that
    is not stays a string, also NaN, Infinity and numbers too large for a double or an integer (`1e999`).
    Strings are NFC without outer white space, member names NFC, integral floats integers.

    Raises: BadArgument naming the path (`args.a.b[3]`): a number that is not finite, an integer of more than
        4,300 digits, a member name twice or not a string, half a surrogate pair, a value that is no JSON, more
        than 32 levels (text that opens more is refused unread), more than 256 KiB of canonical text.
    """
    if isinstance(args, str):
        args = _read(args)
    try:
        value = _value(args, 0)
    except _Wrong as wrong:
        raise wrong.named("args") from None
    if value is None or value == "":
        return {}
    _check_whole(value)
    return value


def _read(text: str) -> object:
    """The value of a JSON text, or the text itself when it is none."""
    if len(text) > ARGS_BYTES_MAX:
        raise _too_large()
    text = text.strip()
    is_container = text.startswith(("{", "["))
    if is_container:
        _check_text_nesting(text)
    try:
        value: object = _decode(text)
    except json.JSONDecodeError:
        return text
    except ValueError:  # an integer of too many digits
        if is_container:
            raise _long_integer().named("args") from None
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _check_text_nesting(text: str) -> None:
    """Refuses deep text before the parser recurses into it, however much stack is left."""
    if text.count("[") + text.count("{") <= NESTING_MAX:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "{[":
            depth += 1
            if depth > NESTING_MAX:
                raise _too_deep().named("args")
        elif found[0] in "}]":
            depth -= 1


def _value(value: object, depth: int) -> Any:
    if isinstance(value, str):
        return _text(value).strip()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -_INTEGER_MAX < value < _INTEGER_MAX:
            raise _long_integer()
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _Wrong("a number is not finite", repr(value), "finite numbers")
        return int(value) if value.is_integer() else value
    if isinstance(value, _Members):
        return _object(value, depth)
    if isinstance(value, dict):
        return _object(value.items(), depth)
    if isinstance(value, list | tuple):
        return _array(value, depth)
    raise _Wrong("a value is no JSON", type(value).__name__, "object, array, string, number, boolean or null")


def _object(pairs: Iterable[tuple[object, object]], depth: int) -> dict[str, Any]:
    if depth == NESTING_MAX:
        raise _too_deep()
    members: dict[str, Any] = {}
    for name, item in pairs:
        if not isinstance(name, str):
            raise _Wrong("a member name is no string", type(name).__name__, "strings as names")
        try:
            formed = name if name.isascii() else _text(name)
            if formed in members:
                raise _Wrong("a member name stands twice", formed, "each name once, after NFC")
            members[formed] = item.strip() if type(item) is str and item.isascii() else _value(item, depth + 1)
        except _Wrong as wrong:
            wrong.path.append("." + ascii(name[:_PATH_SEGMENT_CHARS_MAX])[1:-1])
            raise
    return members


def _array(items: Sequence[object], depth: int) -> list[Any]:
    if depth == NESTING_MAX:
        raise _too_deep()
    elements: list[Any] = []
    for item in items:
        try:
            elements.append(_value(item, depth + 1))
        except _Wrong as wrong:
            wrong.path.append(f"[{len(elements)}]")
            raise
    return elements


def _text(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:  # names the half, never the text: it may be a secret
        raise _Wrong("text holds half a surrogate pair", f"U+{ord(text[error.start]):04X}", "UTF-8") from None
    return unicodedata.normalize("NFC", text)


def strip(value: Any, volatile: frozenset[str]) -> Any:
    """A normalised value without null and volatile members, at every depth; arrays keep their nulls."""
    if isinstance(value, dict):
        return {
            name: strip(item, volatile) if isinstance(item, _CONTAINERS) else item
            for name, item in value.items()
            if item is not None and name not in volatile
        }
    if isinstance(value, list):
        return [strip(item, volatile) for item in value]
    return value


def canonical_json(value: Any) -> str:
    r"""The text of a normalised value: members by code point, no blanks, only `"`, `\` and U+0000 to U+001F escaped.

    Integers stand in full. Other numbers (a normalised float is never integral) stand in the shortest decimal
    form that reads back as the same double, as Python writes it: `0.0001`, but `1e-05` with an exponent of two
    digits below that. JavaScript writes `0.00001`: another language has to follow this form to compute the
    same fingerprint, and none needs to, since the daemon alone does.

    Raises: BadArgument: more than 256 KiB.
    """
    text = _encode(value)
    _check_size(text)
    return text


def _check_whole(value: Any) -> None:
    """Holds a value's canonical size against the limit, null and volatile members included.

    The exact text is only written for what is near the limit or over it. msgspec writes the same text but for
    the exponents of a few floats, several times faster.
    """
    if len(msgspec.json.encode(value)) > ARGS_BYTES_MAX // 2:
        _check_size(_encode(value))


def _check_size(text: str) -> None:
    if len(text) > ARGS_BYTES_MAX // 4 and len(text.encode()) > ARGS_BYTES_MAX:
        raise _too_large()


# ---- Digests ---------------------------------------------------------------


def fingerprint(tool: str, canonical: str) -> str:
    """64 hex digits of a call's tool and canonical arguments."""
    return _digest("call", tool, canonical)


def short(full: str) -> str:
    """The 16 characters (96 bits, base64url) by which windows and marks name a fingerprint."""
    return base64.urlsafe_b64encode(bytes.fromhex(full[:24])).decode()


def target(tool: str, normalised: Any, names: Sequence[str]) -> str:
    """The coarse fingerprint, in short form, of a tool and some of its arguments; a missing member counts as null."""
    members = normalised if isinstance(normalised, dict) else {}
    return short(_digest("target", tool, _encode([members.get(name) for name in names])))


def effect_key(normalised: Any, names: Sequence[str]) -> str:
    """The idempotency key that some arguments make: their canonical JSON array, before anything is dropped.

    Raises: EffectKeyMissing naming the first member that is missing or null.
    """
    members = normalised if isinstance(normalised, dict) else {}
    for name in names:
        if members.get(name) is None:
            raise EffectKeyMissing(
                f"the argument {name} makes the effect key and is missing; pass it, or an idempotency_key",
                field=f"args.{name}",
                limit="not null",
            )
    return canonical_json([members[name] for name in names])


def record_digest(scope_root: str, tool: str, key: str) -> str:
    """40 hex digits that name a ledger record. scope_root: the root run, or `*` for a global key."""
    return _digest("record", scope_root, tool, key)[:40]


def provider_key(scope_root: str, tool: str, key: str) -> str:
    """An idempotency key for providers, `guardd-` and 32 hex digits: stable, and telling nothing of run or key."""
    return "guardd-" + _digest("provider", scope_root, tool, key)[:32]


def state_digest(state: object) -> str:
    """12 hex digits of any JSON value in canonical form: a handoff's state, a value derived progress has seen.

    Raises: BadArgument: as `normalise`, with paths that begin with `state`.
    """
    try:
        value = _value(state, 0)
    except _Wrong as wrong:
        raise wrong.named("state") from None
    return _digest("state", canonical_json(value))[:12]


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


def _too_deep() -> _Wrong:
    return _Wrong("arguments are nested too deep", None, f"{NESTING_MAX} levels")


def _long_integer() -> _Wrong:
    return _Wrong("an integer is too long", None, f"{INTEGER_DIGITS_MAX} digits")


def _too_large() -> BadArgument:
    return BadArgument("arguments are too large", field="args", limit=f"{ARGS_BYTES_MAX} bytes")
