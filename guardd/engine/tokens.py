"""Tokens: who may ask over a connection, as which role, about which runs (SPEC 5).

A token's text is `guardd_<id>_<secret>`; the store holds the SHA-256 of the
secret alone. Each engine holds all tokens and re-reads them every second, as it
does deny rules; one that could not read them for 5 s knows nobody any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from typing import Any

import msgspec

from guardd.engine.deny_rules import REREAD_S, STALE_S
from guardd.engine.link import Link
from guardd.keys import Keys
from guardd.model.errors import StoreUnavailable
from guardd.model.ids import check_name, check_run
from guardd.protocol.operations import Role, TokenNew

SECRET_BYTES = 32
UNKNOWN_REREAD_S = 0.1
"""An id that is not known may be new: how often such ids are looked for in the store."""
TOKEN = re.compile(r"guardd_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")


class StoredToken(msgspec.Struct, frozen=True):
    """A token as it stands in the store, JSON."""

    sha256: str
    role: Role
    created_ms: int
    run_prefix: str = ""
    name: str = ""
    expires_ms: int | None = None

    @property
    def is_over(self) -> bool:
        """True once it has expired."""
        return self.expires_ms is not None and time.time_ns() // 1_000_000 >= self.expires_ms


class Tokens:
    """The tokens there are, as of at most a second ago."""

    def __init__(self, store: Link, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._tokens: dict[str, StoredToken] = {}
        self._read_s = float("-inf")
        self._looking = asyncio.Lock()

    async def ensure_fresh(self) -> None:
        """Re-reads the tokens when they are older than a second.

        Raises: StoreUnavailable: they are older than 5 s and cannot be read.
        """
        age_s = time.monotonic() - self._read_s
        if age_s < REREAD_S:
            return
        try:
            await self.read()
        except StoreUnavailable:
            if age_s >= STALE_S:
                raise

    async def read(self) -> None:
        """Reads all tokens from the store."""
        asked_s = time.monotonic()
        (stored,) = await self._store.execute(("HGETALL", self._keys.tokens))
        if asked_s < self._read_s:  # an answer that was overtaken by a younger one
            return
        items = stored.items() if isinstance(stored, dict) else zip(stored[::2], stored[1::2], strict=True)
        self._tokens = {
            (name.decode() if isinstance(name, bytes) else name): msgspec.json.decode(token, type=StoredToken)
            for name, token in items
        }
        self._read_s = asked_s

    async def _look_again(self, arrived_s: float) -> None:
        """A token that is not known may be new. Looking waits a little, so that guesses cost the store little."""
        async with self._looking:
            if self._read_s <= arrived_s:
                await asyncio.sleep(max(0.0, self._read_s + UNKNOWN_REREAD_S - time.monotonic()))
                await self.read()

    async def find(self, token_id: str) -> StoredToken | None:
        """A token that is valid now, by its id; None: unknown, revoked or expired.

        Raises: StoreUnavailable: the tokens cannot be read.
        """
        await self.ensure_fresh()
        found = self._tokens.get(token_id)
        return None if found is None or found.is_over else found

    async def check(self, text: str) -> str | None:
        """The id of a valid token by its text; None: it is none.

        Raises: StoreUnavailable: the tokens cannot be read.
        """
        parts = TOKEN.fullmatch(text)
        token_id, secret = (parts[1], parts[2]) if parts else ("", "")
        if parts and token_id not in self._tokens:
            await self._look_again(time.monotonic())
        found = await self.find(token_id)
        expected = found.sha256 if found is not None else _sha256("")
        is_same = hmac.compare_digest(_sha256(secret), expected)
        return token_id if found is not None and is_same else None

    async def has_operator(self) -> bool:
        """True when a token can make others."""
        await self.read()
        return any(t.role == "operator" and not t.run_prefix and not t.is_over for t in self._tokens.values())

    async def make(self, request: TokenNew) -> dict[str, Any]:
        """Stores a new token. Its text stands in the answer and nowhere else.

        Raises: BadArgument: name or prefix are malformed.
        """
        if request.name:
            check_name("name", request.name)
        if request.run_prefix:
            check_run(request.run_prefix.rstrip("/"))
        token_id, secret = secrets.token_hex(6), secrets.token_urlsafe(SECRET_BYTES)
        now_ms = time.time_ns() // 1_000_000
        token = StoredToken(
            _sha256(secret), request.role, now_ms, request.run_prefix or "", request.name,
            None if request.expires_in_ms is None else now_ms + request.expires_in_ms,
        )  # fmt: skip
        await self._store.execute(("HSET", self._keys.tokens, token_id, msgspec.json.encode(token)))
        await self.read()
        return {"token": f"guardd_{token_id}_{secret}", **_shown(token_id, token)}

    async def listed(self) -> list[dict[str, Any]]:
        """All tokens, oldest first, without what proves them."""
        await self.read()
        return [
            _shown(name, token) for name, token in sorted(self._tokens.items(), key=lambda each: each[1].created_ms)
        ]

    async def revoke(self, token_id: str) -> dict[str, Any]:
        """Takes a token away; `revoked` is false when there was none."""
        (removed,) = await self._store.execute(("HDEL", self._keys.tokens, token_id))
        await self.read()
        return {"id": token_id, "revoked": bool(removed)}


def hide_tokens(text: str) -> str:
    """The text without what looks like a token of ours."""
    return re.sub(r"guardd_[0-9a-f]{12}_[A-Za-z0-9_-]+", "guardd_#", text)


def _shown(token_id: str, token: StoredToken) -> dict[str, Any]:
    return {
        "id": token_id, "role": token.role, "name": token.name, "run_prefix": token.run_prefix,
        "created_ms": token.created_ms, "expires_ms": token.expires_ms, "expired": token.is_over,
    }  # fmt: skip


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
