"""Effects: who may run one, and what became of it (SPEC 2.6)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.reference.canonical import Misuse
from tests.reference.policy import Rule

Key = tuple[str, str, str]  # (root run or "*", tool, key)


@dataclass
class Record:
    """One effect. A freed one is simply forgotten."""

    state: str  # claimed | committed | in_doubt
    fingerprint: str | None  # None: recorded by an operator, conflicts with nothing
    owner: tuple[str, str] | None  # (root run, call id) that may still settle it
    lease_until_ms: int = 0


class Ledger:
    """The records by name. `now` comes with each question."""

    def __init__(self) -> None:
        self.records: dict[Key, Record] = {}

    def lapsed(self, record: Record, now: int) -> bool:
        return record.state == "claimed" and now >= record.lease_until_ms

    def look(self, key: Key, fingerprint: str, rule: Rule, now: int) -> tuple[str, int]:
        """Step 8 of SPEC 2.2 without the count of replays, and the ms left of a live lease.

        Returns one of key_conflict, already_committed, in_flight, in_doubt, or free.
        """
        record = self.records.get(key)
        if record is None:
            return "free", 0
        if record.fingerprint not in (None, fingerprint):
            return "key_conflict", 0
        if record.state == "committed":
            return "already_committed", 0
        if record.state == "claimed" and not self.lapsed(record, now):
            return "in_flight", record.lease_until_ms - now
        # A lease that ended is in doubt, never free, unless the provider makes the effect idempotent.
        if rule.get("on_in_doubt") == "reclaim":
            return "free", 0
        record.state = "in_doubt"
        return "in_doubt", 0

    def claim(self, key: Key, fingerprint: str, owner: tuple[str, str], lease_until_ms: int) -> None:
        self.records[key] = Record("claimed", fingerprint, owner, lease_until_ms)

    def owned(self, key: Key, owner: tuple[str, str]) -> Record | None:
        """The record, while this owner may still settle or renew it: nobody resolved it or claimed it anew."""
        record = self.records.get(key)
        if record is None or record.owner != owner or record.state == "committed":
            return None
        return record

    def settle(self, key: Key, owner: tuple[str, str], state: str) -> bool:
        """Commit, free (`state` "freed") or put in doubt; False for a late owner."""
        record = self.owned(key, owner)
        if record is None:
            return False
        if state == "freed":
            del self.records[key]
        else:
            record.state = state
        return True

    def renew(self, key: Key, owner: tuple[str, str], lease_until_ms: int) -> bool:
        """Keep the claim; False for a late owner."""
        record = self.owned(key, owner)
        if record is None:
            return False
        record.state = "claimed"
        record.lease_until_ms = lease_until_ms
        return True

    def resolve(self, key: Key, state: str, now: int) -> None:
        """What the operator found in the outside system."""
        record = self.records.get(key)
        if record is None:
            if state == "not_executed":
                raise Misuse("unknown_operation")
            self.records[key] = Record("committed", None, None)
        elif record.state == "committed":
            raise Misuse("already_committed")
        elif record.state == "claimed" and not self.lapsed(record, now):
            raise Misuse("in_flight")
        elif state == "committed":
            record.state, record.owner = "committed", None
        else:
            del self.records[key]


def outcome(status: str, success: bool, side_effect_committed: bool | None) -> str:
    """What a result makes of the effect: committed, freed or in_doubt (SPEC 2.6)."""
    if side_effect_committed is not None:
        return "committed" if side_effect_committed else "freed"
    if status in ("progress", "complete"):
        return "committed" if success else "in_doubt"
    if status in ("permission_denied", "policy_blocked", "invalid_input", "human_required"):
        return "freed"
    return "in_doubt"
