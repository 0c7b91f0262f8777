"""`python -m tests.fault [--long]`: runs the fault tests, then their mutants, and prints one table.

Exit code 1 when a test fails, an effect ran twice, a result was lost, or a mutant survives.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fault import rows
from tests.mutants.__main__ import survivors

HERE = Path(__file__).parent


def main() -> int:
    """Runs the short tier, or with --long the long one."""
    is_long = "--long" in sys.argv
    folder = HERE / "long" if is_long else HERE
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="guardd-faults-") as scratch:
        report = Path(scratch) / "rows.jsonl"
        report.touch()
        command = [sys.executable, "-m", "pytest", "-q", str(folder), *([] if is_long else ["-n", "2", "--ignore", str(HERE / "long")])]  # fmt: skip
        code = subprocess.run(command, env={**os.environ, "GUARDD_FAULT_ROWS": str(report)}, check=False).returncode
        found = rows.read(report)
    left = 0 if is_long else survivors(HERE / "mutants")
    print(rows.table(found))
    print(
        f"\n{len(found)} rows: {sum(row.faults for row in found)} faults, {sum(row.claims for row in found)} claims, "
        f"{sum(row.doubled for row in found)} effects executed twice, {sum(row.lost for row in found)} committed results lost, "
        f"{sum(row.in_doubt for row in found)} in doubt of {sum(row.killed for row in found)} workers killed; "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if code or left or not found or any(row.doubled or row.lost for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
