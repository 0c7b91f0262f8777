"""What looks like a secret is replaced before it is stored or logged (SPEC 5).

    redact        a JSON value, by member names and by what stands in its strings
    redact_text   one text: a log line, an error message, a string of the value
    shorten       text cut to what the trace keeps

A secret becomes a keyed digest: the same one in two places can be seen to be
the same, and cannot be guessed from the digest.

This runs on every call and on text that a model wrote, so every pattern is
linear in the text: it starts at a literal or at the start of a word, and what
repeats is possessive or bounded. Detectors made for scanning repositories
(detect-secrets, the patterns of gitleaks) judge files line by line and are
orders of magnitude too slow here; redacting loggers know no keyed digest.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import re
from functools import lru_cache
from typing import Any

TRACE_ARGS_BYTES_MAX = 2048
CUT = "…[cut]"
_NAME_CHARS_MAX = 64  # a name is judged by its end; bounds what the cache holds

# ---- Names -----------------------------------------------------------------
# A name is folded (`X-API-Key`, `apiKey`, `api key` are `x_api_key`, `api_key`)
# and judged by its last words, so `db_password` is secret and `password_policy` is not.
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_SECRET_NAME = re.compile(
    r"(?:"
    # words that nothing harmless ends with, glued to what stands before them or not (`pgpassword`)
    r"passw(?:or)?d|passphrase|api_?keys?|(?:secret|private|access|client|account|master)_?key"
    r"|(?:access|refresh|auth|api|bearer|session|csrf|id)_?token|client_?secret"
    # words that must stand by themselves
    r"|(?:^|_)(?:pwd|passcode|secrets?|token|(?:access|refresh|auth|api|bearer)_tokens|authorization|auth|bearer"
    r"|cookies?|credentials?|creds|(?:ssh|auth|signing|encryption|shared)_key|otp|cvv2?|cvc2?)"
    r"|(?:^|(?:^|_)(?:user|db|smtp|ftp|mysql|redis|admin|root|login|http|proxy)_)pass"
    r")(?:_?\d|_(?:hash|confirm|confirmation|again|repeat|value|base64|b64|new|old))?$"
)
_CURSOR_NAME = re.compile(
    r"(?:^|_)(?:page|paging|pagination|next|prev|previous|continuation|continue|cursor|sync|start|resume)_?token$"
)

# ---- Texts -----------------------------------------------------------------
_MARKED = r"\[redacted:[0-9a-f]{8}\]"
_MARK = re.compile(_MARKED)

# One of these, or a long number, stands in every text in which a pattern below finds something, and in every
# secret name. A text without any is spared the patterns, and most texts have none. Searching for each word is
# several times faster than one pattern of all of them.
_SUSPECT_WORDS = (
    "pass", "pwd", "secret", "token", "key", "auth", "bearer", "basic", "cookie", "cred", "otp", "cvv", "cvc", "://",
    "curl", "sk-", "sk_", "pk_", "rk_", "whsec_", "ghp_", "gho_", "ghr_", "ghu_", "ghs_", "github_pat_", "glpat-", "gldt-",
    "glrt-", "glptt-", "glcbt-", "glsoat-", "xox", "xapp-", "akia", "asia", "aiza", "hf_", "npm_", "pypi-", "sg.", "ya29.",
    "dckr_pat_", "eyj",
)  # fmt: skip
_LONG_NUMBER = re.compile(r"\d[\d -]{11}\d")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
# Credentials in headers run to the end of the line or of the string around them.
_HEADER = re.compile(
    r"""(?P<before>\b(?:authorization|cookie)\\*+["']?[ \t]{0,8}:[ \t]{0,8}\\*+["']?(?:(?:bearer|basic|token|digest)[ ]+)?)"""
    r"""(?P<secret>[^"'\\\r\n]++)""",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"(?P<before>\b(?:bearer|basic)\s{1,8})(?P<secret>[A-Za-z0-9._~+/-]{8,}+=*+)", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b(?:"
    r"sk-(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{16,}+"
    r"|[spr]k_(?:live|test)_[A-Za-z0-9]{10,}+|whsec_[A-Za-z0-9+/]{16,}+"
    r"|gh[porus]_[A-Za-z0-9]{20,}+|github_pat_[A-Za-z0-9_]{20,}+|gl(?:pat|dt|rt|ptt|cbt|soat)-[A-Za-z0-9_-]{16,}+"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}+|xapp-[A-Za-z0-9-]{10,}+"
    r"|A(?:KIA|SIA)[A-Z0-9]{16}\b|AIza[A-Za-z0-9_-]{30,}+|ya29\.[A-Za-z0-9_-]{20,}+"
    r"|hf_[A-Za-z0-9]{20,}+|npm_[A-Za-z0-9]{30,}+|pypi-[A-Za-z0-9_-]{16,}+|dckr_pat_[A-Za-z0-9_-]{16,}+"
    r"|SG\.[A-Za-z0-9_-]{16,}+\.[A-Za-z0-9_-]{16,}+"
    r"|(?<![\w-])eyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+){2,4}"
    r")"
)
_URL_PASSWORD = re.compile(r"(?P<before>://[^\s/?#@:\"'<>]{0,255}:)(?P<secret>[^\s/?#\"'<>]{1,255})(?=@)")
_CURL_USER = re.compile(
    r"(?P<before>\bcurl\b[^\n|;]{0,100}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"']{1,64}:)(?P<secret>[^\s\"']++)"
)
# The end of a name and what joins it to a value: `db_password=`, `"token": `, `\"api_key\": `, `'secret' => `,
# `password: str = ` and, for `--flags`, a blank.
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])([\w.-]++)(?:\\*+["']?\s{0,8}(?::\s{0,8}(?:str|bytes|string|SecretStr)\s{0,8}=|[:=]{1,2}>?)\s{0,8}|[ ]+)"""
)
_ASSIGNED = re.compile(
    r"""(?!\\*+["']?(?i:(?:bearer|basic|token|digest)[ ])?""" + _MARKED + r""")"""
    r"""(?:"((?:[^"\\\n]|\\.)*+)|'((?:[^'\\\n]|\\.)*+)|\\++"([^"\\]*+)|((?:[^\s,;&"'\\})\]]|[,)}\]](?=\w))++))""",
    re.DOTALL,
)
_PLACEHOLDER = re.compile(
    r"\$[A-Z_]+$|\$[{(]|<[\w -]+>$|%\(|--|[{\[(]"
    r"|(?i:null|none|true|false|undefined|str|string|bytes|int|required)$"
)  # names where a secret comes from, and is none
_NUMBER_RUN = re.compile(
    r"(?<![\w-])(?<!\d\.)(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}|\d{4}([ -])\d{6}\2\d{4,5})(?![\w])(?!\.\d)"
)
_CARD = re.compile(
    r"4\d{15}|5[0-8]\d{14}|2[2-7]\d{14}|6\d{15,18}|3[47]\d{13}|35\d{14}|3(?:0[0-5]|[689]\d)\d{11}"  # by issuer
)


def may_hold_secrets(text: str) -> bool:
    """False when this text, JSON of a whole value, surely holds nothing that `redact` replaces by itself."""
    lowered = text.lower()
    for word in _SUSPECT_WORDS:  # not any(…): a generator takes a third longer
        if word in lowered:
            return True
    return _LONG_NUMBER.search(text) is not None


def redact(value: Any, *, key: bytes, names: frozenset[str] = frozenset()) -> Any:
    """A normalised value in which every secret is `[redacted:` + 8 hex digits + `]`.

    A member of a secret name loses its whole value, but for null, booleans and "", which tell nothing; so do
    `value` beside a secret `name` or `key` (`{"name": "DB_PASSWORD", "value": …}`) and what follows a secret
    flag in a list (`["--password", …]`). All other strings, and member names, are searched.

    Args:    key:   of this installation; HMAC-SHA256 under it makes the digests.
             names: more member names, exact, whose values are secret (`redact` of a tool rule).
    Returns: a copy, or the very same object when it holds no secret.
    """
    if isinstance(value, str):
        return redact_text(value, key=key)
    if isinstance(value, dict):
        return _redact_object(value, key, names)
    if isinstance(value, list):
        cleaned: list[Any] = []
        after_flag = False
        for item in value:
            cleaned.append(_hide(item, key) if after_flag else redact(item, key=key, names=names))
            after_flag = isinstance(item, str) and item[:1] == "-" and "=" not in item and is_secret_name(item)
        return cleaned if any(new is not old for new, old in zip(cleaned, value, strict=True)) else value
    if type(value) is int and value >= 10**12 and _is_card(str(value)):
        return _mark(str(value), key)
    return value


def _redact_object(value: dict[str, Any], key: bytes, names: frozenset[str]) -> dict[str, Any]:
    label = (value.get("name") or value.get("key")) if "value" in value else None
    labelled = isinstance(label, str) and (label in names or is_secret_name(label))
    cleaned: dict[str, Any] = {}
    changed = False
    for name, item in value.items():
        if name in names or is_secret_name(name) or (labelled and name == "value"):
            clean = _hide(item, key)
        else:
            clean = redact(item, key=key, names=names)
        clean_name = redact_text(name, key=key)
        changed = changed or clean is not item or clean_name is not name
        cleaned[clean_name] = clean
    return cleaned if changed else value


def is_secret_name(name: str) -> bool:
    """Does a member of this name hold a secret? `db_password`, `X-Api-Key` do; `next_page_token`, `max_tokens` not."""
    return _is_secret_name(name[-_NAME_CHARS_MAX:])


@lru_cache(maxsize=4096)
def _is_secret_name(name: str) -> bool:
    folded = _SEPARATORS.sub("_", _WORD_EDGE.sub("_", name).lower()).strip("_")
    return _SECRET_NAME.search(folded) is not None and _CURSOR_NAME.search(folded) is None


def redact_text(text: str, *, key: bytes) -> str:
    """Text in which tokens, passwords, private keys and card numbers are replaced; the same object when it holds none.

    What was replaced before stays as it is, so a text may pass here twice.
    """
    if len(text) < 6 or not may_hold_secrets(text):
        return text

    def hide(found: re.Match[str]) -> str:
        return _mark(found[0], key)

    def hide_secret(found: re.Match[str]) -> str:
        secret = found["secret"]
        return found[0] if _MARK.fullmatch(secret) else found["before"] + _mark(secret, key)

    def hide_scheme(found: re.Match[str]) -> str:
        return hide_secret(found) if _is_credential(found["before"], found["secret"]) else found[0]

    def hide_card(found: re.Match[str]) -> str:
        return _mark(found[0], key) if _is_card(found[0]) else found[0]

    clean = _PRIVATE_KEY.sub(hide, text)
    clean = _HEADER.sub(hide_secret, clean)
    clean = _SCHEME.sub(hide_scheme, clean)
    clean = _TOKEN.sub(hide, clean)
    clean = _URL_PASSWORD.sub(hide_secret, clean)
    clean = _CURL_USER.sub(hide_secret, clean)
    clean = _hide_assigned(clean, key)
    clean = _NUMBER_RUN.sub(hide_card, clean)
    return text if clean == text else clean


def _is_credential(scheme: str, word: str) -> bool:
    """Tells `Bearer c2Vj…` and `Basic dXNlcjpw…` from `bearer certificates` and `basic authentication`."""
    is_noise = any(char.isdigit() or char in "+=~" for char in word) or not (word[1:].islower() or word.isupper())
    if scheme[:2].lower() == "be" or (is_noise and len(word) >= 16):
        return is_noise
    try:
        return b":" in base64.b64decode(word + "=" * (-len(word) % 4), validate=True)
    except binascii.Error:
        return False


def _hide_assigned(text: str, key: bytes) -> str:
    """Replaces what a secret name is given, as in `password=…`, `"token": "…"` and `--api-key …`."""
    parts: list[str] = []
    done = 0
    for found in _ASSIGNMENT.finditer(text):
        name = found[1]
        if found.start() < done or (found[0][-1] == " " and found[0].rstrip(" ") == name and name[:2] != "--"):
            continue
        if not is_secret_name(name):
            continue
        value = _ASSIGNED.match(text, found.end())
        if value is None:
            continue
        group = value.lastindex or 0
        secret = value[group]
        if not secret or _PLACEHOLDER.match(secret):
            continue
        parts += (text[done : value.start(group)], _mark(secret, key))
        done = value.end(group)
    return "".join(parts) + text[done:] if parts else text


def _is_card(number: str) -> bool:
    """A number of a known issuer and length whose last digit is right (Luhn)."""
    digits = number.replace(" ", "").replace("-", "")
    if not _CARD.fullmatch(digits):
        return False
    doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (doubled + sum(map(int, digits[-1::-2]))) % 10 == 0


def _hide(value: Any, key: bytes) -> Any:
    if value is None or isinstance(value, bool) or value == "":
        return value
    if isinstance(value, str):
        return value if _MARK.fullmatch(value) else _mark(value, key)
    return _mark(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False), key)


def _mark(secret: str, key: bytes) -> str:
    return f"[redacted:{hmac.digest(key, secret.encode('utf-8', 'surrogatepass'), 'sha256').hex()[:8]}]"


def shorten(text: str, bytes_max: int = TRACE_ARGS_BYTES_MAX) -> tuple[str, bool]:
    """Text of at most `bytes_max` (≥ 8, the mark's own length) bytes of UTF-8, and whether it was cut.

    The cut is between characters and marked with `…[cut]`.
    """
    if len(text) <= bytes_max // 4:
        return text, False
    raw = text.encode("utf-8", "replace")
    if len(raw) <= bytes_max:
        return text, False
    return raw[: bytes_max - len(CUT.encode())].decode("utf-8", "ignore") + CUT, True
