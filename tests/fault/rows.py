"""What a fault test did and what came of it: one row of the table that `make faults` prints."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Row:
    """One fault test.

    test:      F1 to F14, N1 to N6. what: the fault, in a few words. seed: repeats it, where one was drawn.
    faults:    how many were injected. claims: calls that asked for an effect or a counted step.
    granted:   of these, how many were answered `execute`.
    doubled:   effects that the oracle outside the store counted more than once. Must be 0.
    lost:      results that were acknowledged as committed and are not readable with the same bytes. Must be 0.
    in_doubt:  effects left in doubt. killed: workers killed, the most that may be in doubt.
    note:      anything else worth a reader's time.
    """

    test: str
    what: str
    faults: int = 0
    claims: int = 0
    granted: int = 0
    doubled: int = 0
    lost: int = 0
    in_doubt: int = 0
    killed: int = 0
    seed: str = ""
    note: str = ""

    def write(self) -> None:
        """Adds the row to the report, where one is asked for (GUARDD_FAULT_ROWS names its file)."""
        if path := os.environ.get("GUARDD_FAULT_ROWS"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self)) + "\n")


def read(path: Path) -> list[Row]:
    """The rows of a report, by test."""
    rows = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: (row.test[0], int(row.test[1:]), row.what))


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ("test", "what", "faults", "claims", "granted", "doubled", "lost", "in_doubt", "killed", "seed", "note")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(getattr(row, name)) for name in head) + " |" for row in rows]
    return "\n".join(lines)


def scale(count: int, least: int = 1) -> int:
    """A count, made smaller by GUARDD_FAULT_SCALE (percent, 100 by default): mutants need fewer than the real thing."""
    return max(least, count * int(os.environ.get("GUARDD_FAULT_SCALE", "100")) // 100)
