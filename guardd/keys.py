"""Every key in the store: its name, type and how long it lives (SPEC 3).

All keys of a tree carry the root run's id as hash tag, so they are in one slot
and one script may change them together.
"""

from __future__ import annotations

from binascii import crc_hqx
from dataclasses import dataclass
from functools import cache
from typing import NewType

from guardd.model.ids import parents, root

Key = NewType("Key", str)
"""The name of a key, made here and nowhere else."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of keys under one prefix.

    Args: prefix: `guardd` unless two guards share a server. 1 to 64 of A-Z a-z 0-9 . _ -
    """

    prefix: str = "guardd"

    def run(self, run: str) -> Key:
        """Hash: state and counters of one run. Lives run_ttl after its last write."""
        head, slash, rest = run.partition("/")
        return Key(f"{self.prefix}:{{{head}}}{slash}{rest}:run")

    def chain(self, run: str) -> list[Key]:
        """Run hashes of the ancestors and of the run itself, root first."""
        return [self.run(each) for each in (*parents(run), run)]

    def marks(self, run: str) -> Key:
        """Hash: what one run remembers of fingerprints, tools, targets, keys, agents. Lives run_ttl."""
        head, slash, rest = run.partition("/")
        return Key(f"{self.prefix}:{{{head}}}{slash}{rest}:marks")

    def calls(self, run: str) -> Key:
        """Hash: in-flight calls and the newest answers of the tree. Lives run_ttl."""
        return Key(f"{self.prefix}:{{{root(run)}}}:calls")

    def trace(self, run: str) -> Key:
        """Stream: what happened in the tree, bounded. Lives run_ttl."""
        return Key(f"{self.prefix}:{{{root(run)}}}:trace")

    def op(self, run: str, digest: str) -> Key:
        """Hash: ledger record of a run-scoped key. No expiry while claimed or in doubt, else ledger_ttl."""
        return Key(f"{self.prefix}:{{{root(run)}}}:op:{digest}")

    def no_op(self, run: str) -> Key:
        """Stands for the ledger record in calls without a run-scoped key; it is never touched."""
        return self.op(run, "none")

    def global_op(self, digest: str) -> Key:
        """Hash: ledger record of a global key; as `op`."""
        return Key(f"{self.prefix}:{{op:{digest}}}:op")

    @property
    def runs(self) -> Key:
        """Sorted set: recent root runs by last_ms; a hint. No expiry, trimmed by the sweep."""
        return Key(f"{self.prefix}:runs")

    @property
    def doubt(self) -> Key:
        """Sorted set: ledger records by the end of their lease; a hint. No expiry."""
        return Key(f"{self.prefix}:doubt")

    @property
    def deny(self) -> Key:
        """Hash: deny rules by id. No expiry; a rule carries its own end."""
        return Key(f"{self.prefix}:deny")

    @property
    def canary(self) -> Key:
        """Hash: id, beat, `beat:<daemon>`, suspect, confirmed: whether the store is still the one it was. No expiry."""
        return Key(f"{self.prefix}:canary")

    def cluster_canaries(self) -> list[Key]:
        """The canaries of a Cluster: one for each 512 slots, so that every primary of a usual cluster holds some."""
        return [Key(f"{self.prefix}:{{{tag}}}:canary") for tag in _tags()]

    @property
    def tokens(self) -> Key:
        """Hash: tokens by id, with the digest of the secret alone. No expiry; a token carries its own end."""
        return Key(f"{self.prefix}:tokens")

    @property
    def audit(self) -> Key:
        """Stream: who asked what of an operator's operations. No expiry; about the newest 100,000 entries."""
        return Key(f"{self.prefix}:audit")

    @property
    def events(self) -> str:
        """Channel: stops, freezes and resumes, for watchers."""
        return f"{self.prefix}:events"


SLOTS, CANARIES = 16_384, 32


def slot_of(key: str | bytes) -> int:
    """The Cluster slot of a key, 0 to 16383: CRC16 of its hash tag, where it has one that is not empty."""
    name = key.encode() if isinstance(key, str) else key
    start = name.find(b"{")
    end = name.find(b"}", start + 1)
    tag = name[start + 1 : end] if start >= 0 and end > start + 1 else name
    return crc_hqx(tag, 0) % SLOTS


@cache
def _tags() -> tuple[str, ...]:
    """The first number, as text, that hashes into each of the slots 0, 512, 1024, ..."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < CANARIES:
        slot = slot_of(str(number))
        if slot % (SLOTS // CANARIES) == 0:
            found.setdefault(slot, str(number))
        number += 1
    return tuple(found[slot] for slot in sorted(found))
