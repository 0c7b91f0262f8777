"""Records of effects (SPEC 2.6)."""

from __future__ import annotations

from dataclasses import dataclass

Name = tuple[str, str, str]


@dataclass
class Record:
    """claimed, committed or in_doubt; a freed key has no record, but a resolved one keeps its owner out."""

    state: str
    owner: str = ""
    until: int = 0
    fp: str = ""


class Ledger:
    """All records by (root or *, tool, key)."""

    def __init__(self) -> None:
        self.records: dict[Name, Record] = {}

    def look(self, name: Name, fp: str, now: int) -> tuple[str, int]:
        """free, conflict, committed, claimed (with what is left of the lease) or in_doubt."""
        record = self.records.get(name)
        if record is None:
            return "free", 0
        if record.state == "claimed" and record.until <= now:
            record.state = "in_doubt"
        if record.fp and record.fp != fp:
            return "conflict", 0
        return record.state, record.until - now

    def claim(self, name: Name, owner: str, fp: str, until: int) -> None:
        self.records[name] = Record("claimed", owner, until, fp)

    def report(self, name: Name, owner: str, outcome: str) -> bool:
        """False: a late owner; nothing changes."""
        record = self.records.get(name)
        if record is None or record.owner != owner or record.state == "committed":
            return False
        if outcome == "free":
            del self.records[name]
        else:
            record.state = {"commit": "committed", "doubt": "in_doubt"}[outcome]
        return True

    def resolve(self, name: Name, state: str, now: int) -> str:
        """The error's name, or "" when it is settled."""
        record = self.records.get(name)
        if record and record.state == "claimed" and record.until > now:
            return "in_flight"
        if record and record.state == "committed":
            return "already_committed"
        if state == "not_executed":
            if record is None:
                return "unknown_operation"
            del self.records[name]
        elif record is None:
            self.records[name] = Record("committed")
        else:
            record.state = "committed"
        return ""
