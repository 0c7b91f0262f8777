"""`python -m tests.mutants [NAME…]`: applies each mutant to a copy of the project and names the test that catches it.

A mutant is one change of one line, written as a patch file beside this one:
`NAME.patch`, made by hand, its first line says which rule it breaks and which
tests are asked. Exit code 1 when a mutant survives or a patch does not apply.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("guardd", "lua", "tests", "pyproject.toml", "clients")
TIMEOUT_S = 400
HEAD = re.compile(r"^# (?P<rule>.+) \| (?P<tests>.+)$")


def run_one(patch: Path) -> tuple[str, str, str]:
    """(name, rule, the test that caught it or what went wrong)."""
    found = HEAD.match(patch.read_text(encoding="utf-8").splitlines()[0])
    if found is None:
        return patch.stem, "?", "SURVIVED: the first line names no rule and tests"
    with tempfile.TemporaryDirectory(prefix="guardd-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_lua"))
            elif source.is_file():
                shutil.copy(source, copy / name)
        applied = subprocess.run(
            ["git", "apply", str(patch)],
            capture_output=True,
            text=True,
            cwd=copy,
            check=False,
        )
        if applied.returncode:
            return patch.stem, found["rule"], f"SURVIVED: the patch does not apply: {applied.stderr.strip()}"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(copy), str(copy / "clients" / "python"))),
            "GUARDD_EXAMPLES": "40",
            "GUARDD_WALKS": "120",
            "GUARDD_FAULT_SCALE": "20",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:unraisableexception",
            "--no-header",
        ]
        try:
            tested = subprocess.run(
                [*command, *found["tests"].split()], capture_output=True, text=True, cwd=copy, env=environment,
                check=False, timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return patch.stem, found["rule"], f"SURVIVED: no test has failed in {TIMEOUT_S} s"
        caught = re.search(r"^(?:FAILED|ERROR) (\S+)", tested.stdout, re.MULTILINE)
        if tested.returncode == 1 and caught:
            return patch.stem, found["rule"], caught[1]
        return patch.stem, found["rule"], f"SURVIVED: pytest ended with {tested.returncode}"


def survivors(folder: Path, *names: str) -> int:
    """Runs the mutants of a folder, two at a time, prints a line each, and returns how many survived."""
    patches = sorted({path for name in names or ("*",) for path in folder.glob(f"{name}.patch")})
    survived = 0
    with ThreadPoolExecutor(2) as pool:
        for name, rule, outcome in pool.map(run_one, patches):
            survived += outcome.startswith("SURVIVED")
            print(f"{name:<28} {rule:<52} {outcome}", flush=True)
    print(f"{len(patches)} mutants, {survived} survived")
    return survived if patches else 1


def main() -> int:
    """Runs the mutants of the rules."""
    return 1 if survivors(Path(__file__).parent, *sys.argv[1:]) else 0


if __name__ == "__main__":
    sys.exit(main())
