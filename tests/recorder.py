"""Every answer of the suite is held against the table of operations; what was never seen fails the suite.

Each test process writes what it saw; the last word is the controller's, and only
when the whole suite ran.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.protocol.operations import COMMON_ERRORS, OPERATIONS
from guardd.server.gate import Gate

SEEN: set[str] = set()


def said(name: str, answer: Any) -> str:
    """An answer as the table lists it."""
    if not hasattr(answer, "action"):
        return f"{name}: value"
    if answer.action == "stop":
        return f"{name}: stop *"
    return f"{name}: {answer.action} {answer.reason}".rstrip()


def listed() -> set[str]:
    """Everything the table says can come."""
    every: set[str] = set()
    for operation in OPERATIONS.values():
        every |= {f"{operation.name}: {answer}" for answer in operation.answers or ("value",)}
        every |= {f"{operation.name}: error {error}" for error in (*COMMON_ERRORS, *operation.errors)}
    return every


LISTED = listed()
NOT_FOR_EACH = {"clock_not_allowed", "not_allowed", "store_unavailable", "audit_unavailable"}
"""Errors of every operation that come from one place: seeing them once is enough."""


def install() -> None:
    """Records from now on, and fails a test whose answer is not in the table."""
    real = Engine.call

    @functools.wraps(real)
    async def call(self: Engine, name: str, params: Any, **options: Any) -> Any:
        try:
            answer = await real(self, name, params, **options)
        except GuardError as error:
            if name in OPERATIONS:
                _note(f"{name}: error {error.name}")
            raise
        _note(said(name, answer))
        return answer

    Engine.call = call  # type: ignore[method-assign]
    real_gate = Gate.call

    @functools.wraps(real_gate)
    async def through(self: Gate, caller: Any, name: str, params: Any) -> Any:
        try:
            return await real_gate(self, caller, name, params)
        except GuardError as error:
            if name in OPERATIONS:
                _note(f"{name}: error {error.name}")
            raise

    Gate.call = through  # type: ignore[method-assign]


def _note(entry: str) -> None:
    assert entry in LISTED, f"the table of operations does not list {entry!r}"
    SEEN.add(entry)


def finish(session: pytest.Session) -> None:
    """Writes what this process saw; the controller adds it up."""
    config = session.config
    folder = Path(os.environ.get("GUARDD_RECORD_DIR") or config.rootpath / ".pytest_cache" / "recorder")
    folder.mkdir(parents=True, exist_ok=True)
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker:
        (folder / f"{worker}.json").write_text(json.dumps(sorted(SEEN)))
        return
    seen = set(SEEN)
    for path in folder.glob("*.json"):
        seen |= set(json.loads(path.read_text()))
        path.unlink()
    is_whole = not config.option.keyword and not config.option.markexpr and config.args == config.getini("testpaths")
    if not is_whole or session.testsfailed:
        return
    missing = {entry for entry in LISTED - seen if entry.rpartition(" ")[2] not in NOT_FOR_EACH}
    missing |= {word for word in NOT_FOR_EACH if not any(entry.endswith(word) for entry in seen)}
    if missing:
        print(
            "\nnever seen in this suite, although the table of operations lists it:\n  " + "\n  ".join(sorted(missing))
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
