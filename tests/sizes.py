"""Fails when a source file is longer than 400 lines without a reason given here."""

from __future__ import annotations

import sys
from pathlib import Path

LINES_MAX = 400
REASONS: dict[str, str] = {}


def main() -> int:
    """Prints each file that is too long; returns 1 when there is one."""
    root = Path(__file__).resolve().parents[1]
    files = [
        *root.glob("guardd/**/*.py"),
        *root.glob("lua/**/*.lua"),
        *root.glob("tests/**/*.py"),
        *root.glob("clients/**/*.py"),
    ]
    too_long = [
        (name, lines)
        for path in files
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LINES_MAX
        and (name := str(path.relative_to(root))) not in REASONS
    ]
    for name, lines in too_long:
        print(f"{name}: {lines} lines, at most {LINES_MAX}: split it, or give a reason in tests/sizes.py")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
