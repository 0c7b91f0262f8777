"""What looks like a secret is replaced before it is stored or logged (SPEC 5).

A secret becomes a keyed digest: the same one in two places can be seen to be
the same, and cannot be guessed from the digest. Patterns are of the well-known
token forms; detectors made for scanning repositories were weighed and are far
too slow for every call.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from typing import Any

TRACE_ARGS_BYTES_MAX = 2048
_CUT = "…[cut]"

_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:pass(?:word|wd|phrase)?|pwd|secret|token|api_?key|apikey|auth|authorization|cookie|set_cookie"
    r"|private_?key|access_?key|secret_?key|client_?secret|credentials?|session_?id|bearer|signature|otp|pin|cvv|cvc)$"
)
_HARMLESS_NAME = re.compile(r"(?:^|_)(?:page|next|next_page|continuation|cursor|sync|prev|previous)_?token$")
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_PATTERNS = re.compile(
    r"""
    -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    | \b(?:Bearer|Basic)\s+[A-Za-z0-9._~+/-]{8,}=*
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*
    | \b(?:sk|pk|rk)[-_](?:live|test|proj|ant|or)?[-_]?[A-Za-z0-9_-]{16,}
    | \b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,} | \bglpat-[A-Za-z0-9_-]{16,}
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,} | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b | \bAIza[A-Za-z0-9_-]{30,}
    | \bhf_[A-Za-z0-9]{20,} | \bnpm_[A-Za-z0-9]{30,} | \bpypi-[A-Za-z0-9_-]{16,} | \bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"""(?i)(["']?\b[\w-]*(?:password|passwd|passphrase|secret|secret[_-]?key|api[_-]?key|access[_-]?key|private[_-]?key|auth[_-]?token|access[_-]?token)["']?\s*[:=]\s*)("[^"]*"|'[^']*'|[^\s,;&"'}]+)"""
)
_URL_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@]*:)([^\s@/]+)(@)", re.IGNORECASE)
_CARD = re.compile(r"(?<![\d.])(?:\d[ -]?){12,18}\d(?![\d.])")
_MAYBE = re.compile(r"[A-Za-z0-9]{8}|://|[:=]", re.DOTALL)


def redact(value: Any, *, key: bytes, names: frozenset[str] = frozenset()) -> Any:
    """A normalised value in which secrets are replaced; the very same object when it holds none.

    Args: key:   of this installation, for the digests.
          names: more member names whose values are secret.
    """
    if isinstance(value, str):
        return redact_text(value, key=key)
    if isinstance(value, dict):
        changed: dict[str, Any] = {}
        for name, item in value.items():
            is_secret = name in names or (is_secret_name(name) and not isinstance(item, bool) and item is not None)
            clean = _mark(item, key) if is_secret else redact(item, key=key, names=names)
            if clean is not item:
                changed[name] = clean
        return {**value, **changed} if changed else value
    if isinstance(value, list):
        cleaned = [redact(item, key=key, names=names) for item in value]
        return cleaned if any(new is not old for new, old in zip(cleaned, value, strict=True)) else value
    return value


def is_secret_name(name: str) -> bool:
    """Does a member of this name hold a secret? Cursors such as `next_page_token` do not."""
    folded = _WORD_EDGE.sub("_", name).lower().replace("-", "_").replace(" ", "_").replace(".", "_")
    return bool(_SECRET_NAME.search(folded)) and not _HARMLESS_NAME.search(folded)


def redact_text(text: str, *, key: bytes) -> str:
    """Text in which tokens, passwords, private keys and card numbers are replaced; the same object when it holds none."""
    if len(text) < 8 or not _MAYBE.search(text):
        return _cards(text, key) if len(text) >= 13 else text
    clean = _PATTERNS.sub(lambda found: _mark(found[0], key), text)
    clean = _URL_USER.sub(lambda found: f"{found[1]}{_mark(found[2], key)}{found[3]}", clean)
    clean = _ASSIGNED.sub(_assigned(key), clean)
    clean = _cards(clean, key)
    return text if clean == text else clean


def _assigned(key: bytes) -> Callable[[re.Match[str]], str]:
    def replace(found: re.Match[str]) -> str:
        value = found[2]
        return found[0] if value.startswith(("[redacted:", '"[redacted:')) else f"{found[1]}{_mark(value, key)}"

    return replace


def _cards(text: str, key: bytes) -> str:
    clean = _CARD.sub(lambda found: _mark(found[0], key) if _is_card(found[0]) else found[0], text)
    return text if clean == text else clean


def _is_card(digits: str) -> bool:
    """Luhn's check over 13 to 19 digits."""
    numbers = [int(char) for char in digits if char.isdigit()]
    if not 13 <= len(numbers) <= 19 or len(set(numbers)) == 1:
        return False
    doubled = [n if i % 2 == 0 else (n * 2 - 9 if n > 4 else n * 2) for i, n in enumerate(reversed(numbers))]
    return sum(doubled) % 10 == 0


def _mark(secret: Any, key: bytes) -> str:
    digest = hmac.digest(key, repr(secret).encode("utf-8", "surrogatepass"), "sha256").hex()[:8]
    return f"[redacted:{digest}]"


def shorten(text: str, bytes_max: int = TRACE_ARGS_BYTES_MAX) -> tuple[str, bool]:
    """Text of at most so many bytes, cut between characters and marked; and whether it was cut."""
    raw = text.encode()
    if len(raw) <= bytes_max:
        return text, False
    room = bytes_max - len(_CUT.encode())
    return raw[:room].decode("utf-8", "ignore") + _CUT, True
