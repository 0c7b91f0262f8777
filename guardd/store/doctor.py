"""What `guardd doctor` looks at: what this store promises, what it does not, and what to mend."""

from __future__ import annotations

import hashlib
import stat
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from guardd.model.errors import GuardError, StoreRefused, StoreUnavailable
from guardd.store.base import ScriptLike, Store
from guardd.store.connect import OpenedStore
from guardd.store.embedded import find_server

SKEW_MS_MAX = 1000
_SAMPLE = 20

Level = Literal["ok", "warn", "fail"]

NOT_PROMISED = {
    "embedded": "the loss of this machine or its disk; a copy of the state directory elsewhere is yours to make",
    "memory": "what was acknowledged last, when the server loses power or fails over; guardd reports a rollback and grants nothing",
    "fsync": "the loss of this machine or its disk, a failover to a replica",
    "replicated": "Redis gives no proof: replicas have a write in memory, and may lose it when they all lose power",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. text: a sentence; of a warning or failure it says what mends it."""

    name: str
    level: Level
    text: str


async def examine(opened: OpenedStore, *, prefix: str, probe: ScriptLike) -> list[Finding]:
    """Looks at an open store.

    Args: probe: a script that only reads one key, for the round trip.
    """
    findings = _promises(opened)
    if opened.report is not None:
        for name, look in (
            ("script round trip", _round_trip(opened.store, probe, prefix)),
            ("rights", _rights(opened.store, prefix)),
            ("clock", _clock(opened.store)),
            ("other keys", _other_keys(opened.store, prefix)),
        ):
            findings.append(await _looked(name, look))
    trouble = opened.store.trouble
    findings.append(Finding("canary", "fail" if trouble else "ok", trouble or "the store is the one it was"))
    return findings


def _promises(opened: OpenedStore) -> list[Finding]:
    report, store = opened.report, opened.store
    if report is None:
        return [Finding("server", "fail", "fakeredis keeps nothing and proves nothing; it is for tests only")]
    kind = "embedded" if store.kind == "embedded" else store.durability
    return [
        Finding("server", "ok", f"{report.server} {report.version}, {store.kind}, durability {store.durability}"),
        Finding("promise", "ok", report.promise),
        Finding("not promised", "ok", NOT_PROMISED[kind]),
        *(Finding("configuration", "warn", warning) for warning in report.warnings),
    ]


async def _looked(name: str, look: Coroutine[Any, Any, tuple[Level, str]]) -> Finding:
    try:
        return Finding(name, *await look)
    except GuardError as error:
        return Finding(name, "fail", error.message)


async def _round_trip(store: Store, probe: ScriptLike, prefix: str) -> tuple[Level, str]:
    began = time.perf_counter()
    await store.script(probe, [f"{prefix}:doctor"], ["", "", ""])
    return "ok", f"a script was answered in {(time.perf_counter() - began) * 1000:.1f} ms"


async def _rights(store: Store, prefix: str) -> tuple[Level, str]:
    """Every kind of command that the guard sends, on keys of its own."""
    key = f"{prefix}:{{doctor}}"
    await store.execute(
        ("HSET", f"{key}:h", "name", "value"), ("PEXPIRE", f"{key}:h", 1000), ("HGETALL", f"{key}:h"), ("HDEL", f"{key}:h", "name"),
        ("ZADD", f"{key}:z", 1, "member"), ("ZRANGE", f"{key}:z", 0, -1), ("ZREM", f"{key}:z", "member"),
        ("XADD", f"{key}:x", "*", "name", "value"), ("XRANGE", f"{key}:x", "-", "+"), ("DEL", f"{key}:x"),
    )  # fmt: skip
    (user,) = await _unless_forbidden(store, ("ACL", "WHOAMI"))
    if user == b"default" and store.kind != "embedded":
        return "warn", "the user is default: make one of its own for guardd, with the rights in docs/store.md"
    return "ok", f"user {user.decode() if user else 'unknown'} may do what the guard does"


async def _unless_forbidden(store: Store, command: tuple[str, ...]) -> list[Any]:
    """Replies of a command that a server may not let us ask; [None] then."""
    if store.kind == "cluster":
        return [None]
    try:
        return await store.execute(command)
    except StoreUnavailable:
        return [None]


async def _clock(store: Store) -> tuple[Level, str]:
    began = time.time_ns() // 1_000_000
    found = await _unless_forbidden(store, ("TIME",))
    if found[0] is None:
        return "ok", "not looked at: the nodes of a cluster have a clock each"
    ended = time.time_ns() // 1_000_000
    skew = int(found[0][0]) * 1000 + int(found[0][1]) // 1000 - (began + ended) // 2
    if abs(skew) > SKEW_MS_MAX:
        return "warn", (
            f"the server's clock is {skew} ms off this machine's: leases and caps go by the server's, the end of "
            "deny rules by this one; set both by NTP"
        )
    return "ok", f"the server's clock is {skew} ms off this machine's"


async def _other_keys(store: Store, prefix: str) -> tuple[Level, str]:
    if store.kind == "cluster":
        return "ok", "not looked at in a cluster"
    names = [name for name in await store.execute(*[("RANDOMKEY",)] * _SAMPLE) if name]
    foreign = {name.decode(errors="replace") for name in names if not name.startswith(f"{prefix}:".encode())}
    if foreign:
        return "warn", (
            f"keys that are not guardd's are in this database (such as {min(foreign)}): a cache beside it may fill "
            "the memory; give guardd a server of its own"
        )
    return "ok", f"only keys under {prefix}: were seen"


def examine_machine(state_dir: Path, *, is_embedded: bool) -> list[Finding]:
    """The state directory, and the binary of the embedded server."""
    findings = [_directory(state_dir)]
    if is_embedded:
        try:
            binary = find_server()
            digest = hashlib.sha256(binary.read_bytes()).hexdigest()
            findings.append(Finding("server binary", "ok", f"{binary.name} of {binary.parent.name}, SHA-256 {digest}"))
        except StoreRefused as error:
            findings.append(Finding("server binary", "fail", error.message))
    return findings


def _directory(state_dir: Path) -> Finding:
    if not state_dir.exists():
        return Finding("state directory", "ok", f"{state_dir} is made at the first start")
    mode = stat.S_IMODE(state_dir.stat().st_mode)
    if mode & 0o077:
        return Finding("state directory", "fail", f"{state_dir} is open to others ({mode:o}): chmod 700 {state_dir}")
    return Finding("state directory", "ok", f"{state_dir} is open to nobody else")
